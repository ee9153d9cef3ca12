"""What a model is made of below its layers: operations with their gradients, and the shapes that they work on."""

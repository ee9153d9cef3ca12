"""Operations that models are made of, with their gradients and weights, and the shapes that they work on."""

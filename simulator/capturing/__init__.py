"""Capturing a PyTorch module as a model: its forward and backward pass on tensors without data."""

"""Models that were captured from PyTorch modules: what their files hold."""

from simulator.captured.model import (
    INPUT,
    CapturedKernel,
    CapturedModel,
    CapturedNode,
    CapturedPart,
    CapturedTensor,
    CapturedType,
    CapturedWeight,
)

__all__ = [
    "INPUT",
    "CapturedKernel",
    "CapturedModel",
    "CapturedNode",
    "CapturedPart",
    "CapturedTensor",
    "CapturedType",
    "CapturedWeight",
]

"""Models that were captured from PyTorch modules: what their files hold."""

from simulator.captured.model import (
    CapturedKernel,
    CapturedModel,
    CapturedNode,
    CapturedPart,
    CapturedTensor,
    CapturedWeight,
)

__all__ = [
    "CapturedKernel",
    "CapturedModel",
    "CapturedNode",
    "CapturedPart",
    "CapturedTensor",
    "CapturedWeight",
]

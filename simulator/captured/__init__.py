"""Models that were captured from PyTorch modules: what their files hold."""

from simulator.captured.model import (
    INPUT,
    CapturedInput,
    CapturedKernel,
    CapturedModel,
    CapturedNode,
    CapturedPart,
    CapturedTensor,
    CapturedType,
    CapturedWeight,
    heads_of,
    part_flops,
    sample_of,
)

__all__ = [
    "INPUT",
    "CapturedInput",
    "CapturedKernel",
    "CapturedModel",
    "CapturedNode",
    "CapturedPart",
    "CapturedTensor",
    "CapturedType",
    "CapturedWeight",
    "heads_of",
    "part_flops",
    "sample_of",
]

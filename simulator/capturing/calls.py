"""Calls of PyTorch's operations, and the kernels that they launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simulator.captured import CapturedType
from simulator.errors import InputError
from simulator.program import Kernel

#: Names of torch's types here.
DTYPES: dict[str, CapturedType] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Launch(NamedTuple):
    """A kernel, and the numbers of the outputs that it makes; ``outputs`` of all of them are None."""

    kernel: Kernel
    outputs: tuple[int, ...] | None = None
    label: str = ""


class Call(NamedTuple):
    """One call of an operation. ``inputs`` and ``outputs`` are its tensors in order."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its place or name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


def type_name(tensor: Any) -> str:
    """Return the name of a tensor's type here. Raises `InputError` of one that products are not simulated in."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError("products of this type are not simulated", found=name, allowed=", ".join(DTYPES))
    return DTYPES[name]


def moved_bytes(tensor: Any) -> float:
    """Return the bytes that reading or writing ``tensor`` moves: of an expanded one, those that are there."""
    if tensor.numel() == 0:
        return 0.0
    there = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return float(there * tensor.element_size())


def any_type(tensor: Any) -> str:
    """Return the name of a tensor's type here, of one that has none that of fp32."""
    return DTYPES.get(str(tensor.dtype).removeprefix("torch."), "fp32")

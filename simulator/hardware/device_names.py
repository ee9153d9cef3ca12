"""Names of GPUs as drivers write them, and the type of GPU that each means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

#: Form factors that drivers always write.
_WRITTEN = ("pcie", "nvl")
#: Parts of a name that say how a GPU is built, which drivers write in other ways or not at all: form factor, memory.
_BUILT = re.compile(r"(sxm|pcie|oam|nvl)\d*|(\d+)gb")


def is_of_type(name: str, gpu: str) -> bool:
    """Return True where a GPU that its driver calls ``name`` is of the type ``gpu``.

    All parts of the type's name before form factor and memory are words of the driver's name. Where the driver's name
    has these two as well, they are the type's. Drivers always write PCIe and NVL: a name without them means neither.

    >>> is_of_type("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"), is_of_type("NVIDIA H200", "h100-sxm-80gb")
    (True, False)
    >>> is_of_type("NVIDIA H100 80GB HBM3", "h100-pcie-80gb"), is_of_type("NVIDIA H100 PCIe", "h100-pcie-80gb")
    (False, True)
    >>> is_of_type("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"), is_of_type("Tesla V100-SXM2-32GB", "v100-sxm-32gb")
    (True, True)
    >>> is_of_type("NVIDIA H100 PCIe", "h100-sxm-80gb"), is_of_type("NVIDIA A100-SXM4-40GB", "a100-sxm-80gb")
    (False, False)
    """
    parts, words = gpu.lower().split("-"), re.findall(r"[a-z0-9]+", name.lower())
    called = takewhile(lambda part: not _BUILT.fullmatch(part), parts)
    stated, has = (_built(some) for some in (words, parts))
    if has.get("form") in _WRITTEN and "form" not in stated:
        return False
    return {*called} <= {*words} and all(has.get(what, how) == how for what, how in stated.items())


def _built(words: Sequence[str]) -> dict[str, str]:
    """Form factor and memory, where they are said."""
    matches = [match for match in map(_BUILT.fullmatch, words) if match]
    return {"form" if match[1] else "memory": match[1] or match[2] for match in matches}

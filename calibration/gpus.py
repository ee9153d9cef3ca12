"""GPUs in the environment of a measurement: their type, the first card's figures, and the driver."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

#: Parts of a name that say how a GPU is built, which drivers write in other ways or not at all: form factor, memory.
_BUILT = re.compile(r"(sxm|pcie|oam|nvl)\d*|(\d+)gb")


def is_of_type(name: str, gpu: str) -> bool:
    """Return True where a GPU that its driver calls ``name`` is of the type ``gpu``.

    All parts of the type's name before form factor and memory are words of the driver's name. Where the driver's name
    has these two as well, they are the type's.

    >>> is_of_type("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"), is_of_type("NVIDIA H200", "h100-sxm-80gb")
    (True, False)
    >>> is_of_type("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"), is_of_type("Tesla V100-SXM2-32GB", "v100-sxm-32gb")
    (True, True)
    >>> is_of_type("NVIDIA H100 PCIe", "h100-sxm-80gb"), is_of_type("NVIDIA A100-SXM4-40GB", "a100-sxm-80gb")
    (False, False)
    """
    parts, words = gpu.lower().split("-"), re.findall(r"[a-z0-9]+", name.lower())
    called = takewhile(lambda part: not _BUILT.fullmatch(part), parts)
    stated, has = (_built(some) for some in (words, parts))
    return {*called} <= {*words} and all(has.get(what, how) == how for what, how in stated.items())


def _built(words: Sequence[str]) -> dict[str, str]:
    """Form factor and memory, where they are said."""
    matches = [match for match in map(_BUILT.fullmatch, words) if match]
    return {"form" if match[1] else "memory": match[1] or match[2] for match in matches}


def card_of(environment: Mapping[str, Any]) -> str:
    """Return nvidia-smi's figures of the first GPU, separated by commas; empty where it said nothing."""
    lines = environment.get("nvidia_smi")
    return str(lines[1]) if isinstance(lines, list | tuple) and len(lines) > 1 else ""


def driver_of(environment: Mapping[str, Any]) -> str:
    """The version of the driver; empty where nvidia-smi did not say it."""
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", card_of(environment))
    return version[0] if version else ""

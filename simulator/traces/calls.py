"""Kinds of calls of a GPU's runtime and driver, by their names in CUDA and HIP."""

from __future__ import annotations

from typing import Literal

#: ``launch``: a kernel, a graph or a memset. ``copy``: a copy, which may hold the host up. ``synchronize``: the host
#: waits. ``record``: of an event. ``wait``: of a stream for an event.
CallKind = Literal["launch", "copy", "synchronize", "record", "wait"]
CALL_KINDS: tuple[CallKind, ...] = ("launch", "copy", "synchronize", "record", "wait")
#: Part of a name in small letters -> kind, in the order in which they decide.
_PARTS: dict[str, CallKind] = {
    "launch": "launch",
    "memset": "launch",
    "memcpy": "copy",
    "synchronize": "synchronize",
    "eventrecord": "record",
    "waitevent": "wait",
}


def call_kind(name: str) -> CallKind | None:
    """Return the kind of a call; None of one that only takes the host's time.

    >>> call_kind("cuLaunchKernelEx"), call_kind("hipMemcpyWithStream"), call_kind("cudaEventQuery")
    ('launch', 'copy', None)
    """
    lower = name.lower()
    return next((kind for part, kind in _PARTS.items() if part in lower), None)

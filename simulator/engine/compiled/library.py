"""The library of the compiled event loop, and its structures as `loop.h` has them."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.engine.compiled.build import FOLDER, LIBRARY, digest

RUNNING, ENDED, CALLBACK_FAILED, CALLS_DIFFER, OUT_OF_MEMORY = range(5)
SEGMENT, COLLECTIVE_CALL, OVERLAPPED_CALL = range(3)
RUN_BLOCK, RUN_COMM, RUN_BATCH = range(3)
NO_STEP, A_STEP, A_RENDEZVOUS, AN_EXTENSION = range(4)
NEXT_EXTENSION, HAND_OUT = range(2)
NO_MORE, AT_RELEASE = range(2)
IS_FIRST, IS_LAST, IN_ROW = 1, 2, 4

_int, _long, _real, _pointer = c_int32, c_int64, c_double, c_void_p


#: An array of the loop's structures.
Records = NDArray[Any]


class CommKindRecord(Structure):
    """`CommKind` of the loop."""

    _fields_ = (
        ("nbytes", _real),
        ("op", _int),
        ("lane_name", _int),
        ("paired", ctypes.c_bool),
        ("spins", ctypes.c_bool),
        ("holds_sms", ctypes.c_bool),
        ("host_waits", ctypes.c_bool),
    )


class CallRecord(Structure):
    """`Call` of the loop."""

    _fields_ = (
        ("memory_demand", _real),
        ("kind", _int),
        ("channel", _int),
        ("planned", _int),
        ("template", _int),
        ("count", _int),
    )


class TemplateRecord(Structure):
    """`Template` of the loop."""

    _fields_ = (
        ("work_s", _pointer),
        ("launched_s", _pointer),
        ("is_kernel", _pointer),
        ("memory_left", _pointer),
        ("beside", _pointer),
        ("starts_s", _pointer),
        ("ends_s", _pointer),
        ("least_left", _real),
        ("n_ops", _int),
    )


class PacedRecord(Structure):
    """`PacedTemplate` of the loop."""

    _fields_ = (
        ("speed", _pointer),
        ("seconds", _pointer),
        ("starts_s", _pointer),
        ("ends_s", _pointer),
        ("lag_s", _pointer),
    )


class WorkRecord(Structure):
    """`HostWork` of the loop."""

    _fields_ = (
        ("first_issue", _pointer),
        ("issue_label", _pointer),
        ("issue_s", _pointer),
        ("start_s", _pointer),
        ("comm_s", _pointer),
    )


class ShareRecord(Structure):
    """`Share` of the loop."""

    _fields_ = (
        ("steps", _pointer),
        ("after", _pointer),
        ("batches", _pointer),
        ("release_s", _real),
        ("extension", _int),
        ("first", _int),
        ("n_steps", _int),
        ("first_step", _int),
        ("host_work", _int),
    )


_Load = CFUNCTYPE(None, _int, _int, _int, POINTER(_int))
_Paced = CFUNCTYPE(None, _int, _int)
_Meeting = CFUNCTYPE(None, _int, _int, POINTER(_int))
_Cut = CFUNCTYPE(None, _int, _int, _int, _int, POINTER(_int))
_Call = CFUNCTYPE(None, _int, _int)
_Grow = CFUNCTYPE(None, _int, _int, _real, POINTER(_real))
_Mark = CFUNCTYPE(None, _real)


class QuestionsRecord(Structure):
    """`Questions` of the loop: where answers are written, and what it asks of Python."""

    _fields_ = (
        ("answer", POINTER(_int)),
        ("load", _Load),
        ("paced", _Paced),
        ("meeting", _Meeting),
        ("cut", _Cut),
        ("call", _Call),
        ("grow", _Grow),
        ("mark", _Mark),
    )


#: `Step`, `TaggedComm`, `Piece`, `Span`, `Stretched`, `Saturation` and `Crosser` of the loop.
STEP = np.dtype(
    [(name, np.int32) for name in ("kind", "op", "n_ops", "tag", "label", "first_after", "n_after", "phase")]
)
TAGGED_COMM = np.dtype([("kind", np.int32), ("tag", np.int32)])
PIECE = np.dtype(
    [(name, np.float64) for name in ("seconds", "issue_s", "tail_s")]
    + [(name, np.int32) for name in ("kind", "template", "comm", "n_segments", "host_waits", "unused")]
)
SPAN = np.dtype(
    [(name, np.float64) for name in ("posted_s", "launched_s", "start_s", "end_s")]
    + [(name, np.int32) for name in ("rank", "lane_name", "position", "step", "template", "flags")]
)
STRETCHED = np.dtype([("span", np.int64), ("at", np.int64), ("n_ops", np.int32), ("unused", np.int32)])
SATURATION = np.dtype([("seconds", np.float64), ("first", np.int64), ("link", np.int32), ("n", np.int32)])
CROSSER = np.dtype([("rate_Bps", np.float64), ("cap_Bps", np.float64), ("phase", np.int32), ("is_held_up", np.int32)])
#: In the order in which the loop says their sizes.
RECORDS = (
    *(CommKindRecord, CallRecord, TemplateRecord, PacedRecord, WorkRecord, ShareRecord, QuestionsRecord),
    *(STEP, TAGGED_COMM, PIECE, SPAN, STRETCHED, SATURATION, CROSSER),
)

#: Function of the loop -> type of its result, types of its arguments.
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "new_simulation": (_pointer, [POINTER(QuestionsRecord), _pointer, *[_int] * 5, _real, _real, _int]),
    "free_simulation": (None, [_pointer]),
    "add_phase": (_int, [_pointer, _real, _real, _real, _int, _pointer, _pointer]),
    "add_planned": (_int, [_pointer, _int, _pointer, _int]),
    "work_out_rates": (_int, [_pointer, _int, _pointer, _pointer]),
    "add_alone": (_int, [_pointer, _int, _long]),
    "prolong": (_int, [_pointer, _int, _real]),
    "add_kind": (_int, [_pointer, POINTER(CommKindRecord)]),
    "add_call": (_int, [_pointer, POINTER(CallRecord)]),
    "add_template": (_int, [_pointer, POINTER(TemplateRecord)]),
    "add_paced": (_int, [_pointer, POINTER(PacedRecord)]),
    "add_pieces": (_int, [_pointer, _int, _pointer]),
    "add_cut": (_int, [_pointer, _int, _int]),
    "add_work": (_int, [_pointer, POINTER(WorkRecord)]),
    "describe_role": (_int, [_pointer, _int, _int, _int, _pointer, _int]),
    "describe_labels": (_int, [_pointer, _int, _int, _int, _pointer, _pointer, _pointer]),
    "add_share": (_int, [_pointer, _int, _int, POINTER(ShareRecord)]),
    "describe_rank": (None, [_pointer, _int, _int, _int, _int, _int, _int, _int, _int]),
    "begin_background": (_int, [_pointer, _int]),
    "begin_job": (_int, [_pointer, _int, _int, _int]),
    "set_marks": (None, [_pointer, _int, _int, _pointer]),
    "run": (_int, [_pointer, _long]),
    "n_events": (_long, [_pointer]),
    "finish": (_int, [_pointer, _real]),
    "read_spans": (_long, [_pointer, _int, POINTER(_pointer)]),
    "read_stretched": (_long, [_pointer, _int, POINTER(_pointer), POINTER(_pointer), POINTER(_long)]),
    "read_states": (_int, [_pointer, POINTER(_pointer), POINTER(_pointer), POINTER(_pointer), POINTER(_long)]),
    "read_counts": (_int, [_pointer, POINTER(_pointer), POINTER(_pointer), POINTER(_int)]),
    "read_hosts": (None, [_pointer, _pointer]),
    "runs_of_cut": (_long, [_pointer, _int]),
    "read_lane": (_long, [_pointer, _int, POINTER(_int)]),
    "has_rank_called": (_int, [_pointer, _int, _int]),
    "read_differing": (None, [_pointer, POINTER(_int)]),
    "play_requests": (_int, [*[_pointer] * 5, *[_long] * 3, _pointer, _pointer]),
    "sizes_of_records": (_int, [POINTER(_int)]),
}


class MissingLoopError(Exception):
    """The compiled event loop cannot be used; the message says why."""


@cache
def event_loop() -> ctypes.CDLL:
    """Load the event loop. Raises `MissingLoopError`."""
    path = FOLDER / LIBRARY
    if not path.exists():
        raise MissingLoopError("it was not built: the package was installed where there was no C compiler")
    try:
        library = ctypes.CDLL(str(path))
        library.digest_of_sources.restype = ctypes.c_char_p
        built_from = library.digest_of_sources().decode()
    except (OSError, AttributeError) as problem:
        raise MissingLoopError(f"it cannot be loaded: {problem}") from None
    if built_from != digest():
        raise MissingLoopError("it was built from other sources: `pip install -e .` builds it anew")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def why_missing() -> str:
    """Return why the loop cannot be used; nothing where it can."""
    try:
        event_loop()
    except MissingLoopError as problem:
        return str(problem)
    return ""


def array_at(address: int | None, dtype: np.dtype[Any], n: int) -> NDArray[Any]:
    """Return an array of the loop, which may be read until the loop goes on."""
    if not n or not address:
        return np.zeros(0, dtype=dtype)
    memory = (ctypes.c_uint8 * (n * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype=dtype)

"""Traces of profilers as columns: what GPUs ran, what hosts called, and in which order streams waited.

Times are seconds from the earliest event of any rank. Arrays of one group have one entry per op, call or wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.arrays import Bools, Floats, Ints
from simulator.traces.calls import CALL_KINDS, CallKind
from simulator.traces.classes import CLASSES, EXCHANGES

#: Beginning of the names of marks that PyTorch's profiler sets around steps.
STEP_MARK = "ProfilerStep"
#: Indices in `CLASSES` of the classes whose kernels wait for other ranks.
EXCHANGE_CODES = tuple(CLASSES.index(name) for name in EXCHANGES)


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """A communication as a trace tells it; what is not told is "", 0 or empty.

    ``nbytes`` is the message by nccl-tests' count: a reduce-scatter's input, else the larger of input and output.
    ``group``: name of the process group, ``size`` its number of ranks, and ``ranks`` these where they are listed.
    ``kind``: the parallelism that it serves.
    """

    operation: str = ""
    nbytes: float = 0.0
    group: str = ""
    size: int = 0
    ranks: tuple[int, ...] = ()
    kind: str = ""


@dataclass(frozen=True, eq=False)
class GpuOps:
    """Kernels, copies and memsets of a rank's GPU, ordered by start.

    ``name`` indexes `RankTrace.names`, ``code`` indexes `CLASSES`, ``stream`` indexes `RankTrace.streams`.
    ``call`` is the index of the host call that launched it, -1 where the trace has none.
    ``collective`` indexes `RankTrace.collectives`, -1 where it is no communication.
    ``is_copy``: a copy or a memset, not a kernel.
    """

    start_s: Floats
    end_s: Floats
    name: Ints
    code: Ints
    stream: Ints
    call: Ints
    collective: Ints
    is_copy: Bools

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def seconds(self) -> Floats:
        """Length of each op."""
        return self.end_s - self.start_s

    @property
    def communicates(self) -> Bools:
        """True for ops that wait for other ranks."""
        return np.isin(self.code, EXCHANGE_CODES)

    @property
    def computes(self) -> Bools:
        """True for kernels that are no communication; HolisticTraceAnalysis calls them computation."""
        return ~self.communicates & ~self.is_copy

    def select(self, index: Ints | Bools) -> GpuOps:
        """Return these ops alone."""
        return GpuOps(**{field: getattr(self, field)[index] for field in self.__dataclass_fields__})


@dataclass(frozen=True, eq=False)
class HostCalls:
    """Calls of the GPU's runtime and driver that launch, wait or mark, ordered by start.

    ``name`` indexes `RankTrace.names`, and ``kind`` indexes `CALL_KINDS`.
    """

    start_s: Floats
    end_s: Floats
    name: Ints
    kind: Ints
    thread: Ints

    def __len__(self) -> int:
        return len(self.start_s)

    def are(self, kind: CallKind) -> Bools:
        """Return which calls are of a kind."""
        return np.equal(self.kind, CALL_KINDS.index(kind))


@dataclass(frozen=True, eq=False)
class StreamWaits:
    """Waits of a stream for an event that was recorded on another one.

    ``call`` and ``recorded`` are the host calls that asked for the wait and that recorded the event.
    ``stream`` waits for ``awaited``; both index `RankTrace.streams`.
    """

    call: Ints
    stream: Ints
    recorded: Ints
    awaited: Ints


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A training step, as an annotation of the profiler marks it on the host.

    ``is_marked``: False where the whole trace counts as one step.
    """

    name: str
    start_s: float
    end_s: float
    is_marked: bool = True


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The trace of one rank.

    ``gpu`` and ``world_size`` are empty and 0 where the file does not say. ``missing`` are sentences on what the file
    lacks, for a person to read.
    """

    rank: int
    file: str
    gpu: str
    world_size: int
    names: tuple[str, ...]
    streams: tuple[str, ...]
    collectives: tuple[TracedCollective, ...]
    ops: GpuOps
    calls: HostCalls
    waits: StreamWaits
    steps: tuple[TracedStep, ...]
    missing: tuple[str, ...]

    @cached_property
    def launch_s(self) -> Floats:
        """When the host began to launch each op; nan where the trace does not say."""
        launched = np.full(len(self.ops), np.nan)
        has_call = self.ops.call >= 0
        launched[has_call] = self.calls.start_s[self.ops.call[has_call]]
        return launched

    @cached_property
    def begun_s(self) -> Floats:
        """When the host began to launch each op; where the trace does not say, when the op started."""
        return np.where(np.isnan(self.launch_s), self.ops.start_s, self.launch_s)


@dataclass(frozen=True, eq=False)
class RunTrace:
    """The traces of the ranks of one run, by rank."""

    ranks: tuple[RankTrace, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it was read from."""
        return tuple(rank.file for rank in self.ranks)

    @property
    def missing(self) -> list[str]:
        """Everything that files lack, once each, with the ranks that lack it where not all do."""
        lacking: dict[str, list[int]] = {}
        for rank in self.ranks:
            for text in rank.missing:
                lacking.setdefault(text, []).append(rank.rank)
        return [text if len(who) == len(self.ranks) else f"{text} ({_ranks(who)})" for text, who in lacking.items()]


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"

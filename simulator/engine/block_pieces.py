"""Blocks made ready to run: kernels priced, and cut where something from outside can hold them up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from simulator.costs import Costs
from simulator.costs.interference import InterferenceCost
from simulator.engine.issue_order import HostSpeeds
from simulator.engine.templates import OpRow, TemplateStore
from simulator.program import Beside, Block, Collective, Compute


@dataclass(frozen=True)
class Segment:
    """Ops that run through in one go.

    ``template`` indexes the simulation's templates, ``seconds`` is the length at full speed, ``issue_s`` the host's
    seconds to issue all ops. ``tail_s`` is the longest (launch of an op, then the work from it to the end), counted
    from when the host starts to launch. ``host_waits``: the host issues nothing more before the last op has ended.
    """

    template: int
    seconds: float
    issue_s: float
    tail_s: float
    host_waits: bool = False


@dataclass(frozen=True)
class CollectiveCall:
    """An in-line collective that waits for its other members. ``issue_s``: the host's seconds to issue it."""

    comm: Collective
    issue_s: float


@dataclass(frozen=True)
class OverlappedCall:
    """A collective that waits for its other members, beside ``segments``. ``issue_s`` as in `CollectiveCall`."""

    comm: Collective
    issue_s: float
    segments: tuple[Segment, ...]


Piece = Segment | CollectiveCall | OverlappedCall


class CommLength(NamedTuple):
    """A block's collective: its ``seconds`` where nothing can delay it, else None; the bytes that a GPU sends."""

    seconds: float | None
    wire_bytes: float


class GpuSpeed(NamedTuple):
    """How fast a GPU of type ``gpu`` and its ``host`` are.

    ``scale`` is over the speed of the type's profile. ``clock_hz`` is the clock of the SMs; None: that of each kernel's
    price.
    """

    gpu: str
    scale: float
    clock_hz: float | None
    host: HostSpeeds


class BlockCutter:
    """Cuts blocks into pieces, and keeps their templates in ``store``. What is alike is priced once."""

    def __init__(self, costs: Costs, store: TemplateStore) -> None:
        self._costs = costs
        self._store = store
        self._pieces: dict[tuple[object, ...], tuple[Piece, ...]] = {}
        self._pricing: dict[tuple[GpuSpeed, str], _Pricing] = {}
        self._segments: dict[tuple[int, ...], Segment] = {}

    def pieces(
        self, block: Block, phase: str, speed: GpuSpeed, lengths: dict[int, CommLength], coalesce: bool
    ) -> tuple[Piece, ...]:
        """Return the pieces of ``block`` in a step of this phase, on a GPU of this speed.

        ``lengths`` are of its ops that communicate, by their id. Without ``coalesce`` every op is a piece of its own.
        """
        key = (id(block), phase, speed, tuple(lengths.values()))
        if key not in self._pieces:
            if (speed, phase) not in self._pricing:
                self._pricing[speed, phase] = _Pricing(self._costs.for_gpu(speed.gpu), speed, phase)
            self._pieces[key] = tuple(self._cut(block, self._pricing[speed, phase], lengths, coalesce))
        return self._pieces[key]

    def _cut(self, block: Block, at: _Pricing, lengths: dict[int, CommLength], coalesce: bool) -> Iterable[Piece]:
        interference = at.costs.interference
        rows: list[OpRow] = []
        for op in block.ops:
            match op:
                case Compute():
                    rows.append(at.kernel_row(op))
                    if op.host_waits:
                        yield from (replace(one, host_waits=True) for one in self._segment(rows, interference))
                        rows = []
                case Beside():
                    kernels = [at.kernel_row(kernel) for kernel in op.kernels]
                    row = at.comm_row(op.comm, lengths[id(op)], len(kernels))
                    if row is not None:
                        rows += [row, *kernels]
                        continue
                    yield from self._segment(rows, interference)
                    rows = []
                    together = [kernels] if coalesce else [[row] for row in kernels]
                    segments = tuple(
                        one for rows_of_one in together for one in self._segment(rows_of_one, interference)
                    )
                    yield OverlappedCall(op.comm, at.issue_s(op.comm), segments)
                    continue
                case Collective():
                    row = at.comm_row(op, lengths[id(op)])
                    if row is None:
                        yield from self._segment(rows, interference)
                        rows = []
                        yield CollectiveCall(op, at.issue_s(op))
                        continue
                    rows.append(row)
            if not coalesce:
                yield from self._segment(rows, interference)
                rows = []
        yield from self._segment(rows, interference)

    # Ranks of one kind share whole segments.

    def _segment(self, rows: Sequence[OpRow], interference: InterferenceCost | None) -> Iterable[Segment]:
        if not rows:
            return
        key = (id(interference), *map(id, rows))
        if key not in self._segments:
            index = self._store.add(rows, interference)
            template = self._store.templates[index]
            issue_s, tail_s = float(template.launched_s[-1]), float((template.launched_s + template.rest_s).max())
            self._segments[key] = Segment(index, template.length_s, issue_s, tail_s)
        yield self._segments[key]


class _Pricing:
    """The prices of steps of one phase: costs, the speed of GPU and host. Blocks share their ops, each priced once."""

    def __init__(self, costs: Costs, speed: GpuSpeed, phase: str) -> None:
        self.costs, self._speed, self._phase = costs, speed, phase
        self._kernel_rows: dict[int, OpRow] = {}
        self._comm_rows: dict[tuple[int, CommLength, int], OpRow] = {}

    def issue_s(self, op: Compute | Collective) -> float:
        """Return the host's seconds to issue ``op``."""
        return self._speed.host.issue_s(self.costs, op, self._phase)

    def kernel_row(self, op: Compute) -> OpRow:
        """Return the row of a kernel."""
        if id(op) not in self._kernel_rows:
            speed = self._speed
            seconds = self.costs.kernel_s(op.kernel, speed.gpu, speed.clock_hz) / speed.scale
            row = OpRow.from_kernel(op, seconds, self.issue_s(op), self.costs.intensity(op.kernel))
            self._kernel_rows[id(op)] = row
        return self._kernel_rows[id(op)]

    def comm_row(self, comm: Collective, length: CommLength, beside: int = 0) -> OpRow | None:
        """Return the row of a collective of known length; None where others can delay it."""
        if length.seconds is None:
            return None
        key = id(comm), length, beside
        if key not in self._comm_rows:
            row = OpRow.from_comm(comm, length.seconds, length.wire_bytes, self.issue_s(comm), beside)
            self._comm_rows[key] = row
        return self._comm_rows[key]

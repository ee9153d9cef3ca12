"""Blocks made ready to run: kernels priced, and cut where something from outside can hold them up."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.costs import Costs
from simulator.costs.interference import Beside as Interference
from simulator.costs.power import Loads, load_class
from simulator.engine.host import HostSpeeds
from simulator.engine.kernel_times import Pace
from simulator.program import COMPUTE_LANE, HOST_LANES, Beside, Block, Collective, Comm, Compute, Kernel
from simulator.timeline import CATEGORIES, Template

_CATEGORY = {name: code for code, name in enumerate(CATEGORIES)}
_CATEGORY_OF_PHASE = {"R": _CATEGORY["recompute"], "O": _CATEGORY["optimizer"]}


@dataclass(frozen=True)
class Run:
    """Ops that run through in one go.

    ``template`` indexes the simulation's templates, ``seconds`` is the length at full speed, ``launch_s`` what the host
    takes to issue all of it. ``tail_s`` is the longest
    (launch of an op, then the work from it to the end), counted from when the host starts to launch.
    """

    template: int
    seconds: float
    launch_s: float
    tail_s: float


@dataclass(frozen=True)
class Meet:
    """An in-line collective that needs a rendezvous. ``launch_s``: what the host takes to issue it."""

    comm: Collective
    launch_s: float


@dataclass(frozen=True)
class MeetBeside:
    """A collective that needs a rendezvous and goes on beside ``runs``. ``launch_s`` as in `Meet`."""

    comm: Collective
    launch_s: float
    runs: tuple[Run, ...]


Piece = Run | Meet | MeetBeside
#: What of a block communicates.
CommOp = Collective | Beside


@dataclass(frozen=True, slots=True)
class CommTime:
    """A block's collective: its length where nothing can delay it, else None; what a GPU sends."""

    seconds: float | None
    wire_bytes: float


class Running(NamedTuple):
    """A GPU of a type, at ``speed`` times what its profile says, its SMs at a clock (None: each kernel at its
    price's), its ``host``, and the phase of the step that it runs."""

    gpu: str
    speed: float
    clock_hz: float | None
    host: HostSpeeds
    phase: str = ""


class TemplateStore:
    """The templates of a simulation, each distinct one once."""

    def __init__(self, costs: Costs) -> None:
        self.templates: list[Template] = []
        #: Of each template, which of its ops are kernels.
        self.computes: list[NDArray[np.bool_]] = []
        self._costs = costs
        self._comm_templates: dict[tuple[str, str, str, float], int] = {}
        self._intensities: list[tuple[float, ...]] = []
        self._kernels: list[tuple[Kernel | None, ...]] = []
        self._beside: list[Interference | None] = []
        self._paces: dict[tuple[int, Hashable], Pace] = {}
        self._leaves: dict[int, NDArray[np.float64]] = {}
        self._pieces: dict[tuple[object, ...], tuple[Piece, ...]] = {}
        self._rows: dict[tuple[object, ...], _Row] = {}
        self._runs: dict[tuple[int, ...], Run] = {}

    def loads(self, template: int) -> Loads:
        """What its ops draw at full speed; of what the network times 0 seconds."""
        loads = Loads()
        ops = zip(
            self._kernels[template],
            self._intensities[template],
            self.templates[template].kinds,
            self.templates[template].work_s.tolist(),
            strict=True,
        )
        for kernel, intensity, op, seconds in ops:
            if kernel is not None and (kind := load_class(kernel)) is not None:
                loads.add(kind, seconds, seconds * intensity)
            elif kernel is None and op not in HOST_LANES:
                loads.add("communication", seconds, seconds)
        return loads

    def comm_template(self, comm: Comm, wire_bytes: float) -> int:
        """The one-row template of a communication that is timed by the network."""
        key = (comm.name, comm.op, comm.purpose, wire_bytes)
        if key not in self._comm_templates:
            self._comm_templates[key] = self._add([_Row.of_comm(comm, 0.0, wire_bytes)], None)
        return self._comm_templates[key]

    def pace(self, template: int, load: Hashable) -> Pace:
        """Ops of a template beside communication of this load; the speed of communication is 1."""
        found = self._paces.get((template, load))
        if found is None:
            beside, kernels = self._beside[template], self._kernels[template]
            speed = np.array([beside.speed(x, load) if beside and x is not None else 1.0 for x in kernels])
            found = self._paces[template, load] = Pace.of(self.templates[template], speed)
        return found

    def leaves(self, template: int) -> NDArray[np.float64]:
        """What each op of a template leaves of its memory's time to communication beside it."""
        found = self._leaves.get(template)
        if found is None:
            beside, kernels = self._beside[template], self._kernels[template]
            found = np.array([beside.leaves(x) if beside and x is not None else math.inf for x in kernels])
            self._leaves[template] = found
        return found

    def pieces(self, block: Block, at: Running, lengths: dict[CommOp, CommTime], coalesce: bool) -> tuple[Piece, ...]:
        """``block`` on a GPU.

        ``lengths``: what of it communicates. Without ``coalesce`` every op is a piece of its own.
        """
        key = (id(block), at, tuple(lengths.values()))
        if key not in self._pieces:
            self._pieces[key] = tuple(self._cut(block, at, self._costs.of(at.gpu), lengths, coalesce))
        return self._pieces[key]

    def _cut(
        self,
        block: Block,
        at: Running,
        costs: Costs,
        lengths: dict[CommOp, CommTime],
        coalesce: bool,
    ) -> Iterable[Piece]:
        rows: list[_Row] = []
        for op in block.ops:
            if isinstance(op, Compute):
                rows.append(self._kernel_row(op, at, costs))
            elif isinstance(op, Beside):
                seconds, wire_bytes = lengths[op].seconds, lengths[op].wire_bytes
                launch_s = at.host.issue_s(costs, op.comm, at.phase)
                kernels = [self._kernel_row(kernel, at, costs) for kernel in op.kernels]
                if seconds is not None:
                    rows += [self._comm_row(op.comm, seconds, wire_bytes, launch_s, len(kernels)), *kernels]
                    continue
                yield from self._run(rows, costs.beside)
                rows = []
                together = [kernels] if coalesce else [[row] for row in kernels]
                runs = tuple(run for rows_of_run in together for run in self._run(rows_of_run, costs.beside))
                yield MeetBeside(op.comm, launch_s, runs)
                continue
            else:
                seconds, wire_bytes = lengths[op].seconds, lengths[op].wire_bytes
                launch_s = at.host.issue_s(costs, op, at.phase)
                if seconds is None:
                    yield from self._run(rows, costs.beside)
                    rows = []
                    yield Meet(op, launch_s)
                    continue
                rows.append(self._comm_row(op, seconds, wire_bytes, launch_s))
            if not coalesce:
                yield from self._run(rows, costs.beside)
                rows = []
        yield from self._run(rows, costs.beside)

    # Blocks share their ops, and ranks that run alike whole runs of them.

    def _kernel_row(self, op: Compute, at: Running, costs: Costs) -> _Row:
        key = id(op), at
        if key not in self._rows:
            seconds = costs.kernel_s(op.kernel, at.gpu, at.clock_hz) / at.speed
            issue_s = at.host.issue_s(costs, op, at.phase)
            self._rows[key] = _Row.of_kernel(op, seconds, issue_s, costs.intensity(op.kernel))
        return self._rows[key]

    def _comm_row(self, comm: Comm, seconds: float, wire_bytes: float, launch_s: float, beside: int = 0) -> _Row:
        key = id(comm), seconds, wire_bytes, launch_s, beside
        if key not in self._rows:
            self._rows[key] = _Row.of_comm(comm, seconds, wire_bytes, launch_s, beside)
        return self._rows[key]

    def _run(self, rows: list[_Row], beside: Interference | None) -> Iterable[Run]:
        if not rows:
            return
        key = (id(beside), *map(id, rows))
        if key not in self._runs:
            index = self._add(rows, beside)
            template = self.templates[index]
            launch_s, longest_s = float(template.launch_s[-1]), float((template.launch_s + template.rest_s).max())
            self._runs[key] = Run(index, template.length_s, launch_s, longest_s)
        yield self._runs[key]

    def _add(self, rows: list[_Row], beside: Interference | None) -> int:
        self._beside.append(beside)
        self._intensities.append(tuple(row.intensity for row in rows))
        self._kernels.append(tuple(row.kernel for row in rows))
        self.computes.append(np.array([row.kernel is not None for row in rows]))
        self.templates.append(
            Template(
                names=tuple(row.name for row in rows),
                kinds=tuple(str(row.kind) for row in rows),
                phases=tuple(str(row.phase) for row in rows),
                lanes=tuple(row.lane for row in rows),
                category=np.array([row.category for row in rows], dtype=np.int64),
                work_s=np.array([row.seconds for row in rows]),
                launch_s=np.cumsum([row.launch_s for row in rows]),
                nbytes=np.array([row.nbytes for row in rows]),
                flops=np.array([row.flops for row in rows]),
                beside={op: row.beside for op, row in enumerate(rows) if row.beside},
            )
        )
        return len(self.templates) - 1


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    kind: str
    phase: str
    lane: str
    category: int
    seconds: float
    nbytes: float
    flops: float
    launch_s: float
    beside: int = 0
    kernel: Kernel | None = None
    intensity: float = 1.0

    @classmethod
    def of_kernel(cls, op: Compute, seconds: float, launch_s: float, intensity: float) -> _Row:
        category = _CATEGORY_OF_PHASE.get(op.phase, _CATEGORY["compute"])
        kernel = op.kernel
        work = seconds, kernel.bytes, kernel.flops
        return cls(op.name, kernel.kind, op.phase, COMPUTE_LANE, category, *work, launch_s, 0, kernel, intensity)

    @classmethod
    def of_comm(cls, comm: Comm, seconds: float, wire_bytes: float, launch_s: float = 0.0, beside: int = 0) -> _Row:
        sent = 0.0 if comm.op == "recv" else wire_bytes
        # What servers do between a push and a pull is a part of that exchange to the rank that waits for it.
        category = _CATEGORY["dp" if comm.op == "server_update" else comm.purpose]
        return cls(comm.name, comm.op, "C", comm.lane, category, seconds, sent, 0.0, launch_s, beside)

"""The templates of a simulation: ops that run in one go, priced, and what communication beside them changes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats
from simulator.costs.interference import InterferenceCost
from simulator.costs.power import Loads, load_class
from simulator.engine.kernel_times import PacedTemplate
from simulator.program import COMPUTE_LANE, HOST_LANES, Comm, Compute, Kernel
from simulator.timeline import CATEGORIES, Template

_CATEGORY = {name: code for code, name in enumerate(CATEGORIES)}
_CATEGORY_OF_PHASE = {"R": _CATEGORY["recompute"], "O": _CATEGORY["optimizer"]}


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of a template, on the GPU for ``seconds`` at full speed.

    ``issue_s``: seconds of the host to issue it. ``beside``: number of ops after it that run beside it.
    ``intensity``: share of the power of its kind of kernel that it draws.
    """

    name: str
    kind: str
    phase: str
    lane: str
    category: int
    seconds: float
    nbytes: float
    flops: float
    issue_s: float
    beside: int = 0
    kernel: Kernel | None = None
    intensity: float = 1.0

    @classmethod
    def from_kernel(cls, op: Compute, seconds: float, issue_s: float, intensity: float) -> OpRow:
        """Make the row of a kernel."""
        category = _CATEGORY_OF_PHASE.get(op.phase, _CATEGORY["compute"])
        kernel = op.kernel
        work = seconds, kernel.bytes, kernel.flops
        return cls(op.name, kernel.kind, op.phase, COMPUTE_LANE, category, *work, issue_s, 0, kernel, intensity)

    @classmethod
    def from_comm(cls, comm: Comm, seconds: float, wire_bytes: float, issue_s: float = 0.0, beside: int = 0) -> OpRow:
        """Make the row of a communication; ``wire_bytes`` are those that a GPU sends."""
        sent = 0.0 if comm.op == "recv" else wire_bytes
        category = _CATEGORY[comm.category]
        return cls(comm.name, comm.op, "C", comm.lane, category, seconds, sent, 0.0, issue_s, beside)


class MemoryLeft(NamedTuple):
    """Shares of the memory's time that ops leave to communication beside them: each one's, and the ``least``."""

    by_op: Floats
    least: float


class TemplateStore:
    """The templates of a simulation, each distinct one once.

    ``is_kernel`` says of each template which of its ops are kernels.
    """

    def __init__(self) -> None:
        self.templates: list[Template] = []
        self.is_kernel: list[NDArray[np.bool_]] = []
        self._rows: list[tuple[OpRow, ...]] = []
        self._interference: list[InterferenceCost | None] = []
        self._comm_templates: dict[tuple[str, str, str, str, float], int] = {}
        self._paced: dict[tuple[int, Hashable], PacedTemplate] = {}
        self._memory_left: dict[int, MemoryLeft] = {}

    def add(self, rows: Sequence[OpRow], interference: InterferenceCost | None) -> int:
        """Store ``rows`` as a template; return its index. ``interference``: of a GPU where communication slows it."""
        self._rows.append(tuple(rows))
        self._interference.append(interference)
        self.is_kernel.append(np.array([row.kernel is not None for row in rows]))
        self.templates.append(
            Template(
                names=tuple(row.name for row in rows),
                kinds=tuple(str(row.kind) for row in rows),
                phases=tuple(str(row.phase) for row in rows),
                lanes=tuple(row.lane for row in rows),
                category=np.array([row.category for row in rows], dtype=np.int64),
                work_s=np.array([row.seconds for row in rows]),
                launched_s=np.cumsum([row.issue_s for row in rows]),
                nbytes=np.array([row.nbytes for row in rows]),
                flops=np.array([row.flops for row in rows]),
                beside={op: row.beside for op, row in enumerate(rows) if row.beside},
            )
        )
        return len(self.templates) - 1

    def comm_template(self, comm: Comm, wire_bytes: float) -> int:
        """Return the one-row template of a communication that the network times."""
        key = (comm.name, comm.op, comm.purpose, comm.lane, wire_bytes)
        if key not in self._comm_templates:
            self._comm_templates[key] = self.add([OpRow.from_comm(comm, 0.0, wire_bytes)], None)
        return self._comm_templates[key]

    def loads(self, template: int) -> Loads:
        """Add up what the ops of a template draw at full speed; 0 seconds for what the network times."""
        loads = Loads()
        for row in self._rows[template]:
            if row.kernel is not None and (kind := load_class(row.kernel)) is not None:
                loads.add(kind, row.seconds, row.seconds * row.intensity)
            elif row.kernel is None and row.kind not in HOST_LANES:
                loads.add("communication", row.seconds, row.seconds)
        return loads

    def paced(self, template: int, load: Hashable) -> PacedTemplate:
        """Return the ops of a template beside communication of this load; communication itself has speed 1."""
        paced = self._paced.get((template, load))
        if paced is None:
            interference, rows = self._interference[template], self._rows[template]
            speed = [interference.speed(x.kernel, load) if interference and x.kernel is not None else 1.0 for x in rows]
            paced = self._paced[template, load] = PacedTemplate.from_speeds(self.templates[template], np.array(speed))
        return paced

    def memory_left(self, template: int) -> MemoryLeft:
        """Return the share of the memory's time that each op of a template leaves to communication beside it."""
        left = self._memory_left.get(template)
        if left is None:
            interference, rows = self._interference[template], self._rows[template]
            share_of = {
                id(x): interference.leaves(x.kernel) if interference and x.kernel is not None else math.inf
                for x in {id(x): x for x in rows}.values()  # layers share their rows
            }
            shares = np.array([share_of[id(x)] for x in rows])
            left = self._memory_left[template] = MemoryLeft(shares, float(shares.min()))
        return left

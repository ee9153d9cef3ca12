"""Numbers that all jobs of a compiled simulation have in common: of communication, templates, channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.arrays import Floats
from simulator.costs.interference import InterferenceCost
from simulator.engine.compiled.description import CommNumbers, Numbers
from simulator.engine.compiled.handle import SimulationHandle
from simulator.engine.compiled.library import PacedRecord, TemplateRecord
from simulator.engine.compiled.network import NumberedPhases
from simulator.engine.representatives import PlannedComm
from simulator.engine.templates import TemplateStore


class Tables:
    """Numbers that the loop and Python have in common, whatever the job."""

    def __init__(self, handle: SimulationHandle, phases: NumberedPhases, comms: CommNumbers) -> None:
        self.handle = handle
        self.phases = phases
        self.comms = comms
        self._n_kinds = 0
        #: Group and meeting of calls that belong together; job, planned communication and purpose that are counted.
        self.channels, self.counts = Numbers(), Numbers()
        #: Of each template of the loop its index in the store of its job.
        self.index_of_template: list[int] = []
        self._stores: list[TemplateStore] = []
        self._template_numbers: dict[tuple[int, int], int] = {}
        self._planned: dict[int, int] = {}
        self._interference: list[InterferenceCost] = []
        self._loads = Numbers()
        self._loads.number(None, None)

    def tell_kinds(self) -> None:
        """Tell the loop of the kinds of communication that are new."""
        for record in self.comms.records(self._n_kinds):
            self._n_kinds = self.handle.add_record("add_kind", record) + 1

    def interference(self, cost: InterferenceCost | None) -> int:
        """Return the number of an interference; -1 where communication takes nothing from kernels."""
        if cost is None:
            return -1
        for number, other in enumerate(self._interference):
            if other is cost:
                return number
        self._interference.append(cost)
        return len(self._interference) - 1

    def load(self, interference: int, n_spinning: int, n_moving: int, kinds: Sequence[int]) -> int:
        """Return the number of the load of communication that spins, and that moves bytes, on kernels."""
        comms = [self.comms.kinds.things[kind] for kind in kinds[: n_spinning + n_moving]]
        load = self._interference[interference].load(comms[:n_spinning], comms[n_spinning:])
        return self._loads.number(load, load)

    def planned(self, planned: PlannedComm) -> int:
        """Return the number of a communication as its group performs it."""
        if id(planned) not in self._planned:
            phases = np.array([self.phases.number(phase) for phase in planned.plan.phases], dtype=np.int32)
            number = self.handle.add("add_planned", len(phases), phases.ctypes.data, len(planned.members))
            self._planned[id(planned)] = number
        return self._planned[id(planned)]

    def template(self, store: TemplateStore, index: int) -> int:
        """Return the number of a template of a job's store."""
        key = id(store), index
        if key not in self._template_numbers:
            self._template_numbers[key] = self.handle.add_record("add_template", self._template_record(store, index))
            self.index_of_template.append(index)
            self._stores.append(store)
        return self._template_numbers[key]

    def paced(self, template: int, load: int) -> int:
        """Return the number of a template's times under a load."""
        paced = self._stores[template].paced(self.index_of_template[template], self._loads.things[load])
        columns = paced.speed, paced.seconds, paced.starts_s, paced.ends_s, paced.lag
        return self.handle.add_record("add_paced", PacedRecord(*[self._floats(column) for column in columns]))

    def _template_record(self, store: TemplateStore, index: int) -> TemplateRecord:
        template, memory = store.templates[index], store.memory_left(index)
        beside = np.zeros(len(template), dtype=np.int32)
        for op, n in template.beside.items():
            beside[op] = n
        times = (template.start_s, template.end_s) if template.beside else ()
        return TemplateRecord(
            self._floats(template.work_s),
            self._floats(template.launched_s),
            self.handle.kept(store.is_kernel[index]),
            self._floats(memory.by_op),
            *(self.handle.kept(beside) if template.beside else None, *[self._floats(column) for column in times])
            if template.beside
            else (None, None, None),
            memory.least,
            len(template),
        )

    def _floats(self, values: Floats | Sequence[float]) -> Any:
        return self.handle.kept(np.ascontiguousarray(values, dtype=np.float64))

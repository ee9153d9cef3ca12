"""Facts of a rank that passes over its lanes may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from simulator.config import Parallelism, Workload
from simulator.lowering.stages import Stages
from simulator.operations.weights import Weight


@dataclass(frozen=True)
class RankContext:
    """Facts of the rank whose lanes a pass changes."""

    workload: Workload
    stages: Stages
    pipeline_rank: int
    pairs: frozenset[tuple[str, str]] = frozenset()
    """labels of a forward and a backward pass that the schedule plays as one"""

    @property
    def parallelism(self) -> Parallelism:
        """The workload's section."""
        return self.workload.parallelism

    @cached_property
    def stage_numbers(self) -> tuple[int, ...]:
        """Stages on the rank."""
        return self.parallelism.stages_of(self.pipeline_rank)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Weights of all stages on the rank."""
        return self.stages.variants.weights(*self.stage_numbers)

"""The stages of one layout, each distinct one put together once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from simulator import models
from simulator.config import Workload
from simulator.config.model import Model
from simulator.models import Part, PartPool, PassBytes, StageKey, Turn
from simulator.operations.shapes import ANY_TURN
from simulator.operations.weights import Weight


@dataclass(frozen=True)
class StageBytes:
    """Bytes of activations of one micro-batch: until its backward pass, and from input to weight gradient at least."""

    saved: float
    split: float


class StageParts:
    """The parts of the model's stages in a layout, and what of them can be told by stage.

    ``layer_kinds``: what tells each layer of the model apart. ``pool``: parts of layouts that differ in chunks alone.
    """

    def __init__(
        self, workload: Workload, layer_kinds: Sequence[object] | None = None, pool: PartPool | None = None
    ) -> None:
        self.workload = workload
        self._layer_kinds = layer_kinds_of(workload.model) if layer_kinds is None else layer_kinds
        self._pool: PartPool = {} if pool is None else pool
        self._parts: dict[tuple[StageKey, Turn], tuple[Part, ...]] = {}
        self._bytes: dict[StageKey, StageBytes] = {}
        self._moved: dict[tuple[StageKey, str], PassBytes] = {}

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every pipeline rank; those of a second copy of the model are numbered on."""
        layout, plan = self.workload.parallelism, self.workload.parallelism.pipeline_schedule
        numbers: list[list[int]] = [[] for _ in range(layout.pp)]
        for stage in range(layout.n_stages * plan.copies):
            numbers[plan.rank_of(stage, layout.pp)].append(stage)
        return tuple(map(tuple, numbers))

    @cached_property
    def keys(self) -> tuple[StageKey, ...]:
        """Keys by which stages of the model differ."""
        return models.stage_keys(self.workload, self._layer_kinds)

    def key(self, stage: int) -> StageKey:
        """Return what tells a stage apart, be it of the second copy."""
        return self.keys[stage % len(self.keys)]

    def rank_key(self, rank: int) -> tuple[StageKey, ...]:
        """Return what tells the parts of a pipeline rank apart."""
        return tuple(map(self.key, self.stages_of[rank]))

    def weights_key(self, rank: int) -> tuple[object, ...]:
        """Return what tells the weights of a pipeline rank apart, however its layers are spread over chunks."""
        if self.workload.training.frozen:
            return self.rank_key(rank)
        keys = self.rank_key(rank)
        layers = Counter(itertools.chain.from_iterable(key[0] for key in keys))
        return tuple(sorted(layers.items())), sum(key[1] for key in keys), sum(key[2] for key in keys)

    def parts(self, stage: int, turn: Turn = ANY_TURN) -> tuple[Part, ...]:
        """Return the parts of a stage in a turn."""
        key = self.key(stage), turn
        if key not in self._parts:
            self._parts[key] = models.stage_parts(self.workload, stage % len(self.keys), turn=turn, pool=self._pool)
        return self._parts[key]

    def weights(self, rank: int) -> tuple[Weight, ...]:
        """Return the weights of a pipeline rank, chunk by chunk."""
        return models.weights_of(part for stage in self.stages_of[rank] for part in self.parts(stage))

    def activations(self, stage: int, parts: Sequence[Part]) -> StageBytes:
        """Return the bytes of a stage that holds ``parts`` of its activations, always the same."""
        key = self.key(stage)
        if key not in self._bytes:
            saved = [part.saved_bytes for part in parts]
            split = [min(part.held_bytes, nbytes) for part, nbytes in zip(parts, saved, strict=True)]
            self._bytes[key] = StageBytes(sum(saved), sum(split))
        return self._bytes[key]

    def moved(self, stage: int, kind: str) -> PassBytes:
        """Return the bytes of a pass through a stage."""
        key = self.key(stage), kind
        if key not in self._moved:
            self._moved[key] = models.pass_bytes(self.parts(stage), kind)
        return self._moved[key]


def layer_kinds_of(model: Model) -> tuple[object, ...]:
    """Return what tells each layer of a model apart, in order."""
    return tuple(map(model.alike, range(model.layers)))

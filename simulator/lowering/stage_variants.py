"""Variants of passes: which passes through the stages of a model do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simulator.config import Workload
from simulator.models import Part, Seat, Turn, stage_parts, weights_of
from simulator.models.low_precision import casts_weights_once
from simulator.operations.weights import Weight
from simulator.program import MAKE_GRADIENTS, Step
from simulator.same_objects import SameObjects
from simulator.schedules import Order


class Variant(NamedTuple):
    """Passes that do the same: the stage that they go through, their kind, and the turn of their micro-batches."""

    stage: int
    kind: str
    turn: Turn


def first_and_last(order: Order, microbatches: int) -> dict[tuple[int, int], Turn]:
    """Return, by stage and micro-batch, the turns of those that make the first and the last gradients of a step."""
    making: dict[tuple[int, int], list[int]] = {}
    for action in (action for slots in order for slot in slots for action in slot):
        if action.kind in MAKE_GRADIENTS:
            making.setdefault((action.stage, action.microbatch // microbatches), []).append(action.microbatch)
    return {
        (stage, microbatch): Turn(first=microbatch == row[0], last=microbatch == row[-1])
        for (stage, _), row in making.items()
        for microbatch in (row[0], row[-1])
    }


class StageVariants:
    """Parts of every model stage for a rank at ``seat``, in each turn of a micro-batch.

    ``turns``: by stage and micro-batch, those that are the first or last of a step; see `first_and_last`.
    """

    def __init__(self, workload: Workload, seat: Seat, turns: Mapping[tuple[int, int], Turn]) -> None:
        self._workload, self._seat, self.turns = workload, seat, turns
        self._casts_once = casts_weights_once(workload)
        n_stages, copies = workload.parallelism.n_stages, workload.parallelism.pipeline_schedule.copies
        #: By stage, the parts that do nothing special in any turn.
        self.parts: Sequence[tuple[Part, ...]] = [
            stage_parts(workload, stage, seat) for stage in range(n_stages)
        ] * copies
        self._parts_in_turn: dict[tuple[int, Turn], tuple[Part, ...]] = {}
        #: A stage's usual parts and those in a turn -> `parts_in` that turn.
        self._told_apart = SameObjects[tuple[Part, ...]]()
        #: Weights of each part, in order -> all of them.
        self._weights = SameObjects[tuple[Weight, ...]]()
        #: A usual part and one in a turn -> whether they are equal.
        self._compared = SameObjects[bool]()

    def weights(self, *stages: int) -> tuple[Weight, ...]:
        """Return the weights of stages on one rank; ranks whose parts have the same are given the very same tuple."""
        parts = [part for stage in stages for part in self.parts[stage]]
        return self._weights.get([part.weights for part in parts], lambda: weights_of(parts))

    def variant(self, stage: int, kind: str, microbatch: int) -> Variant:
        """Return the variant of a pass; only those that make gradients of weights, or cast these, have a turn."""
        turn = self.turns.get((stage, microbatch), Turn()) if kind in MAKE_GRADIENTS or self._casts_once else Turn()
        return Variant(stage, kind, turn)

    def variant_of_step(self, step: Step) -> Variant:
        """Return the variant of a pass, or of the pass that ``step`` is a piece of."""
        return self.variant(step.stage, step.phase, step.microbatch)

    def parts_in(self, variant: Variant) -> tuple[Part, ...]:
        """Return the stage's parts; those that do nothing special in their turn are the very same objects.

        Equal stages are given the very same tuple.
        """
        stage, _, turn = variant
        if (stage, turn) not in self._parts_in_turn:
            usual = self.parts[stage]
            special = stage_parts(self._workload, stage % self._workload.parallelism.n_stages, self._seat, turn)
            self._parts_in_turn[stage, turn] = self._told_apart.get(
                (usual, special),
                lambda: tuple(
                    one if self._are_equal(one, other) else other for one, other in zip(usual, special, strict=True)
                ),
            )
        return self._parts_in_turn[stage, turn]

    def _are_equal(self, one: Part, other: Part) -> bool:
        """Tell whether two parts are equal; layers that are one object are compared once."""
        return self._compared.get((one, other), lambda: one == other)

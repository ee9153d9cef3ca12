"""Numbers of the stages of ranks."""

from __future__ import annotations

import numpy as np

from simulator.analysis.training.stage_numbers import StageNumbers
from simulator.analysis.training.static_memory import StaticMemory
from simulator.config import load_workload
from simulator.models import StateBytes, rank_parts
from tests.support.jobs import job


def test_stages_of_the_very_same_parts_have_one_number() -> None:
    """The first of two ranks has stages 0 and 2 of the same parts; the second has a stage of them and another one.

    A step that belongs to no stage has stage -1.
    """
    layers = rank_parts(load_workload(job()), 0)
    one, other = layers[:1], layers[:2]
    nothing = StateBytes(weights=0.0, gradients=0.0, optimizer=0.0)
    static = [StaticMemory(nothing, parts=parts) for parts in ({0: one, 2: one}, {2: one, 1: other})]
    numbers = StageNumbers(static)
    stages = np.array([-1, 0, 1, 2, 7])
    assert [numbers.numbers_at(np.full(5, rank), stages).tolist() for rank in (0, 1)] == [
        [-1, 0, -1, 0, -1],
        [-1, -1, 1, 0, -1],
    ]
    assert numbers.parts == [one, other]
    assert StageNumbers([StaticMemory(nothing)]).numbers_at(np.zeros(2, dtype=np.int64), stages[:2]).tolist() == [
        -1,
        -1,
    ]

"""What is kept of a stage for a micro-batch, event by event."""

from __future__ import annotations

import pytest

from simulator.analysis.training.activation_lifetimes import ActivationEffect, ActivationEvent
from simulator.analysis.training.memory_requests import RequestSequences
from simulator.analysis.training.replayed_stages import ReplayedStage
from simulator.config import load_workload
from simulator.models import rank_parts
from tests.support.jobs import job

SPLIT: tuple[ActivationEffect, ...] = ("save", "begin swap", "swap", "release")


@pytest.mark.parametrize("effects", [SPLIT, ("save", "release")], ids=["split backward pass", "whole backward pass"])
@pytest.mark.parametrize("is_replayed", [True, False])
def test_behind_its_backward_pass_nothing_is_kept_of_a_micro_batch(
    effects: tuple[ActivationEffect, ...], is_replayed: bool
) -> None:
    """The next step finds the micro-batch as the first one did, whichever way its backward pass went."""
    parts = rank_parts(load_workload(job()), 0)
    stage = ReplayedStage(parts, RequestSequences())
    events = tuple(ActivationEvent(effect, tuple(range(len(parts)))) for effect in effects)
    history = stage.history(events, is_replayed)
    assert history.left == (-1, -1)
    first, second = history.requests.tolist()
    assert first == second
    assert any(number >= 0 for number in first) == is_replayed


def test_tensors_without_a_backward_pass_are_let_go_at_the_end_of_a_step() -> None:
    """They are those of a micro-batch that a step has only begun; the next step saves them again."""
    parts = rank_parts(load_workload(job()), 0)
    sequences = RequestSequences()
    history = ReplayedStage(parts, sequences).history((ActivationEvent("save", tuple(range(len(parts)))),), True)
    (first,), (second,) = history.requests.tolist()
    assert first == second
    for left in history.left:
        alive = dict([*sequences.arrays[first].tolist(), *sequences.arrays[left].tolist()])
        assert not any(alive.values())

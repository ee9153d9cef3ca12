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
    kept = stage.nothing
    for effect in effects:
        kept = stage.change(kept, ActivationEvent(effect, tuple(range(len(parts)))), is_replayed).after
    assert kept is stage.nothing

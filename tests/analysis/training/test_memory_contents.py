"""Activations by kind of tensor, pass by pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from simulator.analysis.time.memory_curve import memory_curve
from simulator.analysis.training.activation_lifetimes import activation_events
from simulator.analysis.training.memory_contents import activation_changes
from simulator.analysis.training.static_memory import static_memory
from simulator.api import run
from simulator.models import Tensor
from tests.support.jobs import job


def total(tensors: Iterable[Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors)


def test_a_split_backward_pass_exchanges_what_is_held() -> None:
    """A stage has one micro-batch. Its forward pass saves tensors. The input gradient takes gradients while it runs.

    Its end leaves the tensors that weight gradients need; gradients of outputs are among these. All gradients that the
    input gradient has taken are given back. Nothing is left behind the weight gradient.
    """
    workload = job(training__global_batch=1) | {"parallelism": {"pp": 2, "schedule": "zb_h1"}}
    result = run(workload)
    timeline, rank = result.played, 0
    static = static_memory(result.workload, {rank: 0.0})[rank]
    (parts,) = static.parts.values()
    curve = memory_curve(timeline, rank)
    events = activation_events(timeline, curve, static)
    changes = activation_changes(timeline, [curve], [events], [static])
    effects = [None if event is None else event.effect for event in events.at(np.arange(len(curve.span)))]
    assert Counter(effect for effect in effects if effect) == {"save": 1, "begin swap": 1, "swap": 1, "release": 1}
    saved, begun, swapped, released = (
        changes.held_after(0, effects.index(effect)) for effect in ("save", "begin swap", "swap", "release")
    )
    assert sum(saved.values()) == pytest.approx(total(tensor for part in parts for tensor in part.saved))
    taken_bytes = float(timeline.alloc_bytes[curve.span[effects.index("begin swap")]])
    assert taken_bytes > 0
    assert begun == {**saved, "output gradients": taken_bytes}
    needed = [tensor for part in parts for tensor in part.held_for_weights]
    assert swapped["output gradients"] == total(tensor for tensor in needed if "output gradient" in tensor.name) > 0
    left = sum(part.input_gradient_bytes for part in parts)
    assert sum(swapped.values()) == pytest.approx(total(needed) + left)
    assert {kind: nbytes for kind, nbytes in released.items() if kind != "input gradients"} == {}

"""The model of pairs of features, and what is derived of a pair by hand: bytes held and bytes moved.

The model is small enough for that: two layers of hidden size 64 with four heads, an MLP of 256, 128 tokens, RMSNorm, no
biases and no positions. Sequences have 16 tokens; weights are bf16, gradients fp32, AdamW keeps master weights.

    attention  4 h h = 16,384    MLP  8 h h = 32,768    norms of a layer  2 h = 128    final norm  N = h = 64
    a layer  L = 49,280    table  T = 128 h = 8,192    a micro-batch between layers  E = 16 h 2 = 2,048 bytes

A parameter has 2 bytes of weight, 4 of gradient and 12 of optimizer state. Of S bytes over n ranks a ring's all-reduce
sends 2 (n - 1) / n S per rank, a reduce-scatter and an all-gather (n - 1) / n S each: over two ranks S, S/2 and S/2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from simulator.step_result import StepResult
from tests.support import quick
from tests.support.jobs import job

H, SEQ = 64, 16
#: Elements: two layers, the tables of embedding and head, the final norm.
L, T, N = 12 * H * H + 2 * H, 128 * H, H
#: Bytes of a micro-batch's activation between two layers.
E = SEQ * H * 2
#: All of an untied model, and one with one table.
P, TIED_P = 2 * L + N + 2 * T, 2 * L + N + T


@dataclass(frozen=True)
class Held:
    """Elements of one stage's weights, gradients and optimizer state that a GPU holds."""

    weights: float
    gradients: float
    optimizer: float


@dataclass(frozen=True)
class Pair:
    """A job of two features, and what is derived of it: ``held`` by stage, bytes ``sent`` by a GPU for each purpose."""

    layout: Mapping[str, Any]
    held: tuple[Held, ...]
    sent: Mapping[str, float]
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


def description(layout: Mapping[str, Any], model: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    workload = job()
    workload["model"] = {
        "layers": 2,
        "hidden": H,
        "heads": 4,
        "vocab": 128,
        "vocab_multiple": 16,
        "norm": "rmsnorm",
        "position": "none",
        "bias": False,
        "tied_embeddings": False,
        **model,
    }
    workload["training"] = {"seq": SEQ, "global_batch": 4, **training}
    workload["parallelism"] = {"collective_algorithm": "ring", **layout}
    return workload


def play(pair: Pair) -> StepResult:
    return quick.play(quick.load(description(pair.layout, pair.model, pair.training)))


def whole(*elements: float) -> tuple[Held, ...]:
    """All of so many elements on each stage."""
    return tuple(Held(count, count, count) for count in elements)


#: Elements of a tensor-parallel rank of two: half of each matrix and table, whole norms.
TP_P, TP_TIED_P = 2 * (6 * H * H + 2 * H) + N + T, 2 * (6 * H * H + 2 * H) + N + T / 2
#: Bytes of all-reduces of one micro-batch over two tensor-parallel ranks without sequence parallelism. Forward one
#: behind attention, MLP and embedding, backward one before attention, MLP and head: 2 (2 + 2) + 2 of E. The loss
#: agrees on the largest logit, the sum of exponentials and the target's logit: three numbers of fp32 a token.
TP_SENT = 10 * E + 3 * 4 * SEQ
#: Bytes of one micro-batch of two context-parallel ranks in one layer. Forward the keys and values of the other half of
#: the sequence come round, 2 (E / 2). Backward they do again, and their gradients go back.
CP_SENT = 3 * E


def assert_moves_and_holds(pair: Pair) -> None:
    report = play(pair).to_dict()
    stages = [(one["weights"], one["gradients"], one["optimizer"]) for one in report["memory"]["per_stage"]]
    assert stages == [pytest.approx((2 * x.weights, 4 * x.gradients, 12 * x.optimizer), rel=1e-12) for x in pair.held]
    sent = {kind: one["bytes_per_gpu"] for kind, one in report["communication"].items() if one["bytes_per_gpu"]}
    assert sent == pytest.approx(pair.sent, rel=1e-12)

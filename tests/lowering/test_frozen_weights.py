"""Frozen weights are not reduced and not updated; those that are sharded are gathered all the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from simulator.analysis.time.memory_curve import memory_curve
from simulator.config import Workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.models import rank_parts, trained_parameters, weights_of
from simulator.operations.weights import Weight, trained, weight_bytes
from simulator.program import Comm, Step
from simulator.step_result import StepResult
from tests.support import quick
from tests.support.exact import assert_same
from tests.support.grids import one_in
from tests.support.jobs import any_job, job
from tests.support.quick import SPEEDS

DP = 4
RING = {"collective_algorithm": "ring"}
ADAPTERS = {"rank": 4, "targets": ["q", "v", "down"]}


def load(
    training: dict[str, Any],
    framework: Any = "megatron_core",
    model: dict[str, Any] | None = None,
    **parallelism: Any,
) -> Workload:
    work = job(framework=framework, parallelism={"dp": DP, **RING} | parallelism)
    work["model"] |= model or {}
    work["training"] |= {"grad_clip": None, "global_batch": 8} | training
    return quick.load(work)


def weights(work: Workload) -> tuple[Weight, ...]:
    return weights_of(rank_parts(work, 0))


def steps(result: StepResult, op: str) -> list[Step]:
    role = result.program.roles[result.program.role_of[0]]
    chosen = [step for _, _, step in role.steps() if isinstance(step.op, Comm) and step.op.purpose == "dp"]
    return [step for step in chosen if step.op.op == op]


def moved(result: StepResult, op: str) -> float:
    return sum(step.op.nbytes for step in steps(result, op) if isinstance(step.op, Comm))


@pytest.mark.parametrize("framework", ["megatron_core", "pytorch"])
@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_reduce_adapters_alone(framework: str, overlap: bool) -> None:
    """Without ZeRO, DDP's and Megatron's buckets hold the adapters' gradients, 4 bytes each, once a step."""
    work = load({"adapters": ADAPTERS}, framework, overlap={"grad_reduce": overlap})
    assert moved(quick.play(work), "all_reduce") == 4 * trained_parameters(work)


@pytest.mark.parametrize(("zero", "micro_batches"), [(1, 1), (2, 2)])
def test_zero_scatters_and_gathers_adapters_alone(zero: int, micro_batches: int) -> None:
    """Stage 1 reduces once, stage 2 each of two micro-batches; what was updated, 2 bytes each, is gathered once."""
    work = load({"adapters": ADAPTERS}, zero=zero)
    result = quick.play(work)
    assert moved(result, "reduce_scatter") == micro_batches * 4 * trained_parameters(work)
    assert moved(result, "all_gather") == 2 * trained_parameters(work)


@pytest.mark.parametrize("framework", ["megatron_core", "pytorch"])
@pytest.mark.parametrize("base", [None, "nf4"])
def test_fully_sharded_frozen_weights_are_gathered_and_never_reduced(framework: str, base: str | None) -> None:
    """Layers are gathered forward and backward, the root once, as they are stored; gradients are the adapters'."""
    work = load({"adapters": ADAPTERS, "global_batch": 4, "base": base}, framework, zero=3)
    result = quick.play(work)
    parts = rank_parts(work, 0)
    layers, root = (weight_bytes(weights_of(p for p in parts if p.is_unit is unit)) for unit in (True, False))
    assert moved(result, "all_gather") == pytest.approx(2 * layers + root, rel=1e-12)
    assert moved(result, "reduce_scatter") == 4 * trained_parameters(work)
    assert not any("root" in step.label for step in steps(result, "reduce_scatter"))


def test_shards_of_frozen_weights_are_not_masters() -> None:
    """torch's fully_shard shards fp32 masters of the adapters, and frozen weights in bf16."""
    work = load({"adapters": ADAPTERS}, "pytorch", zero=3)
    held = quick.play(work).to_dict()["memory"]["per_stage"][0]["contents"]
    frozen = weight_bytes(weight for weight in weights(work) if not weight.trainable)
    assert held["weights"] == pytest.approx(frozen / DP, rel=1e-12)
    assert held["optimizer"] == pytest.approx(12 * trained_parameters(work) / DP, rel=1e-12)


def test_the_optimizer_updates_adapters_alone() -> None:
    """One kernel of Adam reads the master, both moments and the gradient of each, 4 bytes each."""
    work = load({"adapters": ADAPTERS}, dp=1)
    adam = [kernel for kernel in quick.play(work).timeline.itertuples() if kernel.name == "optimizer.adam"]
    role = quick.play(work).program.roles[0]
    block = next(step.op for _, _, step in role.steps() if step.label == "optimizer")
    kernel = next(op.kernel for op in block.ops if op.name == "optimizer.adam")
    assert len(adam) == 1
    assert kernel.read_bytes == 16 * trained_parameters(work)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_with_nothing_to_train_runs_forward(zero: int) -> None:
    """Stage 0 of 2 is frozen: it has no backward kernels, no gradients and no optimizer; stage 1 trains as ever."""
    work = load({"freeze": ["embedding", "layers 0-3"]}, dp=2, pp=2, zero=zero, model={"tied_embeddings": False})
    result = quick.play(work)
    check(result.program, result.spans)
    first, second = (weights_of(rank_parts(work, stage)) for stage in (0, 1))
    assert not trained(weight for weight in first if not weight.name.startswith("embedding"))
    assert trained(second)
    frame = result.timeline
    kernels = frame[(frame["rank"] == 0) & (frame["lane"] == "compute")]
    assert set(kernels["name"]) >= {"attn.qkv", "mlp.fc2"}
    assert not {name for name in kernels["name"] if "wgrad" in name or "dgrad" in name or name.startswith("optimizer")}


def test_tied_tables_that_are_frozen_are_not_summed() -> None:
    work = load({"freeze": ["embedding", "head"]}, dp=1, pp=2)
    names = set(quick.play(work).timeline["name"])
    assert "pp.all_reduce embedding grads" not in names
    trains = set(quick.play(load({}, dp=1, pp=2)).timeline["name"])
    assert "pp.all_reduce embedding grads" in trains


# ---- Whatever the layout

TUNINGS: list[dict[str, Any]] = [
    {"adapters": {"rank": 8, "targets": ["q", "v"]}},
    {"adapters": {"rank": 4, "targets": ["qkv", "o", "up", "down"]}, "base": "nf4"},
    {"adapters": {"rank": 4, "targets": ["k", "down"], "dropout": 0.1}},
    {"adapters": {"rank": 4, "targets": ["o"], "dtype": "fp32"}},
    {"adapters": {"rank": 4, "targets": ["v"]}, "freeze": ["layers"]},
    {"freeze": ["embedding", "head", "norms"]},
    {"freeze": ["attention"], "base": "nf4"},
    {"freeze": ["embedding", "head", "layers 0-0"]},
    {"freeze": ["layers"]},
]


def tuned_job(number: int) -> Workload:
    """Return a random legal job that is tuned as one of `TUNINGS`."""
    draw, tuning = random.Random(number), TUNINGS[number % len(TUNINGS)]
    while True:
        description = any_job(lambda *choices: draw.choice(choices))
        description["training"] |= tuning
        if description["parallelism"]["pp"] > 1 and draw.random() < 0.3:
            description["parallelism"] |= {"schedule": "zb_h1", "vpp": 1}
        try:
            return quick.load(description)
        except InputError:
            continue


@pytest.mark.parametrize("number", one_in(8, range(4 * len(TUNINGS))))
def test_every_tuning_gives_a_possible_step(number: int) -> None:
    """Nothing overlaps, bytes are conserved, activations are given back, and shortcuts change nothing."""
    work = tuned_job(number)
    speeds = SPEEDS[number % len(SPEEDS)]
    short, plain = quick.play(work, speeds), quick.play(work, speeds, fold=False, coalesce=False)
    check(short.program, short.spans)
    assert_same(short, plain)
    for rank in short.spans.ranks:
        _, held, workspace, *_ = memory_curve(short.spans, rank)
        most = float(np.max(held))
        assert held.min() >= -1e-9 * most
        assert held[-1] == pytest.approx(0.0, abs=1e-9 * most)
        assert workspace[-1] == pytest.approx(0.0, abs=1e-9 * float(workspace.max()))
    result = short.to_dict()
    assert result["params_trained"] == trained_parameters(work) < result["params_total"]

"""Frozen first layers run forward alone, whatever the framework and the layout."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from simulator.config import Workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS
from simulator.models import rank_parts, weights_of
from simulator.operations.weights import weight_bytes
from simulator.program import Attention, Block, Comm, Step, kernels_of
from tests.support import quick
from tests.support.exact import assert_same
from tests.support.grids import one_in
from tests.support.jobs import job

LAYERS, FROZEN, DP = 4, 3, 2
LLAMA: dict[str, Any] = {
    **{"layers": LAYERS, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn_hidden": 128, "vocab": 256},
    **{"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
}
FIRST = {"freeze": ["embedding", f"layers 0-{FROZEN - 1}"]}


def load(framework: str, training: dict[str, Any], **parallelism: Any) -> Workload:
    work = job(framework=framework, model=LLAMA, parallelism={"dp": DP} | parallelism)
    work["training"] = {"seq": 64, "global_batch": 2 * DP} | training
    return quick.load(work)


def steps(work: Workload) -> list[Step]:
    program = quick.play(work).program
    return [step for _, _, step in program.roles[program.role_of[0]].steps()]


@pytest.mark.parametrize("framework", ["pytorch", "torchtitan", "hugging_face", "deepspeed", "hugging_face_deepspeed"])
def test_layers_without_a_backward_pass_are_gathered_for_the_forward_pass_alone(framework: str) -> None:
    """Of two micro-batches each gathers the root and four layers forward, and backward the one that is trained."""
    work = load(framework, FIRST, zero=3)
    gathers = [step.op for step in steps(work) if isinstance(step.op, Comm) and step.op.op == "all_gather"]
    units = [weight_bytes(part.weights) for part in rank_parts(work, 0) if part.is_unit]
    root = weight_bytes(weights_of(part for part in rank_parts(work, 0) if not part.is_unit))
    assert sum(op.nbytes for op in gathers) == pytest.approx(2 * (root + sum(units) + units[-1]), rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "ops"])
@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_first_layers_keep_nothing_and_run_once(zero: int, recompute: str) -> None:
    """Each of two micro-batches runs attention of four layers, and of the trained one again where it is recomputed."""
    work = load("pytorch", FIRST | {"recompute": recompute}, zero=zero)
    frozen = [part for part in rank_parts(work, 0) if part.is_unit][:FROZEN]
    assert [(part.saved_bytes, part.ops("B")) for part in frozen] == [(0.0, ())] * FROZEN
    blocks = [step.op for step in steps(work) if isinstance(step.op, Block)]
    kernels = [one.kernel for block in blocks for op in block.ops for one in kernels_of(op)]
    cores = [kernel for kernel in kernels if isinstance(kernel, Attention) and not kernel.backward]
    again = recompute in ("selective", "full")
    assert len(cores) == 2 * (LAYERS + again)


# ---- Whatever the layout

TUNINGS: list[dict[str, Any]] = [
    *({"freeze": kinds} for kinds in (["embedding"], ["layers"], ["mlp"], ["embedding", "norms"], ["layers 1-2"])),
    *({"freeze": ["layers", "embedding", last]} for last in ("head", "norms")),
    FIRST,
    {"freeze": ["embedding", "head", f"layers 0-{LAYERS - 1}"]},
    *({"adapters": {"rank": 4, "targets": targets}} for targets in (["q"], ["o"], ["k", "down"])),
    {"adapters": {"rank": 4, "targets": ["v"]}, "freeze": ["embedding", "attention"]},
]
LAYOUTS: list[dict[str, Any]] = [
    *({"zero": zero} for zero in (0, 1, 2, 3, 3)),
    *({"zero": zero, "pp": 2} for zero in (0, 1, 3)),
    {"zero": 3, "reshard_after_forward": False},
    {"zero": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    {"zero": 3, "offload": {"activations": "cpu"}},
    {"pp": 2, "schedule": "zb_h1"},
    {"pp": 2, "vpp": 2, "schedule": "interleaved"},
]


def tuned_job(number: int) -> Workload:
    """Return a random legal one of all frameworks x tunings x layouts x recomputation."""
    draw = random.Random(number)
    every = list(itertools.product(FRAMEWORKS, TUNINGS, LAYOUTS, ("none", "selective", "full", "ops")))
    while True:
        framework, tuning, layout, recompute = draw.choice(every)
        try:
            return load(framework, tuning | {"recompute": recompute}, **layout)
        except InputError:
            continue


@pytest.mark.parametrize("number", one_in(8, range(64)))
def test_every_frozen_job_runs_and_counts_no_more_than_it_computes(number: int) -> None:
    work = tuned_job(number)
    short, plain = quick.play(work), quick.play(work, fold=False, coalesce=False)
    check(short.program, short.spans)
    assert_same(short, plain)
    result = short.to_dict()
    assert 0 < result["mfu"] <= 1
    assert result["model_flops_per_step_causal"] <= result["hardware_flops_per_step"] * (1 + 1e-9)

"""Schedules that split the backward pass, or put stages elsewhere, on a real model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from simulator.api import run
from simulator.config import load_workload
from simulator.lowering import build_program
from simulator.models import layer, stage_parts, state_bytes
from simulator.program import Block, Comm, Program, Step, kernels_of
from simulator.schedules import SCHEDULES
from simulator.step_result import StepResult
from tests.support.grids import one_in
from tests.support.jobs import job
from tests.support.quick import load, play_undisturbed

#: Elements of gradients that are complete after a kernel: hidden size 256, 1,024 words, 128 positions. A layer's biases
#: are of 3, 1, 4 and 1 times 256, and each of two norms has 2 x 256. All of these are complete after its last kernel.
COMPLETED = {
    "head.logits wgrad": 1024 * 256,
    "head.norm wgrad": 2 * 256,
    "mlp.fc2 wgrad": 256 * 1024,
    "mlp.fc1 wgrad": 1024 * 256,
    "attn.proj wgrad": 256 * 256,
    "attn.qkv wgrad": 768 * 256,
    "attn.norm wgrad": (3 + 1 + 4 + 1) * 256 + 4 * 256,
    "embedding.positions wgrad": 128 * 256,
    "embedding.lookup wgrad": 1024 * 256,
}
SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits]


def with_schedule(name: str, **changes: Any) -> dict[str, Any]:
    workload = job(**{"parallelism__pp": 4, "parallelism__schedule": name, **changes})
    if SCHEDULES[name].chunks is None:
        workload["parallelism"]["vpp"] = 2
    return workload


def steps(program: Program, rank: int, phase: str) -> list[Step]:
    return [step for _, _, step in program.roles[program.role_of[rank]].steps() if step.phase == phase]


def program_of(name: str, **changes: Any) -> Program:
    return build_program(load_workload(with_schedule(name, **changes)))


def play(name: str, **changes: Any) -> StepResult:
    return run(with_schedule(name, **changes))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_input_and_weight_gradients_do_what_a_whole_backward_does(recompute: str) -> None:
    """The kernels of I and W are those of B, recomputation in I; only what I gathers anew can come on top."""
    whole, split = (program_of(name, training__recompute=recompute) for name in ("1f1b", "zb_h1"))
    for rank in range(4):
        (b, i, w) = (steps(program, rank, kind)[0].op for program, kind in ((whole, "B"), (split, "I"), (split, "W")))
        assert isinstance(b, Block)
        assert isinstance(i, Block)
        assert isinstance(w, Block)
        assert Counter(i.ops) + Counter(w.ops) == Counter(b.ops)
        assert {op.phase for op in w.ops if not isinstance(op, Comm)} == {"W"}
        assert ("R" in {op.phase for op in i.ops if not isinstance(op, Comm)}) == (recompute == "full")


def test_what_the_weight_gradient_needs_of_a_layer() -> None:
    """arXiv 2401.10241, table 1: 32 s b h bytes for W, here as inputs (2 + 2 + 2 + 8) and output gradients
    (6 + 2 + 8 + 2) of the four products; our W also has the two norms' gradients, of 2 + 2 each."""
    workload = load_workload(job())
    sbh = workload.training.seq * workload.model.hidden
    assert layer(workload).held_bytes == 40 * sbh
    assert layer(workload).held_bytes == layer(workload, recompute="full").held_bytes
    assert layer(workload).saved_bytes > 32 * sbh


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", SPLIT)
def test_memory_is_given_back(name: str, recompute: str) -> None:
    """F takes what is saved, I turns it into what W needs, W frees that: in the end nothing is held."""
    workload = load_workload(with_schedule(name, training__recompute=recompute))
    program = build_program(workload)
    for rank in range(4):
        every = [step for kind in "FBIW" for step in steps(program, rank, kind)]
        assert sum(step.alloc_bytes - step.free_bytes for step in every) == pytest.approx(0, abs=1e-3)
        for stage in {step.stage for step in every if step.phase == "W"}:
            parts = stage_parts(workload, stage % workload.parallelism.n_stages)
            held = sum(part.held_bytes for part in parts)
            (freed, *_) = [step.free_bytes for step in every if step.stage == stage and step.phase == "W"]
            assert freed == held


def test_peak_memory_of_zb_h1_by_hand() -> None:
    """Rank 3 of 4, 8 micro-batches: F0 I0 F1 I1 F2 I2 F3 [I3 W0] ...: three micro-batches wait for W with ``held``
    bytes when the fourth, with ``saved``, runs its I: part by part, from the last, each in its workspace, and each then
    leaves what its weight gradient needs in place of what it had saved."""
    result = play("zb_h1", training__global_batch=8)
    parts = stage_parts(result.workload, 3)
    saved, held = sum(p.saved_bytes for p in parts), sum(p.held_bytes for p in parts)
    beside = 0.0
    fullest = max(saved, held)
    for part in reversed(parts):
        fullest = max(fullest, saved + beside + part.input_workspace_bytes)
        beside += part.held_bytes - part.saved_bytes
    last = result.to_dict()["memory"]["per_stage"][3]
    assert last["activations"] == pytest.approx(3 * held + fullest)


def test_recompute_with_a_split_backward_is_warned_of() -> None:
    """A warning says that recomputed activations are held until W has run. Without recompute there is none."""
    assert any("recomputation runs before" in note for note in play("zb_h1", training__recompute="full").warnings)
    assert not any("recomputation runs before" in note for note in play("zb_h1").warnings)


@pytest.mark.parametrize("name", one_in(3, SPLIT))
def test_split_schedules_compute_as_much(name: str) -> None:
    """Time of compute, mean over GPUs, and FLOPs are those of 1F1B, but for a second copy of the optimizer's work.

    Communication takes nothing from kernels: schedules differ in what travels beside them.
    """
    plain, split = (
        play_undisturbed(load(with_schedule(which, parallelism__dp=2, training__global_batch=32))).to_dict()
        for which in ("1f1b", name)
    )
    assert split["time_breakdown_s"]["compute"] == pytest.approx(plain["time_breakdown_s"]["compute"], rel=2e-2)
    assert split["hardware_flops_per_step"] == plain["hardware_flops_per_step"]


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_reduce_when_the_last_weight_gradient_is_there(name: str) -> None:
    """Every parameter of a rank is reduced once, and no bucket before the kernels of W (or B) that complete it.

    A bucket waits for one piece of a pass. What its stage has reduced by then, kernels up to that piece have completed.
    """
    workload = load_workload(with_schedule(name, parallelism__dp=2, parallelism__bucket_bytes=200_000))
    program = build_program(workload)
    for rank in range(4):
        role = program.roles[program.role_of[2 * rank]]
        (params,) = {state_bytes(workload, rank).gradients / 4}
        reductions = [step for step in role.lanes["dp"] if step.label.startswith("reduce ")]
        assert sum(step.op.nbytes for step in reductions if isinstance(step.op, Comm)) == 4 * params
        compute = list(role.lanes["compute"])
        place_of = {step.label: place for place, step in enumerate(compute)}
        reduced = Counter[int]()
        for step in reductions:
            assert isinstance(step.op, Comm)
            (piece,) = step.after
            last = compute[place_of[piece]]
            assert last.phase in "BW"
            reduced[last.stage] += step.op.nbytes / 4
            assert reduced[last.stage] <= _completed(compute[: place_of[piece] + 1], last)


def _completed(compute: Sequence[Step], last: Step) -> int:
    """Return the elements of gradients that the pieces of the pass of ``last`` in ``compute`` have completed."""
    of_pass = [step for step in compute if (step.stage, step.microbatch) == (last.stage, last.microbatch)]
    ops = [op for step in of_pass if step.phase == last.phase and isinstance(step.op, Block) for op in step.op.ops]
    return sum(COMPLETED.get(kernel.name, 0) for op in ops for kernel in kernels_of(op))


def test_a_v_keeps_a_tied_embedding_in_one_place() -> None:
    """Rank 0 holds the first and the last stage: one table, whose gradients need no exchange."""
    program = program_of("zb_v")
    assert "embd" not in program.groups
    assert not [step for _, _, step in program.roles[0].steps() if step.label == "embedding grads"]
    plain = sum(state_bytes(load_workload(with_schedule("1f1b")), rank).weights for rank in range(4))
    v = sum(state_bytes(load_workload(with_schedule("zb_v")), rank).weights for rank in range(4))
    assert plain - v == 2 * 1024 * 256  # the last stage's copy


def test_dualpipe_holds_the_model_twice_and_adds_up_its_gradients() -> None:
    """Ranks r and p - 1 - r hold the same stages; each reduces its half over dp, then both add up."""
    program = program_of("dualpipe", parallelism__dp=2)
    workload = load_workload(with_schedule("dualpipe", parallelism__dp=2))
    assert program.groups["twin"] == ((0, 6), (2, 4), (1, 7), (3, 5))
    for rank in range(4):
        assert state_bytes(workload, rank) == state_bytes(workload, 3 - rank)
        (twin,) = [step for _, _, step in program.roles[rank].steps() if step.label == "twin grads"]
        assert isinstance(twin.op, Comm)
        assert twin.op.nbytes == state_bytes(workload, rank).gradients
    once = sum(state_bytes(load_workload(with_schedule("zb_v")), rank).weights for rank in range(4))
    twice = sum(state_bytes(workload, rank).weights for rank in range(4))
    assert once < twice <= 2 * once


def test_uneven_layers_follow_the_model_through_a_v() -> None:
    """``layers_per_stage`` is in the model's order: in a V of 2 ranks, stages 0 and 3 are on rank 0."""
    layers = [1, 2, 2, 3]
    workload = load_workload(with_schedule("zb_v", parallelism__pp=2, parallelism__layers_per_stage=layers))
    assert workload.parallelism.vpp == 2
    assert workload.parallelism.stages_of(0) == (0, 3)
    assert [sum(part.name == "layer" for part in stage_parts(workload, stage)) for stage in range(4)] == layers

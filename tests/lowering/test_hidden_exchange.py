"""All-to-alls of experts beside the passes of another micro-batch (Megatron-Core's combined 1F1B, DualPipe's F&B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS
from simulator.lowering import build_program
from simulator.lowering.lanes import Lanes
from simulator.lowering.passes.hide_all_to_alls import _layers_in_turns, _PartOfPass, hide_all_to_alls
from simulator.program import AllToAll, Axis, Block, Compute, GroupedMatmul, Purpose, Step, StepPhase
from simulator.schedules import SCHEDULES, paired
from simulator.schedules.csv_form import to_csv
from tests.support import quick
from tests.support.grids import one_in
from tests.support.jobs import job
from tests.support.lanes import pipeline_passes, rank
from tests.support.random_checks import same_compiled, same_without_shortcuts
from tests.support.random_plays import Plays

HIDDEN = {"expert_all_to_all": True}
#: Four experts on two ranks, in all of two layers.
MOE = {"moe": {"experts": 4, "top_k": 2, "ffn_hidden": 256}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"dp": 2},
    "tp": {"dp": 2, "tp": 2, "etp": 1},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved", "dp": 2},
    "interleaved blocking": {"pp": 2, "vpp": 2, "schedule": "interleaved", "dp": 2, "overlap": {"p2p": False}},
    "dualpipe": {"pp": 2, "schedule": "dualpipe", "dp": 2},
    "dualpipe_v": {"pp": 2, "vpp": 2, "schedule": "dualpipe_v", "dp": 2},
}


def described(layout: dict[str, Any], overlap: dict[str, Any], **training: Any) -> dict[str, Any]:
    """Return a small job of experts as a workload file says it."""
    workload = job()
    workload["model"] |= MOE | {"layers": 4 * layout.get("pp", 1)}
    workload["training"] |= {"global_batch": 16, "grad_clip": None, "recompute": "none"} | training
    workload["parallelism"] |= {"ep": 2, "zero": 1} | layout
    workload["parallelism"]["overlap"] = {**layout.get("overlap", {}), **overlap}
    return workload


def test_layers_of_two_passes_run_in_turns() -> None:
    """F1 and B0 of one layer are in the order of Megatron-Core.

    Steps of F1 are the embedding (:0), attention (:1), the MLP (:3), what is behind it (:5), and the head. Those of B0
    are the head (:0), what is before the combine (:1), the MLP (:3), attention (:5), and the embedding. All-to-alls
    are :2 and :4 of either.
    """
    context = rank(dp=2, ep=2, overlap=HIDDEN, model=MOE | {"layers": 1}, training={"global_batch": 4})
    lanes = hide_all_to_alls(pipeline_passes(context), context)
    labels = [step.label for step in lanes["compute"]]
    pair = labels[labels.index("0F0") + 1 : labels.index("0B1:0")]
    assert pair == ["0F1:0", "0B0:0", "0B0:1", "0F1:1", "0B0:3", "0F1:3", "0B0:5", "0F1:5", "0F1", "0B0"]
    travels = [step.label for step in lanes["ep"]]
    assert travels[2:6] == ["0B0:2", "0F1:2", "0B0:4", "0F1:4"]
    after = {step.label: step.after for steps in lanes.values() for step in steps}
    assert after["0F1:2"] == ("0F1:1",)
    assert after["0F1:3"] == ("0F1:2",)
    assert after["0B0:2"] == ("0B0:1",)
    assert after["0F1:1"] == ()


def test_weight_gradients_of_an_mlp_wait_for_none_of_its_exchanges() -> None:
    """Weight gradients that are delayed come behind the gradients that are sent, and wait for nothing."""
    delayed = {**HIDDEN, "delayed_weight_grad": True}
    context = rank(dp=2, ep=2, overlap=delayed, model=MOE | {"layers": 1}, training={"global_batch": 4})
    lanes = hide_all_to_alls(pipeline_passes(context), context)
    steps = {step.label: step for step in lanes["compute"]}
    labels = list(steps)
    at = labels.index("0B0:5")
    assert labels[at - 1 : at + 2] == ["0B0:3", "0B0:5", "0F1:3"]
    assert steps["0B0:5"].after == ()
    block = steps["0B0:5"].op
    assert isinstance(block, Block)
    kernels = [op for op in block.ops if isinstance(op, Compute)]
    products = [kernel.name for kernel in kernels if isinstance(kernel.kernel, GroupedMatmul)]
    assert products == ["moe.fc2 wgrad", "moe.fc1 wgrad"]


@pytest.mark.parametrize("empty", [False, True])
def test_the_first_step_of_a_part_takes_its_bytes_and_the_last_one_gives_them_back(empty: bool) -> None:
    """A segment of a part has several steps where pieces of a pass end in it. Segments without steps are left out."""
    block = Block("work", ())
    named = [[Step(f"{segment}{number}", block, ("x",)) for number in range(3)] for segment in "ab"]
    part = _PartOfPass(segments=[[], *named, []] if empty else named)
    part.take(8.0, 16.0)
    steps = [step for segment in part.segments for step in segment]
    assert [step.label for step in steps] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert [step.alloc_bytes for step in steps] == [8, 0, 0, 0, 0, 0]
    assert [step.free_bytes for step in steps] == [0, 0, 0, 0, 0, 16]
    assert {step.after for step in steps} == {("x",)}


#: Layouts of four stages at most, and what else a layer has.
TAKEN_APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({}, {}),
    "tp": ({"tp": 2, "etp": 1}, {}),
    "ulysses": ({"cp": 2, "cp_method": "ulysses"}, {}),
    "predictor": ({}, {"mtp_layers": 1}),
    "dense layers": ({}, {"moe": MOE["moe"] | {"every": 2, "shared_experts": 1}}),
    "interleaved": ({"pp": 2, "vpp": 2, "schedule": "interleaved"}, {}),
    "a dense stage": (
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        {"moe": MOE["moe"] | {"first_dense_layers": 1}},
    ),
    "dualpipe": ({"pp": 2, "schedule": "dualpipe"}, {}),
    "dualpipe_v": ({"pp": 2, "vpp": 2, "schedule": "dualpipe_v"}, {}),
}


def _ops(lanes: Lanes) -> Iterator[object]:
    """Yield the operations of all lanes, with those in blocks."""
    for step in (step for steps in lanes.values() for step in steps):
        yield from step.op.ops if isinstance(step.op, Block) else (step.op,)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", TAKEN_APART)
def test_passes_that_are_taken_apart_do_what_they_did(name: str, delayed: bool) -> None:
    """Every kernel and every transfer comes as often as before, as many bytes stay, and what a pass waited for, such as
    a receive, it waits for still."""
    layout, model = TAKEN_APART[name]
    overlap = {**HIDDEN, "delayed_weight_grad": delayed}
    for pipeline_rank in range(layout.get("pp", 1)):
        context = rank(
            pipeline_rank,
            dp=2,
            ep=2,
            overlap=overlap,
            model=MOE | {"layers": 4} | model,
            training={"global_batch": 16, "recompute": "none"},
            **layout,
        )
        whole = pipeline_passes(context)
        apart = hide_all_to_alls(whole, context)
        assert len(apart["ep"]) > 0
        assert Counter(_ops(apart)) == Counter(_ops(whole))
        awaited = [{label for step in lanes["compute"] for label in step.after} for lanes in (whole, apart)]
        assert awaited[0] <= awaited[1]
        activations = [sum(step.alloc_bytes - step.free_bytes for step in lanes["compute"]) for lanes in (whole, apart)]
        assert activations[1] == pytest.approx(activations[0], abs=1.0)


@pytest.mark.parametrize(
    "packed", [{"copy_to_buckets": True}, {"grad_compression": "fp8"}, {"grad_compression": "int8"}]
)
def test_gradients_are_packed_between_the_layers_that_make_them(packed: dict[str, Any]) -> None:
    """Passes that are taken apart still complete gradients bucket by bucket, and as much is packed for each.

    A bucket of 100 kB ends inside of a pass: a kernel that packs it stands between two pieces of that pass.
    """
    lanes = {}
    for hidden in (False, True):
        layout = {"dp": 2, "bucket_bytes": 100_000, **packed, "overlap": {"grad_reduce": True}}
        program = build_program(quick.load(described(layout, {"expert_all_to_all": hidden})))
        lanes[hidden] = program.roles[0].lanes["compute"]
    verbs = ("copy ", "pack ")
    kernels = {hidden: Counter(step.op for step in lanes[hidden] if step.label.startswith(verbs)) for hidden in lanes}
    assert kernels[True] == kernels[False]
    assert sum(kernels[True].values()) > 4
    at = {step.label: number for number, step in enumerate(lanes[True])}
    packs = [step for step in lanes[True] if step.label.startswith(verbs)]
    assert all(at[label] < at[step.label] for step in packs for label in step.after)
    assert min(at[step.label] for step in packs) < max(at[step.label] for step in lanes[True] if step.phase == "B")


def test_a_layer_with_three_all_to_alls_is_no_layer_of_experts() -> None:
    """Turns are those of layers that send tokens there and back: nothing else is left out in silence."""
    work = Step("work", Block("work", ()), phase=StepPhase.FORWARD)
    travel = Step("travel", AllToAll("travel", 1.0, Axis.EP, Purpose.EXPERT))
    part = _PartOfPass(segments=[[work], [], [], []], travels=[travel] * 3)
    with pytest.raises(RuntimeError, match="4 steps would run 3"):
        _layers_in_turns(part, _PartOfPass())


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_schedule_in_pairs_runs_one_forward_pass_more_ahead(name: str) -> None:
    """Megatron-Core counts one more pass of warm-up, so that no slot has both passes of one micro-batch."""
    p, m, v = (1, 6, 1) if name == "1f1b" else (4, 8, 3)
    schedule = SCHEDULES[name]
    pairs = paired(schedule)
    for rank_number, slots in enumerate(pairs.order(p, m, v)):
        ahead = next(number for number, slot in enumerate(slots) if len(slot) == 2)
        alone = next(number for number, slot in enumerate(schedule.order(p, m, v)[rank_number]) if _has_backward(slot))
        assert ahead == (alone if name == "1f1b" else alone + 1)
        assert all(forward[1:] != backward[1:] or forward[0] != backward[0] for forward, backward in _pairs(slots))
    assert paired(SCHEDULES["dualpipe_v"]) is SCHEDULES["dualpipe_v"]


def _has_backward(slot: Any) -> bool:
    return any(action.kind == "B" for action in slot)


def _pairs(slots: Any) -> list[Any]:
    return [[(action.stage, action.microbatch) for action in slot] for slot in slots if len(slot) == 2]


def _figures(overlap: dict[str, Any], **moe: Any) -> dict[str, Any]:
    """Return the result of a job whose computation lasts longer than its all-to-alls."""
    description = described({"dp": 2}, overlap, seq=4096)
    description["model"]["moe"] = MOE["moe"] | moe
    result = quick.play(quick.load(description))
    sent = result.timeline.query("lane == 'ep' and name.str.endswith(' of probabilities')")
    apart = (sent["end_s"] - sent["start_s"]).sum() / result.timeline["rank"].nunique()
    return {**result.to_dict(), "probabilities_s": apart}


def test_all_exchanges_but_those_of_the_ends_are_hidden() -> None:
    """The first forward and the last backward pass are exposed, where computation lasts longer.

    Each of m passes has two all-to-alls a layer, so that 4 m become 4: an m-th part. Those of probabilities are apart
    in the plain job, and part of the others in the hidden one. With a capacity nobody asks how many tokens come, which
    nothing would hide.
    """
    plain, hidden = (_figures(overlap, capacity_factor=1.0) for overlap in ({}, HIDDEN))
    exposed = [one["time_breakdown_s"]["exposed"]["ep"] - one["probabilities_s"] for one in (plain, hidden)]
    assert (plain["probabilities_s"] > 0, hidden["probabilities_s"]) == (True, 0)
    assert hidden["n_microbatches"] == 8
    assert exposed[1] == pytest.approx(exposed[0] / 8, rel=0.1)
    assert plain["communication"]["ep"]["bytes_per_gpu"] == hidden["communication"]["ep"]["bytes_per_gpu"]
    assert hidden["step_time_s"] < plain["step_time_s"]


def test_a_second_micro_batch_needs_little_more_memory() -> None:
    """Layers of one pass give back what those of the other take: at most a layer's activations are there twice."""
    plain, hidden = (_figures(overlap) for overlap in ({}, HIDDEN))
    activations = [figures["memory"]["per_stage"][0]["activations"] for figures in (plain, hidden)]
    assert activations[0] <= activations[1] <= activations[0] * 1.5


@pytest.mark.parametrize("name", one_in(2, LAYOUTS))
def test_shortcuts_and_engines_agree(name: str) -> None:
    """Jobs are the same played whole, folded, coalesced and compiled; every other one delays weight gradients."""
    overlap = {**HIDDEN, "delayed_weight_grad": list(LAYOUTS).index(name) % 2 == 1}
    description = described(LAYOUTS[name], overlap, global_batch=8 * LAYOUTS[name].get("pp", 1))
    description["model"]["layers"] = 2 * LAYOUTS[name].get("pp", 1)
    plays = Plays(description)
    for check in (same_without_shortcuts, same_compiled):
        assert list(check(plays)) == []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_megatron_core_alone_runs_two_micro_batches_at_once_in_1f1b(name: str) -> None:
    """DeepSpeed, whose kernels are Megatron-Core's in part, has its own experts."""
    assert FRAMEWORKS[name].has_core_experts == (name in ("megatron_core", "megatron_core_local"))


def test_a_file_may_say_which_passes_overlap(tmp_path: Path) -> None:
    """DualPipeV written to a file, whose slots have a forward and a backward pass, hides as much as by its name."""
    name, pp, vpp = "dualpipe_v", 2, 2
    path = tmp_path / "pairs.csv"
    description = described({"dp": 2, "pp": pp, "vpp": vpp, "schedule": name}, HIDDEN)
    by_name = quick.load(description)
    path.write_text(to_csv(SCHEDULES[name].order(pp, by_name.microbatches, vpp), joined=True))
    description["parallelism"] |= {"schedule": str(path), "optimizer_sync": by_name.parallelism.optimizer_sync}
    times = [quick.play(workload).to_dict()["step_time_s"] for workload in (by_name, quick.load(description))]
    assert times[1] == pytest.approx(times[0])


REFUSED: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
    ("no ranks to send to", {"ep": 1}, {}, "no tokens travel"),
    ("one pass at a time", {"pp": 2, "schedule": "gpipe"}, {}, "one pass at a time"),
    ("one chunk a rank", {"pp": 2}, {}, "only where ranks have several"),
    ("whole layers again", {}, {"recompute": "full"}, "whole layers are recomputed"),
    ("shared experts", {"overlap": {"ep": True}}, {}, "hide behind another micro-batch where shared experts"),
    ("the exchange again", {}, {"recompute": {"granularity": "selective", "modules": ["moe"]}}, "would be recomputed"),
    ("unit by unit", {"zero": 3}, {}, "layer by layer"),
    ("activations leave", {"offload": {"activations": "cpu"}}, {}, "activations leave"),
)


@pytest.mark.parametrize(("layout", "training", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_megatron_asks_is_asked(layout: dict[str, Any], training: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        quick.load(described({"dp": 2, **layout}, HIDDEN, **training))


def test_shared_experts_are_not_asked_for() -> None:
    """``overlap.ep`` needs them, and says which key does not."""
    with pytest.raises(InputError, match="expert_all_to_all has another micro-batch compute beside it"):
        quick.load(described({"dp": 2}, {"ep": True}))
    quick.load(described({"dp": 2}, HIDDEN))

"""Bounds of layouts: no step is below its bounds, and simple cases are worked out by hand."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from simulator.analysis.training.static_memory import communicators
from simulator.config import Workload, load_workload
from simulator.config.variants import Variants
from simulator.errors import InputError
from simulator.lowering.layout import groups_of_first_rank, layout
from simulator.operations.nodes import comm
from simulator.schedules import SCHEDULES
from simulator.searching.bounds import LayoutBounds
from simulator.searching.in_flight import fullest_moments
from simulator.searching.memory_floor import least_communicators
from simulator.searching.time_floor import first_group_is_fastest
from tests.support.experts import job as experts_job
from tests.support.grids import grid
from tests.support.jobs import job
from tests.support.searches import LARGE, bound_of, figures_of, space_on

#: Step times are sums in another order.
ROUNDING = 1e-9
LAYOUTS: list[dict[str, Any]] = [
    {"pp": 4, "dp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    {"pp": 2, "dp": 2, "zero": 2},
    {"pp": 2, "dp": 2, "zero": 3},
    {"cp": 2, "pp": 2},
]


@pytest.mark.parametrize(("schedule", "number"), grid(SCHEDULES, range(len(LAYOUTS)), every=9))
def test_no_step_is_below_its_bounds(schedule: str, number: int) -> None:
    """Bounds hold for every schedule: kernels at their prices, in-line collectives alone on the network."""
    vpp = SCHEDULES[schedule].chunks or 2
    section = {**LAYOUTS[number], "schedule": schedule, "vpp": vpp}
    try:
        workload = load_workload(job(parallelism=section, training={"seq": 128, "global_batch": 16}))
    except InputError:
        pytest.skip("the schedule does not go with this layout")
    bound, figures = bound_of(workload), figures_of(workload)
    assert bound.step_time_s <= figures["step_time_s"] * (1 + ROUNDING)
    assert bound.memory_bytes <= figures["peak_bytes"] * (1 + ROUNDING)


def test_experts_are_bounded_too() -> None:
    workload = load_workload(experts_job())
    bound, figures = bound_of(workload), figures_of(workload)
    assert 0 < bound.step_time_s <= figures["step_time_s"] * (1 + ROUNDING)
    assert 0 < bound.memory_bytes <= figures["peak_bytes"] * (1 + ROUNDING)


@pytest.mark.parametrize(
    "section", [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2, "schedule": "interleaved", "vpp": 2}, {"dp": 4, "zero": 1}]
)
def test_bounds_of_large_kernels_are_close(section: dict[str, Any]) -> None:
    """The fullest rank computes through nearly all of a step of large kernels: 9 tenths of it at least.

    The bound of memory lacks only blocks that the allocator keeps.
    """
    workload = load_workload({**LARGE, "parallelism": section})
    bound, figures = bound_of(workload), figures_of(workload)
    assert bound.step_time_s > 0.9 * figures["step_time_s"]
    assert bound.memory_bytes > 0.9 * figures["peak_bytes"]


def test_filling_and_draining_count() -> None:
    """One micro-batch goes through 2 stages forward and back: as long as on one rank, not half of that.

    With four times the micro-batches the second rank is behind by one pass each way: (4 + 1) halves of four wholes.
    """
    sections: dict[str, Any] = {"model": LARGE["model"], "framework": "megatron_core"}
    training = {"seq": 2048, "precision": "bf16"}

    def least_s(pp: int, batch: int) -> float:
        workload = job(**sections, training={**training, "global_batch": batch}, parallelism={"pp": pp})
        return bound_of(load_workload(workload)).step_time_s

    first_s, fourth_s = least_s(1, 1), least_s(1, 4)
    microbatch_s = (fourth_s - first_s) / 3
    optimizer_s = first_s - microbatch_s
    assert least_s(2, 1) == pytest.approx(microbatch_s + optimizer_s / 2, rel=0.03)
    assert least_s(2, 4) == pytest.approx(microbatch_s * 5 / 2 + optimizer_s / 2, rel=0.03)


@pytest.mark.parametrize(("reshards", "gathers"), [(True, 2), (False, 1)])
def test_gathered_layers_are_bytes_over_links(reshards: bool, gathers: int) -> None:
    """ZeRO-3 on 16 GPUs of two nodes gathers the layers for each pass, and reduces fp32 gradients of twice the bytes.

    Of n bytes a ring of 16 brings 15/16 to each GPU, and 8 cards carry them into a node. With 4 micro-batches and next
    to no time to compute, a step is little more than that.
    """
    training = {"seq": 64, "global_batch": 64, "precision": "bf16"}
    section = {"dp": 16, "zero": 3, "reshard_after_forward": reshards}
    workload = load_workload({**LARGE, "training": training, "parallelism": section})
    layers = 8 * 12 * 8192**2
    wire_bytes = 4 * (2 * gathers + 4) * layers * 15 / 16
    card_Bps = 8 * 25e9
    least_s, step_time_s = bound_of(workload).step_time_s, figures_of(workload)["step_time_s"]
    assert wire_bytes / card_Bps < least_s < 1.3 * wire_bytes / card_Bps
    assert 0.7 * step_time_s < least_s < step_time_s


def test_gathers_behind_the_optimizer_come_on_top() -> None:
    """ZeRO-1 on 16 GPUs of two nodes gathers what was updated: a ring brings 15/16 of it to each GPU over 8 cards.

    Beside the first forward passes of the next step these gathers add nothing to the bound.
    """
    training = {"seq": 64, "global_batch": 16, "precision": "bf16"}

    def figures(*, beside: bool) -> tuple[float, float]:
        section = {"dp": 16, "zero": 1, "overlap": {"grad_reduce": False, "param_gather": beside}}
        workload = load_workload({**LARGE, "training": training, "parallelism": section})
        return bound_of(workload).step_time_s, figures_of(workload)["step_time_s"]

    (beside_s, _), (behind_s, step_time_s) = figures(beside=True), figures(beside=False)
    wire_s = 2 * 8 * 12 * 8192**2 * 15 / 16 / (8 * 25e9)
    assert wire_s < behind_s - beside_s < 1.3 * wire_s
    assert 0.9 * step_time_s < behind_s < step_time_s


@pytest.mark.parametrize(
    "section",
    [{}, {"dp": 2}, {"tp": 2, "pp": 4, "dp": 2}, {"cp": 2, "dp": 2}, {"pp": 4}, {"tp": 2, "cp": 2, "pp": 4, "dp": 2}],
)
def test_communicators_are_those_of_a_rank_in_the_middle(section: dict[str, int]) -> None:
    """Ends of a pipeline may have one more, for tied embeddings."""
    workload = load_workload(job(parallelism=section))
    world = {"world": (tuple(range(workload.n_ranks)),)}
    counts = communicators({**layout(workload).groups, **world}, range(workload.n_ranks))
    assert least_communicators(workload) == min((counts[rank] for rank in range(workload.n_ranks)), default=0)


@pytest.mark.parametrize(
    "section", [{"tp": 2, "cp": 2, "dp": 2, "pp": 2}, {"tp": 4, "dp": 2, "rank_order": "dp-tp-pp"}]
)
def test_groups_of_the_first_rank_are_those_of_the_layout(section: dict[str, Any]) -> None:
    workload = load_workload(job(parallelism=section))
    groups = layout(workload).groups
    for axis, members in groups_of_first_rank(workload).items():
        assert members == next((group for group in groups.get(axis, ()) if 0 in group), (0,))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 16), (4, 40)])
def test_fullest_moment_has_as_many_chunks_as_the_schedule_claims(name: str, p: int, m: int) -> None:
    """Whatever was left out of a long step: what waits for its backward pass or its weight gradient is the claim."""
    schedule = SCHEDULES[name]
    v = schedule.chunks or 2
    if schedule.check(p, m, v) is not None:
        pytest.skip("the schedule does not go with these numbers")
    for rank, moment in enumerate(fullest_moments(name, p, m, v)):
        chunks = sum(count for _, count in (*moment.waiting, *moment.split))
        claim = schedule.peak(p, m, v, rank)
        if claim is None:
            assert chunks == v  # the order follows from times: one micro-batch in all of its chunks
        else:
            assert chunks == claim


def test_layouts_of_one_search_share_parts() -> None:
    """Bounds of a layout are the same after all others of the space as alone."""
    space = space_on(4, micro_batch=[1], recompute=["full"], zero=[0, 1])
    variants, whole = space.variants, {"tp": 1, "cp": 1, "pp": 1, "dp": 4}
    layout = variants.workload.parallelism.model_copy(update=whole)
    base = variants.workload.model_copy(update={"cluster": variants.cluster, "parallelism": layout})
    shared, alone = LayoutBounds.for_workload(base), LayoutBounds.for_workload(base)
    legal: list[tuple[Mapping[str, Any], Workload]] = []
    for changes in space.layouts():
        with contextlib.suppress(InputError):
            legal.append((changes, variants.variant(changes)))
    together = [shared.bound(changes, workload) for changes, workload in legal]
    assert sum(bound.step_time_s > 0 for bound in together) > 10
    fresh = [replace(alone).bound(changes, workload) for changes, workload in legal]
    assert together == fresh


@pytest.mark.parametrize("overlap", [True, False])
def test_bounds_do_not_depend_on_the_layouts_before(overlap: bool) -> None:
    """Every schedule has the same bounds first, last, and alone: some join passes, some never drain."""
    base = load_workload({**LARGE, "parallelism": {"overlap": {"grad_reduce": overlap, "param_gather": overlap}}})
    variants = Variants(base, base.cluster)
    legal: list[tuple[Mapping[str, Any], Workload]] = []
    for (name, schedule), zero in product(SCHEDULES.items(), (0, 1)):
        for vpp in (schedule.chunks,) if schedule.chunks else (1, 2):
            keys = {"pp": 2, "dp": 2, "zero": zero, "schedule": name, "vpp": vpp}
            changes = {f"parallelism.{key}": value for key, value in keys.items()}
            with contextlib.suppress(InputError):
                legal.append((changes, variants.variant(changes)))
    names = {workload.parallelism.schedule for _, workload in legal}
    assert {"zb_v", "dualpipe_v", "async_1f1b"} <= names
    bounds = replace(LayoutBounds.for_workload(legal[0][1]), capacity_bytes=math.inf)
    alone = [replace(bounds).bound(changes, workload) for changes, workload in legal]
    forward, backward = replace(bounds), replace(bounds)
    assert [forward.bound(changes, workload) for changes, workload in legal] == alone
    assert [backward.bound(changes, workload) for changes, workload in reversed(legal)] == alone[::-1]


@pytest.mark.parametrize(
    "fabric", [{"kind": "rail_fat_tree"}, {"kind": "fat_tree"}, {"kind": "torus", "shape": [2, 4]}]
)
def test_groups_of_whole_nodes_have_no_better_network_than_the_first(fabric: dict[str, Any]) -> None:
    """Tensor-parallel groups of two nodes of 8 GPUs count on all ranks where the first two hang on one switch.

    Leaves of radix 8 have 4 cards of each rail, or half of a node's, below them; nodes of a torus have none in common.
    """
    tree = {} if "shape" in fabric else {"radix": 8, "tiers": 3}
    cluster = {"name": "dgx_a100", "nodes": 8, "fabric": {**fabric, **tree}}
    workload = load_workload({**LARGE, "cluster": cluster, "parallelism": {"tp": 16, "pp": 4}})
    bounds = LayoutBounds.for_workload(workload)
    group = groups_of_first_rank(workload)["tp"]
    counts = first_group_is_fastest(workload, group, bounds.prices.cluster)
    assert counts == (fabric["kind"] == "rail_fat_tree")
    if counts:
        comms = [comm("all_reduce", "mlp", nbytes) for nbytes in (1e4, 1e6, 1e8)]
        blocks = [range(first, first + 16) for first in range(0, 64, 16)]
        for one in comms:
            first, *others = (bounds.prices.collective_s(one, block) for block in blocks)
            assert first <= min(others)
    assert bound_of(workload).step_time_s <= figures_of(workload)["step_time_s"] * (1 + ROUNDING)


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("section", [{"pp": 2}, {"sync_each_micro_batch": False}])
def test_gathers_and_reductions_count_as_often_as_they_are_made(section: dict[str, Any], reshards: bool) -> None:
    """Torch's stages keep parameters whole from one micro-batch to the next, and whole gradients are reduced once. On
    cards of 10 Gb/s between nodes of one GPU a step is little else, and no shorter than its bound."""
    layout = {"dp": 2, "zero": 3, "reshard_after_forward": reshards, **section}
    node = {"gpus": {"count": 1}, "nics": {"count": 1, "bandwidth_bps": 10e9}}
    workload = load_workload(
        {
            **job(parallelism=layout, training={"seq": 128, "global_batch": 16}, framework="pytorch"),
            "cluster": {"name": "dgx_h100", "node": node},
        }
    )
    bound, figures = bound_of(workload), figures_of(workload)
    assert 0 < bound.step_time_s <= figures["step_time_s"] * (1 + ROUNDING)

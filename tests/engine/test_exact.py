"""Folding and coalescing are shortcuts, not approximations: the same timeline with and without them."""

from __future__ import annotations

from typing import Any

import pytest

import simulator
from simulator.config import load_workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.schedules import SCHEDULES
from tests.support.clusters import CLUSTERS
from tests.support.exact import assert_same, compare
from tests.support.grids import grid
from tests.support.jobs import job, layouts, play


def name_of(section: dict[str, Any]) -> str:
    return "-".join(str(value) for value in list(section.values())[:5])


SMALL = list(layouts(8))
SIZES = list(dict.fromkeys((section["tp"], section["dp"], section["pp"]) for section in SMALL))


def is_sampled(section: dict[str, Any]) -> bool:
    """Return whether `make test` plays a layout: of every other size one of four schedules, in turn."""
    size = SIZES.index((section["tp"], section["dp"], section["pp"]))
    return size % 8 == 2 * ("naive", "gpipe", "1f1b", "interleaved").index(section["schedule"])


@pytest.mark.parametrize(
    "section",
    [pytest.param(section, marks=() if is_sampled(section) else pytest.mark.slow) for section in SMALL],
    ids=name_of,
)
def test_fold_and_coalesce_change_nothing(section: dict[str, Any]) -> None:
    compare(section)


@pytest.mark.slow
@pytest.mark.parametrize("section", [section for section in layouts(64) if section not in SMALL], ids=name_of)
def test_fold_and_coalesce_change_nothing_up_to_64_ranks(section: dict[str, Any]) -> None:
    compare(section)


def test_a_period_begins_with_the_gathering_that_its_first_step_begins_with() -> None:
    """Without coalescing that gathering is a span of its own, on another lane than the kernels behind it."""
    compare(
        {"pp": 2, "tp": 2, "schedule": "async_1f1b", "sequence_parallel": False, "scatter_gather_p2p": True},
        training__global_batch=1,
        training__micro_batch=1,
    )


@pytest.mark.parametrize(
    ("name", "overlap", "zero"),
    [
        pytest.param(
            name, overlap, zero, marks=[] if number % 2 == 0 and overlap is (number % 4 == 0) else [pytest.mark.slow]
        )
        for number, (name, schedule) in enumerate(SCHEDULES.items())
        if schedule.splits or name in ("looped_bfs", "async_1f1b")
        for overlap, zero in ((True, 1), (False, 0))
    ],
)
def test_fold_and_coalesce_change_nothing_whatever_the_schedule(name: str, overlap: bool, zero: int) -> None:
    """Communication overlaps under ZeRO, or there is neither; in `make test` every other schedule has one, in turn."""
    schedule = SCHEDULES[name]
    sync = {"grad_reduce": overlap, "p2p": overlap, "param_gather": overlap}
    section = {"tp": 2, "dp": 2, "pp": 2, "vpp": schedule.chunks or 2, "schedule": name, "zero": zero}
    compare(section | {"overlap": sync}, model__layers=4, training__global_batch=8)


@pytest.mark.parametrize(
    "overrides",
    [
        [{"gpu": "node0.gpu3", "speed_scale": 0.5}],
        [{"link": "node1.nic2", "bandwidth_scale": 0.25}],
    ],
)
def test_what_breaks_a_symmetry_unfolds_only_what_it_touches(overrides: list[dict[str, Any]]) -> None:
    """One slow GPU, or one slow NIC, of 16: some ranks still stand for others, and the timeline is exact."""
    workload = job(parallelism__tp=2, parallelism__dp=4, parallelism__pp=2, parallelism__schedule="1f1b")
    workload["cluster"]["overrides"] = overrides
    even = play(job(parallelism__tp=2, parallelism__dp=4, parallelism__pp=2), fold=True, coalesce=True)
    short, plain = play(workload, fold=True, coalesce=True), play(workload, fold=False, coalesce=False)
    assert len(even.spans.ranks) < len(short.spans.ranks) < 16
    assert_same(short, plain)
    assert short.spans.step_time_s > even.spans.step_time_s


@pytest.mark.parametrize(
    ("cluster", "sizes", "overlap"), grid(CLUSTERS, [(2, 2, 1), (1, 4, 2), (2, 2, 2)], [True, False], every=40)
)
def test_shared_links_fold_exactly(cluster: str, sizes: tuple[int, int, int], overlap: bool) -> None:
    """PCIe switches, host bridges, NVLink pairs and oversubscribed uplinks are shared by groups that fold together:
    what one link of a class carries is the load of all of them. Layouts too large for a cluster are left out."""
    spec = CLUSTERS[cluster]
    node = {**spec["node"], "gpus": {**spec["node"]["gpus"], "type": "a100-sxm-80gb"}}
    tp, dp, pp = sizes
    section = {"tp": tp, "dp": dp, "pp": pp, "overlap": {"grad_reduce": overlap, "p2p": overlap}}
    workload = job() | {"parallelism": section}
    workload["cluster"] = {key: value for key, value in spec.items() if key != "nodes"} | {"node": node}
    try:
        load_workload(workload)
    except InputError:
        pytest.skip("does not fit the cluster")
    short, plain = play(workload, fold=True, coalesce=True), play(workload, fold=False, coalesce=False)
    check(short.program, short.spans)
    check(plain.program, plain.spans)
    assert_same(short, plain)


def test_a_host_catches_up_with_a_blocking_batch_before_what_waits_for_it() -> None:
    """A batch of blocking transfers ends while a weight-gradient pass runs that does not wait for it: what the host has
    issued of that pass stays as it is, in one piece or kernel by kernel, and the pass behind it waits."""
    layout = {"tp": 4, "pp": 4, "schedule": "zb_h2", "data_parallel": "parameter_server", "overlap": {"p2p": False}}
    training = {"seq": 256, "global_batch": 6, "recompute": "ops"}
    model = {"layers": 4, "hidden": 512, "heads": 4, "vocab": 1250, "activation": "swiglu", "position": "rope"}
    workload = {"name": "host", "model": model, "training": training, "parallelism": layout, "framework": "pytorch"}
    workload["cluster"] = "dgx_b200"
    short, plain = (play(workload, coalesce=coalesce) for coalesce in (True, False))
    assert short.spans.step_time_s == pytest.approx(plain.spans.step_time_s, rel=1e-9)


def test_the_algorithm_that_sent_most_is_the_same_however_ranks_are_folded() -> None:
    """Gradients go by two algorithms in equal parts; both are counted for all ranks, and the first name stands."""
    model = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 32000, "activation": "swiglu", "position": "rope"}
    model |= {"norm": "rmsnorm", "tied_embeddings": False, "bias": False}
    work = {
        "name": "experts",
        "model": {**model, "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 512}},
        "framework": "deepspeed",
        "training": {"seq": 512, "micro_batch": 2, "global_batch": 64},
        "parallelism": {"tp": 2, "zero": 2},
        "cluster": {"name": "dgx_h100", "nodes": 1},
    }
    used = [
        simulator.run({**work, "simulation": {"fold": fold}}).to_dict()["communication"]["dp"]["algorithm"]
        for fold in (True, False)
    ]
    assert used[0] == used[1] == "nvls"

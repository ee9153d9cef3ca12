"""A cluster keeps folded traffic: programs whose groups communicate alike share it, and no others do."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.cluster import Cluster, build_cluster
from simulator.config import load_workload
from simulator.config.profile import load_profiles
from simulator.costs import Costs
from simulator.engine import Placed, folded_traffic
from simulator.engine.representatives import SimulatedCluster, fold_cluster
from simulator.lowering import build_program
from tests.support.jobs import job

#: Two nodes in a tree of two leaves; stages, replicas and tensor-parallel groups each have two members or more.
BASE: dict[str, Any] = {
    "parallelism": {"tp": 2, "pp": 2, "dp": 4, "batch_p2p": True, "sequence_parallel": False},
    "cluster__nodes": 2,
}
#: Changes of bytes alone: micro-batches, what is computed again, and the number of passes.
SAME_TRAFFIC: dict[str, dict[str, Any]] = {
    "micro-batch": {"training__micro_batch": 2},
    "batch": {"training__global_batch": 32},
    "recompute": {"training__recompute": "full"},
    "sequence": {"training__seq": 256},
}
#: Changes of one thing each that classes follow from.
OTHER_TRAFFIC: dict[str, dict[str, Any]] = {
    "groups": {"parallelism__tp": 4, "parallelism__dp": 2},
    "order of ranks": {"parallelism__rank_order": "tp-cp-ep-pp-dp"},
    "number of ranks": {"parallelism__dp": 2},
    "kinds of communication": {"parallelism__zero": 1},
    "ends of transfers": {"parallelism__schedule": "interleaved", "parallelism__vpp": 2},
    "algorithm": {"parallelism__collective_algorithm": "tree"},
    "nodes": {"placement": [1, 0]},
    "kinds of ranks": {"model__tied_embeddings": False},
}


def folded(cluster: Cluster | None = None, **changes: Any) -> tuple[SimulatedCluster, Cluster]:
    """Fold the base job with changes, on a cluster of its own where none is given."""
    workload = load_workload(job(**{**BASE, "parallelism": {**BASE["parallelism"]}, **changes}))
    if cluster is None:
        cluster = build_cluster(workload.cluster)
    costs = Costs.from_profiles(load_profiles(workload.calibrations, workload.training))
    placed = Placed.on(build_program(workload), costs, cluster, workload.nodes)
    return fold_cluster([placed], cluster), cluster


def content(one: SimulatedCluster) -> tuple[object, ...]:
    """Return all of it; phases, by whose identity sources are found, in their order."""
    return one.links, one.representatives, one.background, list(one.sources.values())


@pytest.mark.parametrize("change", [*SAME_TRAFFIC, *OTHER_TRAFFIC])
def test_what_is_kept_is_what_is_worked_out_anew(change: str) -> None:
    """The job with a change, behind the job without it on one cluster, and alone; and the other way round."""
    changes = {**SAME_TRAFFIC, **OTHER_TRAFFIC}[change]
    alone, _ = folded(**changes)
    _, cluster = folded()
    behind, _ = folded(cluster, **changes)
    assert content(behind) == content(alone)
    assert len(cluster.memo["folded traffic"]) == (1 if change in SAME_TRAFFIC else 2)
    base, _ = folded()
    _, cluster = folded(**changes)
    assert content(folded(cluster)[0]) == content(base)


def test_links_of_other_capacity_are_folded_anew() -> None:
    """Ideal links carry all of their bytes per second, those of a profile a part."""
    first, cluster = folded()
    workload = load_workload(job(**BASE))
    ideal = Placed.on(build_program(workload), Costs.ideal(), cluster, workload.nodes)
    second = fold_cluster([ideal], cluster)
    assert len(cluster.memo["folded traffic"]) == 2
    assert [one.capacity_Bps for one in first.links] != [one.capacity_Bps for one in second.links]


def test_so_many_ranks_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of 16 ranks each where 32 ranks are the most."""
    monkeypatch.setattr(folded_traffic, "MOST_RANKS", 32)
    _, cluster = folded()
    for change in ("kinds of communication", "groups", "order of ranks"):
        folded(cluster, **OTHER_TRAFFIC[change])
    assert len(cluster.memo["folded traffic"]) == 2


def test_without_folding_nothing_is_kept() -> None:
    """Every rank and link is simulated, and no folded traffic is left with the cluster."""
    workload = load_workload(job(**BASE))
    cluster = build_cluster(workload.cluster)
    costs = Costs.from_profiles(load_profiles(workload.calibrations, workload.training))
    placed = Placed.on(build_program(workload), costs, cluster, workload.nodes)
    plain = fold_cluster([placed], cluster, folded=False)
    assert "folded traffic" not in cluster.memo
    assert len(plain.representatives[0].multiplicity) == 16

"""Workloads that are altered, warned of, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.config import altered, catalog, load_workload, warnings
from simulator.errors import InputError
from tests.support.frameworks import COMPILED, PYTORCH
from tests.support.grids import one_in
from tests.support.small_workload import SMALL, small


def test_warnings() -> None:
    assert warnings(small(parallelism__zero=1)) == [
        "7 of the 8 GPUs of the cluster have no rank; parallelism.dp is 1, as neither it nor cluster.nodes is given: "
        "cluster.nodes: 1 gives all of them a rank, with dp 8",
        "parallelism.zero saves nothing: with dp * cp 1 there is no replica to share the optimizer state with",
    ]
    assert "allow_tf32" in warnings(small(parallelism__dp=8, training__precision="fp32"))[0]
    # A V100 has no TF32, and its products in fp32 are plain ones.
    old = small(parallelism__dp=8, training__precision="fp32", cluster={"name": "dgx1_v100", "nodes": 1})
    assert not [warning for warning in warnings(old) if "TF32" in warning]
    assert warnings(small(parallelism__dp=8, training__recompute="selective", model__attention="unfused")) == []


def test_a_loaded_workload_can_be_altered_as_its_file_could() -> None:
    """Values that followed from other keys follow again; what is not legal is refused as anywhere."""
    small = {"training.micro_batch": 1, "cluster.nodes": 1}
    workload = load_workload("gpt22b_tp8", small | {"parallelism.tp": 1, "parallelism.pp": 4})
    assert altered(workload, {}) == workload
    assert workload.parallelism.dp == 2
    layout = {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.dp": 1}
    wider = altered(workload, layout)
    assert wider == load_workload("gpt22b_tp8", small | layout)
    assert wider.parallelism.layers_per_stage == (24, 24)
    assert altered(workload, {"training.recompute": "full"}).training.recompute.granularity == "full"
    assert altered(workload, {"cluster.nodes": 2}).cluster.nodes == 2
    with pytest.raises(InputError, match="layers_per_stage"):
        altered(workload, {"parallelism.pp": 5})


def test_a_split_over_stages_of_which_the_schedule_says_the_number_stays_in_a_changed_copy() -> None:
    """zb_v has two chunks on a rank, which the file need not say: four ranks have eight stages."""
    split = (11, 10, 9, 8, 4, 3, 2, 1)
    layout = {"parallelism.tp": 1, "parallelism.pp": 4, "parallelism.schedule": "zb_v", "training.micro_batch": 1}
    workload = load_workload("gpt22b_tp8", {**layout, "parallelism.dp": 2, "parallelism.layers_per_stage": split})
    assert altered(workload, {"parallelism.tp": 2, "parallelism.dp": 1}).parallelism.layers_per_stage == split
    assert altered(workload, {"parallelism.pp": 2}).parallelism.layers_per_stage == (12, 12, 12, 12)
    plain = altered(workload, {"parallelism.schedule": "1f1b"})
    assert plain.parallelism.layers_per_stage == (12, 12, 12, 12)


def test_a_split_that_is_changed_beside_the_stages_is_the_one_that_counts() -> None:
    workload = load_workload("gpt22b_tp8", {"parallelism.tp": 1, "parallelism.pp": 4})
    changes = {"parallelism.pp": 2, "parallelism.layers_per_stage": [30, 18]}
    assert altered(workload, changes).parallelism.layers_per_stage == (30, 18)


def test_nodes_that_followed_from_the_ranks_follow_again_in_a_changed_copy() -> None:
    """pp 2 alone needs one node of eight GPUs; a changed copy still has one replica, not one per pair of GPUs."""
    sizes = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50_000}
    job = {"name": "tiny", "model": sizes, "training": {"seq": 1024, "global_batch": 8}, "cluster": "dgx_a100"}
    first = load_workload(job, {"parallelism.pp": 2})
    assert (first.cluster.nodes, first.parallelism.dp) == (1, 1)
    second = altered(first, {"parallelism.tp": 8})
    assert (second.cluster.nodes, second.parallelism.dp) == (2, 1)


def test_a_key_inside_a_section_of_a_preset_overrides_that_key_alone() -> None:
    """8 experts, top 2, from the preset; the distribution from beside it."""
    model = {"preset": "mixtral-8x7b", "moe": {"token_distribution": {"skew": 0.5}}}
    data = {"model": model, "training": {"seq": 4096, "global_batch": 8}, "cluster": {"name": "dgx_h100", "nodes": 1}}
    moe = load_workload(data).model.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn_hidden) == (8, 2, 14336)
    assert moe.token_distribution != "balanced"


@pytest.mark.parametrize("reference", ["a\0.csv", "~nouserx/a.csv", "x" * 300 + ".csv"])
def test_a_schedule_that_can_be_no_file_is_refused(reference: str) -> None:
    with pytest.raises(InputError, match=r"parallelism\.schedule: cannot be a file"):
        small(parallelism__schedule=reference)


@pytest.mark.parametrize("framework", [PYTORCH, COMPILED])
def test_a_job_without_a_pipeline_is_not_warned_of_one(framework: Any) -> None:
    """Nobody gave what `framework` decides."""
    given = {"training": {"seq": 128, "global_batch": 8}, "framework": framework, "parallelism": {"dp": 8}}
    job = {"model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512}, "cluster": "dgx_h100", **given}
    assert not [text for text in warnings(load_workload(job)) if "pipeline" in text]


def test_set_takes_a_cluster_and_keys_inside_it_in_either_order() -> None:
    keys = {"cluster.node.host_speed": 0.8, "cluster": "hgx_h200_8gpu"}
    one, other = (load_workload("gpt22b_tp8", dict(order)) for order in (keys.items(), reversed(keys.items())))
    assert one == other
    assert one.cluster.node_at(0).host_speed == 0.8
    assert one.gpu_types == ("h200-sxm-141gb",)


def test_a_job_that_says_neither_nodes_nor_replicas_is_told_how_to_use_all_gpus() -> None:
    """Four GPUs in the node, of which one has a rank. What the sentence says to write is legal and uses all. Where the
    batch does not divide by that many replicas, nothing is said to write, and where dp is given, nothing is missing."""
    four = {"name": "four", "node": {"gpus": {"type": "h100-sxm-80gb", "count": 4}, "pcie": {"generation": 5}}}
    job = SMALL | {"cluster": four, "training": {**SMALL["training"], "global_batch": 8}, "parallelism": {"zero": 3}}
    told = [note for note in warnings(load_workload(job)) if "no rank" in note]
    assert told == [
        "3 of the 4 GPUs of the cluster have no rank; parallelism.dp is 1, as neither it nor cluster.nodes is given: "
        "cluster.nodes: 1 gives all of them a rank, with dp 4"
    ]
    assert load_workload(job, {"cluster.nodes": 1}).n_ranks == 4
    odd = [note for note in warnings(load_workload(job, {"training.global_batch": 7})) if "no rank" in note]
    assert odd == [told[0].partition(": cluster.nodes")[0]]
    given = [note for note in warnings(load_workload(job, {"parallelism.dp": 1})) if "no rank" in note]
    assert given == ["3 of the 4 GPUs of the cluster have no rank"]


@pytest.mark.parametrize("name", catalog.names("workload"))
def test_every_shipped_workload_reads_back_from_its_dump(name: str) -> None:
    first = load_workload(name)
    assert load_workload(json.loads(json.dumps(first.model_dump(mode="json")))) == first


@pytest.mark.parametrize("name", one_in(6, catalog.names("cluster")))
def test_a_job_on_every_shipped_cluster_reads_back_to_the_same_step(name: str) -> None:
    changes = {"training.precision": "fp16", "training.global_batch": 144, "model.layers": 2}
    first = load_workload(SMALL | {"cluster": {"name": name, "nodes": 1}}, changes)
    again = load_workload(json.loads(json.dumps(first.model_dump(mode="json"))))
    assert again == first
    assert simulator.run(again).spans.step_time_s == simulator.run(first).spans.step_time_s


@pytest.mark.parametrize(
    ("cluster", "changes"),
    [
        ({"like": "dgx_h100", "nodes": 4}, {"cluster.name": "dgx_h200"}),
        ({"like": "dgx_h100", "nodes": 4, "name": "dgx_a100"}, {}),
    ],
)
def test_a_label_does_not_pass_for_another_shipped_cluster(cluster: dict[str, Any], changes: dict[str, Any]) -> None:
    """Beside ``like`` a name is a label; the machines would be those of the DGX H100."""
    with pytest.raises(InputError, match="but the machines are like dgx_h100") as refused:
        load_workload(SMALL | {"cluster": cluster}, changes)
    assert refused.value.key == "cluster.name"
    labelled = load_workload(SMALL | {"cluster": {**cluster, "name": "mine"}})
    assert (labelled.cluster.name, labelled.gpu_types) == ("mine", ("h100-sxm-80gb",))


def test_nodes_that_go_with_a_replaced_cluster_are_told(tmp_path: Path) -> None:
    """A cluster that is set as a whole takes the file's nodes with it, unless these are set too or it has some."""
    job = SMALL | {"cluster": {"name": "dgx_h100", "nodes": 4}}
    told = [text for text in warnings(load_workload(job, {"cluster": "dgx_a100"})) if "replaces nodes: 4" in text]
    assert len(told) == 1
    for changes in ({"cluster.name": "dgx_a100"}, {"cluster": "dgx_a100", "cluster.nodes": 4}):
        kept = load_workload(job, changes)
        assert kept.cluster.n_nodes == 4
        assert not any("replaces nodes" in text for text in warnings(kept))
    (tmp_path / "mine.yaml").write_text("like: dgx_a100\nnodes: 2\n")
    mine = load_workload(job, {"cluster": str(tmp_path / "mine.yaml")})
    assert mine.cluster.n_nodes == 2
    assert not any("replaces nodes" in text for text in warnings(mine))


@pytest.mark.parametrize("part", ["nics", "nvlink", "sockets"])
def test_a_link_of_a_site_as_slow_as_one_to_another_continent_is_told(part: str) -> None:
    """Light goes 200 km in a millisecond. Latency between sites is another key, and may be more."""
    slow = load_workload(SMALL, {f"cluster.node.{part}.latency_s": 2})
    assert any(f"cluster.node.{part}.latency_s is 2.00 s" in text for text in warnings(slow))
    usual = load_workload(SMALL, {f"cluster.node.{part}.latency_s": "999us"})
    assert not any("latency_s" in text for text in warnings(usual))


def test_a_type_of_gpu_without_a_profile_is_told_by_its_own_key() -> None:
    with pytest.raises(InputError, match="without a profile") as refused:
        load_workload(SMALL, {"cluster.node.gpus.type": "h200"}, by="--set")
    error = refused.value
    assert (error.file, error.key, error.fix) == ("--set", "cluster.node.gpus.type", "type: h200-sxm-141gb")
    with pytest.raises(InputError) as refused:  # a profile that is named is not found under its own key
        load_workload(SMALL, {"calibration": "h200"})
    assert refused.value.key == "calibration"

"""Machines that people own or rent: each is a file of under 15 lines, and runs a small job at the first try."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.cluster import build_cluster
from simulator.config import catalog, load_cluster, load_workload
from simulator.config.section import as_data
from simulator.errors import InputError
from tests.support.grids import one_in

#: Name -> GPUs of a node, by type in the order of their numbers.
MACHINES: dict[str, tuple[str, ...]] = {
    "one_gpu": ("rtx-4090-24gb",),
    "one_rtx3090": ("rtx-3090-24gb",),
    "colab_t4": ("t4-16gb",),
    "workstation_2gpu": ("rtx-4090-24gb",) * 2,
    "workstation_mixed": ("rtx-3090-24gb",) * 2 + ("rtx-4090-24gb",) * 2,
    "pcie_rtx4090_8gpu": ("rtx-4090-24gb",) * 8,
    "aws_g5_12xlarge": ("a10g-24gb",) * 4,
    "gcp_g2_4gpu": ("l4-24gb",) * 4,
    "pcie_h100_nvlink_pair": ("h100-pcie-80gb",) * 2,
    "gh200_slingshot": ("gh200-480gb",) * 4,
    "mi325x": ("mi325x-256gb",) * 8,
    "mi355x": ("mi355x-288gb",) * 8,
    "dgx_b300": ("b300-sxm-288gb",) * 8,
    "gb300_nvl72": ("gb300-288gb",) * 72,
    "dgx_h100_tcp": ("h100-sxm-80gb",) * 8,
}
LLAMA = {
    "layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn_hidden": 2816, "vocab": 32000,
    "activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False,
}  # fmt: skip


def job(cluster: object, gpus: int, **training: object) -> dict[str, Any]:
    return {
        "model": LLAMA,
        "training": {"seq": 1024, "global_batch": gpus, **training},
        "parallelism": {"dp": gpus},
        "framework": "hugging_face",
        "cluster": cluster,
    }


@pytest.mark.parametrize("name", one_in(2, MACHINES))
def test_a_machine_runs_a_small_job_at_the_first_try(name: str) -> None:
    """All of its nodes train a small Llama; one of its GPUs, of a node that starts from it, trains adapters."""
    assert len((catalog.FOLDERS["cluster"] / f"{name}.yaml").read_text().splitlines()) < 15
    spec = load_cluster(name)
    assert spec.name == name
    assert tuple(gpu.type for gpu in build_cluster(spec).gpus) == MACHINES[name] * spec.n_nodes
    precision = "fp16" if name == "colab_t4" else "bf16"
    whole = simulator.run(job({"name": name, "nodes": spec.n_nodes}, spec.n_gpus, precision=precision))
    assert whole.gpus == MACHINES[name] * spec.n_nodes
    assert whole.to_dict()["memory"]["fits"]
    part = {"name": name, "nodes": 1, "node": {"gpus": {"count": 1}}}
    adapters = {"rank": 8, "targets": ["q", "v"]}
    one = simulator.run(job(part, 1, precision=precision, adapters=adapters))
    assert one.gpus == MACHINES[name][:1]
    assert one.to_dict()["step_time_s"] > 0


def test_every_shipped_node_says_how_fast_its_hosts_memory_is() -> None:
    """Without that nothing can be offloaded to it."""
    unknown = [
        name
        for name in catalog.names("cluster")
        for node in load_cluster(name).kinds
        if node.host_memory_bandwidth_Bps is None
    ]
    assert unknown == []
    load_workload(job("workstation_2gpu", 2), {"parallelism.zero": 3, "parallelism.offload.parameters": "cpu"})


def test_a_part_of_a_mesh_keeps_its_links() -> None:
    """An MI300X has seven links of 64 GB/s in the whole node, and one in a part of two GPUs."""
    built = build_cluster(load_cluster({"name": "mi300x", "node": {"gpus": {"count": 2}}}))
    assert [built.links[link].bandwidth_Bps for link in built.route(0, 1)] == [pytest.approx(64e9)]


def test_stages_on_two_kinds_of_gpu_in_a_node_take_what_each_kind_takes() -> None:
    """Stage 0 is on a 3090, and its products take as long as on two 3090s. Those of stage 1, on a 4090, take as long as
    on two 4090s. Each has its own memory."""
    kinds = ("rtx-3090-24gb", "rtx-4090-24gb")
    seconds, capacities = {}, {}
    for first, second in ((kinds[0], kinds[1]), (kinds[0],) * 2, (kinds[1],) * 2):
        gpus = [{"type": first, "count": 1}, {"type": second, "count": 1}]
        cluster = {"name": "workstation_mixed", "node": {"gpus": gpus}}
        pipeline = job(cluster, 2) | {"parallelism": {"pp": 2}, "framework": "megatron_core"}
        result = simulator.run(pipeline)
        assert result.gpus == (first, second)
        products = result.timeline.query("kind == 'matmul' and phase == 'F'")
        lasting = products.end_s - products.start_s
        seconds[first, second] = [lasting[products["rank"] == rank].sum() for rank in (0, 1)]
        capacities[first, second] = [stage["capacity"] for stage in result.to_dict()["memory"]["per_stage"]]
    mixed = seconds[kinds]
    assert mixed == pytest.approx([seconds[kinds[0], kinds[0]][0], seconds[kinds[1], kinds[1]][1]])
    assert mixed[0] > 1.5 * seconds[kinds[1], kinds[1]][0]
    assert capacities[kinds] == [capacities[kinds[0], kinds[0]][0], capacities[kinds[1], kinds[1]][1]]


def test_gpus_of_several_types_are_changed_by_number_or_type() -> None:
    """A number keeps the first three of two 3090s and two 4090s; a type makes all of them of it. A dump reads back."""
    three = load_cluster({"name": "workstation_mixed", "node": {"gpus": {"count": 3}}}).kinds[0]
    assert three.gpus.by_number == ("rtx-3090-24gb", "rtx-3090-24gb", "rtx-4090-24gb")
    retyped = load_cluster({"name": "workstation_mixed", "node": {"gpus": {"type": "l4-24gb"}}}).kinds[0]
    assert retyped.gpus.by_number == ("l4-24gb",) * 4
    spec = load_cluster("workstation_mixed")
    assert load_cluster(as_data(spec, nulls=False)).kinds == spec.kinds


def test_a_cluster_file_starts_from_the_one_it_is_like(tmp_path: Path) -> None:
    """Its keys are laid over the other's; the name is its own. Circles and names of no cluster are refused."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("like: dgx_h100\nnode: {nics: {count: 4}}\n")
    spec = load_cluster(mine)
    assert (spec.name, spec.kinds[0].nics.count, spec.kinds[0].nics.bandwidth_bps) == ("mine", 4, 400e9)
    inline = load_cluster({"name": "ours", "like": str(mine), "nodes": 3})
    assert (inline.name, inline.n_nodes, inline.kinds) == ("ours", 3, spec.kinds)
    mine.write_text("like: mine.yaml\n")
    with pytest.raises(InputError, match="starts from itself"):
        load_cluster(mine)
    mine.write_text("like: dgx_h10\n")
    with pytest.raises(InputError, match="no cluster file of this name") as caught:
        load_cluster(mine)
    assert caught.value.key == "like"
    mine.write_text("like: {name: dgx_h100}\n")
    with pytest.raises(InputError, match="must be the name or path of a cluster"):
        load_cluster(mine)

"""Random legal jobs: every kind of model, parallelism, schedule, way of data parallelism and odd cluster.

A job is a mapping as a workload file holds it, drawn from a seeded `random.Random`. Models are so small that a step has
a few hundred events; sizes divide, so that most of what is drawn is legal, and what is not is drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from simulator.api import cluster_of
from simulator.config import Workload, load_workload
from simulator.config.cluster import cluster_data
from simulator.errors import InputError
from simulator.schedules import SCHEDULES
from tests.support.clusters import CLUSTERS
from tests.support.frameworks import STACKS

Job = dict[str, Any]
Section = dict[str, Any]

#: Ranks of a job at most: all of them are played where nothing is folded.
MOST_RANKS = 16
#: Shipped clusters whose hosts and drives are told, and those with odd nodes.
SHIPPED = ("dgx_a100", "dgx_h100", "dgx_b200", "pcie_l40s", "pcie_a100_nvlink_pairs", "dgx1_v100", "mi300x")
#: Bytes/s of a host's memory, for clusters that do not say it.
HOST_MEMORY_Bps = 200e9
#: Tries to draw a legal job before giving up.
TRIES = 1000


def random_job(random: Random, most_ranks: int = MOST_RANKS) -> Job:
    """Return a legal job. Raises RuntimeError where `TRIES` draws gave none."""
    for _ in range(TRIES):
        job = any_job(random, most_ranks)
        try:
            cluster_of(load(job))
        except InputError:
            continue
        return job
    raise RuntimeError(f"none of {TRIES} random jobs was legal")


def any_job(random: Random, most_ranks: int = MOST_RANKS) -> Job:
    """Return a job that may be illegal."""
    one = random.choice
    layout = _layout(random, most_ranks)
    stages = layout["pp"] * layout["vpp"]
    experts = layout["ep"] > 1 or one((True, False, False))
    model = _model(random, stages, experts)
    training = _training(random)
    layout |= _data_parallel(random, layout)
    if "data_parallel" in layout:
        training["grad_clip"] = None
    layout |= _details(random, layout, model)
    microbatches = one((1, 2, 3)) if layout["pp"] == 1 else one((1, 1, 2)) * layout["pp"]
    training["global_batch"] = training["micro_batch"] * layout["dp"] * microbatches
    cluster = _cluster(random, _ranks(layout), layout.get("servers", 0))
    sections = {"model": model, "training": training, "parallelism": layout, "cluster": cluster}
    return {"name": "random", "framework": one(STACKS), **sections}


def load(job: Mapping[str, Any]) -> Workload:
    """Return the job as a `Workload`; a shipped cluster's file is read once for all jobs. Raises `InputError`."""
    cluster = job["cluster"]
    if cluster["name"] in SHIPPED:
        inline = {key: value for key, value in _shipped(cluster["name"]).items() if key != "nodes"}
        node = {**inline["node"], **cluster.get("node", {})}
        cluster = {**inline, **cluster, "node": node, "name": f"inline_{cluster['name']}"}
    return load_workload({**job, "cluster": cluster})


@lru_cache(maxsize=len(SHIPPED))
def _shipped(name: str) -> Mapping[str, Any]:
    return cluster_data(name)[0]


def _ranks(layout: Mapping[str, int]) -> int:
    return layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]


def _layout(random: Random, most_ranks: int) -> Section:
    """Return sizes of the axes and a schedule."""
    one = random.choice
    while True:
        sizes = {"tp": one((1, 1, 2, 4)), "cp": one((1, 1, 1, 2)), "pp": one((1, 2, 2, 4)), "dp": one((1, 2, 4))}
        if _ranks(sizes) <= most_ranks:
            break
    name = one(list(SCHEDULES)) if sizes["pp"] > 1 else "1f1b"
    chunks = SCHEDULES[name].chunks or 2
    spread = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = one([size for size in (1, 1, 2, 4) if spread % size == 0])
    etp = one([size for size in (1, 2) if spread % (ep * size) == 0 and size <= sizes["tp"]])
    etp = etp if ep > 1 else 1
    return {**sizes, "ep": ep, "etp": etp, "schedule": name, "vpp": chunks if sizes["pp"] > 1 else 1}


def _model(random: Random, stages: int, experts: bool) -> Section:
    one = random.choice
    hidden = one((256, 512, 1024))
    model: Section = {
        "layers": stages * one((1, 1, 2)),
        "hidden": hidden,
        "heads": 8,
        "kv_heads": one((8, 8, 4)),
        "vocab": one((500, 1250, 5000)),
        "activation": one(("gelu", "swiglu", "geglu", "relu")),
        "norm": one(("layernorm", "rmsnorm")),
        "position": one(("learned", "rope", "none")),
        "bias": one((True, False)),
        "tied_embeddings": one((True, False)),
        "dropout": one((0.0, 0.0, 0.1)),
        "attention": one(("flash", "flash", "unfused")),
        "sliding_window": one((None, None, 64)),
        "mtp_layers": one((0, 0, 0, 1)),
    }
    if experts:
        model["moe"] = _experts(random)
    if one((True, False, False, False)):
        del model["kv_heads"]
        model |= {"mla": _latent(random), "position": "rope"}
    elif one((True, False)):
        model |= _pattern(random, stages)
    return model


def _pattern(random: Random, stages: int) -> Section:
    """Return kinds of layers in turn, with what each needs, and forms of attention."""
    one = random.choice
    kinds = [
        one(("attention", "window", "chunked", "no_rope", "gated_delta", "mamba2"))
        for _ in range(min(stages, one((1, 2, 3))))
    ]
    needs: Section = {
        "window": {"sliding_window": 64},
        "chunked": {"attention_chunk": 48},
        "gated_delta": {"gated_delta": {"key_heads": 4, "value_heads": 8, "key_dim": 16, "value_dim": 32}},
        "mamba2": {"mamba2": {"heads": 8, "head_dim": 32, "state": 16, "groups": 4, "chunk": 64}},
    }
    section: Section = {"mixers": kinds, "sliding_window": None}
    for kind in kinds:
        section |= needs.get(kind, {})
    return section | {
        "norm_place": one(("before", "after", "both")),
        "qk_norm": one((True, False)),
        "attention_gate": one((True, False)),
        "attention_sinks": one((True, False, False)),
    }


def _experts(random: Random) -> Section:
    one = random.choice
    moe = {
        "experts": 8,
        "top_k": one((1, 2)),
        "ffn_hidden": one((128, 256)),
        "shared_experts": one((0, 1)),
        "first_dense_layers": one((0, 0, 1)),
        "every": one((1, 1, 2)),
        "token_distribution": one(("balanced", "balanced", {"skew": 0.7})),
    }
    if one((True, False, False)):
        moe |= {"capacity_factor": 1.25, "pad_to_capacity": one((True, False))}
    return moe


def _latent(random: Random) -> Section:
    return {
        "q_lora_rank": random.choice((None, 96)),
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }


def _training(random: Random) -> Section:
    one = random.choice
    return {
        "seq": one((128, 256, 512)),
        "micro_batch": one((1, 1, 2)),
        "precision": one(("bf16", "bf16", "fp16", "fp32")),
        "grad_dtype": one(("fp32", "fp32", "bf16")),
        "grad_clip": one((None, None, 1.0)),
        "recompute": one(("none", "none", "selective", "ops", "full", {"granularity": "full", "layers": 1})),
    }


def _data_parallel(random: Random, layout: Mapping[str, Any]) -> Section:
    """Return how replicas share gradients: all-reduces, ZeRO in its stages, parameter servers, or asynchronously."""
    one = random.choice
    way = one(("allreduce", "zero", "zero", "parameter_server", "async"))
    if way in ("parameter_server", "async"):
        return {"data_parallel": way, "servers": one((1, 1, 2))}
    if way == "allreduce":
        return {"grad_compression": one(("none", "none", "none", "fp8", "int8", "1bit"))}
    section: Section = {"zero": one((1, 2, 3))}
    replicas = layout["dp"] * layout["cp"]
    if replicas % 2 == 0 and one((True, False, False)):
        section["hsdp"] = 2
    if section["zero"] == 3:
        section |= {"prefetch": one((0, 1, 2)), "reshard_after_forward": one((True, True, False))}
    if one((True, False, False, False)):
        section["offload"] = {"optimizer": "cpu"}
        if section["zero"] == 3:
            section["offload"]["parameters"] = one(("none", "cpu"))
    return section


def _details(random: Random, layout: Mapping[str, Any], model: Mapping[str, Any]) -> Section:
    one = random.choice
    overlap = {key: one((True, True, False)) for key in ("grad_reduce", "param_gather", "p2p")}
    overlap["tp"] = layout["tp"] > 1 and one((True, False, False))
    overlap["ep"] = layout["ep"] > 1 and bool(model.get("moe", {}).get("shared_experts")) and one((True, False))
    section: Section = {"overlap": overlap, "bucket_bytes": one((20_000, 1_000_000, 25_000_000))}
    if layout["tp"] > 1:
        section |= {"sequence_parallel": one((True, True, False)), "vocab_parallel": one((True, True, False))}
        if layout["pp"] > 1 and not section["sequence_parallel"]:
            section["scatter_gather_p2p"] = one((True, False))
    if layout["cp"] > 1:
        section["cp_method"] = one(("ring", "ulysses"))
        if section["cp_method"] == "ring":
            section["cp_layout"] = one(("zigzag", "contiguous"))
    if layout["pp"] > 1:
        section["batch_p2p"] = one((False, False, True))
    if one((True, False, False)):
        section["rank_order"] = one(("tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "dp-tp-cp-ep-pp"))
    if one((True, False, False, False, False)):
        section["offload"] = {"activations": "cpu"}
    return section


def _cluster(random: Random, ranks: int, servers: int) -> Section:
    """Return a cluster that holds the ranks; often one with a slow GPU, a slow link, or a kind of node of its own."""
    one = random.choice
    overrides = one(
        (
            [],
            [],
            [],
            [{"gpu": "node0.gpu0", "speed_scale": 0.9}],
            [{"gpu": "node*.gpu1", "speed_scale": 0.8}],
            [{"gpu": "node0.gpu1", "host_speed": 0.5}],
            [{"link": "node0.nic0", "bandwidth_scale": 0.5}],
        )
    )
    if one((True, True, False)):
        cluster: Section = {"name": one(SHIPPED)}
        per_node = _shipped(cluster["name"])["node"]["gpus"]["count"]
        if "host_memory_bandwidth_Bps" not in _shipped(cluster["name"])["node"]:
            cluster["node"] = {"host_memory_bandwidth_Bps": HOST_MEMORY_Bps}
        cluster["nodes"] = -(-ranks // per_node) + servers + one((0, 0, 1))
        if one((True, False, False)):
            cluster["fabric"] = {"kind": one(("fat_tree", "rail_only"))}
    else:
        cluster = dict(CLUSTERS[one(list(CLUSTERS))])
        gpus = {**cluster["node"]["gpus"], "type": one(("a100-sxm-80gb", "h100-sxm-80gb"))}
        cluster["node"] = {**cluster["node"], "gpus": gpus, "host_memory_bandwidth_Bps": HOST_MEMORY_Bps}
        if cluster["fabric" if "fabric" in cluster else "node"].get("shape") is None:
            cluster["nodes"] = -(-ranks // gpus["count"]) + servers
    return {**cluster, "overrides": overrides} if overrides else cluster


def drawn(seed: int, number: int, most_ranks: int = MOST_RANKS) -> Job:
    """Return job ``number`` of those of a ``seed``: each is drawn by itself, so that one can be drawn alone."""
    return random_job(Random(f"{seed}/{number}"), most_ranks)

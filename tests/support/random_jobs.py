"""Random legal jobs: every kind of model, parallelism, schedule, way of data parallelism and odd cluster.

A job is a mapping as a workload file holds it, drawn from a seeded `random.Random`. Models are so small that a step has
a few hundred events. Sizes divide, so that much of what is drawn is legal. The rest is drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from simulator.api import check_algorithm, cluster_of
from simulator.config import Workload, load_workload
from simulator.config.training import FREEZABLE
from simulator.errors import InputError
from simulator.frameworks import DEFAULT, FRAMEWORKS, Framework
from simulator.optimizers import OPTIMIZERS
from simulator.precisions import PRODUCT_RECIPES, ProductRecipe
from simulator.schedules import SCHEDULES
from tests.support.random_clusters import EIGHT_BITS, FOUR_BITS, SHIPPED, random_cluster, shipped_cluster
from tests.support.random_models import random_llama, random_model

Job = dict[str, Any]
Section = dict[str, Any]

#: Ranks of a job at most: all of them are played where nothing is folded.
MOST_RANKS = 16
#: Frameworks whose models are mostly simulated as Llama's, and those of them that split no model over ranks.
UNDIVIDED = ("hugging_face", "hugging_face_deepspeed")
LLAMAS = (*UNDIVIDED, "torchtitan", "megatron_core_local")
#: Tries to draw a legal job before giving up.
TRIES = 1000


def random_job(random: Random, most_ranks: int = MOST_RANKS) -> Job:
    """Return a legal job, each framework as often. Raises RuntimeError where `TRIES` draws gave none."""
    framework = _framework(random)
    for _ in range(TRIES):
        job = any_job(random, framework, most_ranks)
        try:
            workload = load(job)
            check_algorithm(workload, cluster_of(workload))
        except InputError:
            continue
        return job
    raise RuntimeError(f"none of {TRIES} random jobs was legal")


def any_job(random: Random, named: Any, most_ranks: int = MOST_RANKS) -> Job:
    """Return a job on a framework, as workload files name it, that may be illegal."""
    one = random.choice
    framework = FRAMEWORKS[named if isinstance(named, str) else named["name"]]
    layout = _layout(random, min(most_ranks, one((4, 4, 8, 8, MOST_RANKS))), framework.name in UNDIVIDED)
    stages = layout["pp"] * layout["vpp"]
    if framework.name in LLAMAS and one((True, True, True, False)):
        model = random_llama(random, stages)
    else:
        model = random_model(random, stages, layout["ep"] > 1 or one((True, False, False)), layout["ep"])
    layout |= _data_parallel(random, layout, framework)
    on_hosts = "data_parallel" in layout or "offload" in layout
    training, recipe = _training(random, framework, model, on_hosts), _recipe(random, framework)
    if "data_parallel" in layout:
        training["grad_clip"] = None
    layout |= _details(random, layout, model, framework)
    microbatches = one((1, 2, 3)) if layout["pp"] == 1 else one((1, 1, 1, 2)) * layout["pp"]
    training["global_batch"] = training["micro_batch"] * layout["dp"] * microbatches
    shipped = SHIPPED
    if recipe:
        training |= {"precision": "bf16", f"fp{recipe.bits}": recipe.name}
        shipped = FOUR_BITS if recipe.bits == 4 or recipe.name == "te_mxfp8" else EIGHT_BITS
        named = {"name": named, "compile": True} if recipe.compiled and isinstance(named, str) else named
    if framework.captures_graphs and one((True, False, False)):
        named = {"name": named, "cuda_graphs": _graphs(random, "moe" in model)}
    cluster = random_cluster(random, _ranks(layout), layout.get("servers", 0), shipped)
    sections = {"model": model, "training": training, "parallelism": layout, "cluster": cluster}
    return {"name": "random", "framework": named, **sections}


def load(job: Mapping[str, Any]) -> Workload:
    """Return the job as a `Workload`; a shipped cluster's file is read once for all jobs. Raises `InputError`."""
    cluster = job["cluster"]
    if cluster["name"] in SHIPPED:
        inline = {key: value for key, value in shipped_cluster(cluster["name"]).items() if key != "nodes"}
        node = {**inline["node"], **cluster.get("node", {})}
        cluster = {**inline, **cluster, "node": node, "name": f"inline_{cluster['name']}"}
    return load_workload({**job, "cluster": cluster})


def _ranks(layout: Mapping[str, int]) -> int:
    return layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]


def _layout(random: Random, most_ranks: int, undivided: bool) -> Section:
    """Return sizes of the axes and a schedule; an ``undivided`` model is on each rank as a whole."""
    one = random.choice
    while True:
        if undivided:
            sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": one((1, 2, 4))}
            break
        sizes = {"tp": one((1, 1, 2, 4)), "cp": one((1, 1, 1, 2)), "pp": one((1, 2, 2, 4)), "dp": one((1, 2, 4))}
        if _ranks(sizes) <= most_ranks:
            break
    name = one(list(SCHEDULES)) if sizes["pp"] > 1 else "1f1b"
    chunks = SCHEDULES[name].chunks or 2
    spread = sizes["tp"] * sizes["cp"] * sizes["dp"]
    ep = 1 if undivided else one([size for size in (1, 1, 2, 4) if spread % size == 0])
    etp = one([size for size in (1, 2) if spread % (ep * size) == 0 and size <= sizes["tp"]])
    etp = etp if ep > 1 else 1
    return {**sizes, "ep": ep, "etp": etp, "schedule": name, "vpp": chunks if sizes["pp"] > 1 else 1}


def _framework(random: Random) -> Any:
    """Return a framework as a workload file names it, Megatron-Core more often, compiled at times where it can be."""
    name = random.choice([*FRAMEWORKS, DEFAULT.name, DEFAULT.name])
    compiled = FRAMEWORKS[name].compiled is not None and random.choice((True, False))
    return {"name": name, "compile": True} if compiled else name


def _graphs(random: Random, experts: bool) -> list[str]:
    """Return parts of layers in CUDA graphs, or the whole step."""
    parts = [["attn"], ["mlp"], ["full_iteration"], ["mamba"]]
    return random.choice([*parts, ["attn", "moe_router"], ["moe_router", "moe_preprocess"]] if experts else parts)


def _training(random: Random, framework: Framework, model: Mapping[str, Any], on_hosts: bool) -> Section:
    """Return how a ``model`` is trained; ``on_hosts``: optimizer states lie there, where AdamW alone is simulated."""
    one = random.choice
    training = {
        "seq": one((128, 256, 512)),
        "micro_batch": one((1, 1, 2)),
        "precision": one(("bf16", "bf16", "fp16", "fp32")),
        "grad_dtype": one(("fp32", "fp32", "bf16")),
        "grad_clip": one((None, None, 1.0)),
        "recompute": one(("none", "none", "selective", "ops", "full", {"granularity": "full", "layers": 1})),
    }
    if training["precision"] == "fp32":
        training["tf32"] = one((True, False))
    if one((True, False, False)):
        training["loss"] = one(framework.losses)
    if one((True, False, False)):
        training["optimizer"] = {"name": "adamw" if on_hosts else one(list(OPTIMIZERS))}
        if training["precision"] != "fp32":
            training["optimizer"]["master_weights"] = one((True, False))
    if one((True, False, False, False)):
        training |= _adapters(random, "mla" in model)
    elif one((True, *[False] * 7)):
        training["freeze"] = random.sample(FREEZABLE, one((1, 2)))
    return training


def _adapters(random: Random, latent: bool) -> Section:
    """Return thin trained matrices beside frozen products; ``latent``: of latent attention."""
    one = random.choice
    whole = (["q", "v"], ["q", "k", "v", "o"], ["qkv", "o"], ["q", "up", "down"])
    targets = one((["kv_down", "kv_up", "o"], ["o"]) if latent else whole)
    adapters = {"rank": one((4, 16)), "targets": targets, "dropout": one((0.0, 0.1)), "method": one(("lora", "dora"))}
    return {"adapters": adapters, "base": one((None, None, "nf4"))}


def _recipe(random: Random, framework: Framework) -> ProductRecipe | None:
    """Return a recipe of products in 8 or 4 bits that the framework has, one time in four."""
    recipes = [one for one in PRODUCT_RECIPES.values() if framework.name in one.frameworks]
    return random.choice(recipes) if recipes and random.choice((True, False, False, False)) else None


def _data_parallel(random: Random, layout: Mapping[str, Any], framework: Framework) -> Section:
    """Return how replicas share gradients: all-reduces, ZeRO in its stages, parameter servers, or asynchronously."""
    one = random.choice
    way = one(("allreduce", "allreduce", "zero", "zero", "zero", "parameter_server", "async"))
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
        if _shards_fully(framework) and layout["pp"] == 1:
            section["sync_each_micro_batch"] = one((True, False))
    if one((True, False, False, False)):
        section["offload"] = {"optimizer": "cpu"}
        if section["zero"] == 3:
            section["offload"]["parameters"] = one(("none", "cpu"))
    return section


def _details(random: Random, layout: Mapping[str, Any], model: Mapping[str, Any], framework: Framework) -> Section:
    one = random.choice
    overlap = {key: one((True, True, False)) for key in ("grad_reduce", "param_gather", "p2p")}
    overlap["tp"] = layout["tp"] > 1 and one((True, False, False))
    overlap["ep"] = layout["ep"] > 1 and bool(model.get("moe", {}).get("shared_experts")) and one((True, False))
    megatron = layout["ep"] > 1 and framework.name == DEFAULT.name
    pairs_passes = layout["pp"] == 1 or SCHEDULES[layout["schedule"]].chunks != 1
    if megatron and pairs_passes and one((True, False)):
        overlap |= {"ep": False, "expert_all_to_all": True, "delayed_weight_grad": one((True, False))}
    section: Section = {"overlap": overlap, "bucket_bytes": one((20_000, 1_000_000, 25_000_000))}
    if megatron:
        section["dispatcher"] = one(("all_to_all", "all_to_all", "deepep", "hybridep", "all_gather"))
    if one((True, False, False, False)):
        section["collective_algorithm"] = one(("ring", "tree", "direct", "halving_doubling", "hierarchical"))
    if layout["pp"] * layout["vpp"] > 1 and one((True, False, False, False)):
        section["layers_per_stage"] = _uneven(random, layout["pp"] * layout["vpp"], model["layers"])
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


def _shards_fully(framework: Framework) -> bool:
    """Return whether ZeRO-3 of a framework is torch's fully_shard."""
    return framework.name in ("pytorch", "torchtitan", "hugging_face")


def _uneven(random: Random, stages: int, layers: int) -> list[int]:
    """Return layers of each stage, one of which has one more than its share, and another one less."""
    split = [layers // stages] * stages
    more, less = random.sample(range(stages), 2)
    split[more], split[less] = split[more] + 1, split[less] - 1
    return split


def drawn(seed: int, number: int, most_ranks: int = MOST_RANKS) -> Job:
    """Return job ``number`` of those of a ``seed``: each is drawn by itself, so that one can be drawn alone."""
    return random_job(Random(f"{seed}/{number}"), most_ranks)

"""Traits of a simulated step: what decides how far off its time is likely to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.config import Workload
from simulator.models import model_flops

#: Beginning of a GPU's name -> its architecture, as the makers' white papers name it.
_ARCHITECTURES = {
    "t4-": "Turing",
    "v100": "Volta",
    "a100": "Ampere",
    "a10-": "Ampere GA102",
    "a10g": "Ampere GA102",
    "a40-": "Ampere GA102",
    "rtx-30": "Ampere GA102",
    "rtx-a6000": "Ampere GA102",
    "l4-": "Ada",
    "l40": "Ada",
    "rtx-40": "Ada",
    "rtx-6000-ada": "Ada",
    "h100": "Hopper",
    "h200": "Hopper",
    "h800": "Hopper",
    "h20-": "Hopper",
    "gh200": "Hopper",
    "b200": "Blackwell",
    "b300": "Blackwell",
    "gb200": "Blackwell",
    "gb300": "Blackwell",
    "rtx-50": "Blackwell GB202",
    "rtx-pro-6000": "Blackwell GB202",
    "mi300": "CDNA 3",
    "mi325": "CDNA 3",
    "mi355": "CDNA 4",
}
#: NVIDIA's GPUs of data centres, whose kernels and libraries are one line.
_ONE_FAMILY, _FAMILY = ("Ampere", "Hopper", "Blackwell"), "NVIDIA's A100 and successors"
#: Family of GPUs -> the one whose profile stands in for what nobody has published of its kernels (`like` of profiles).
KERNELS_LIKE = dict.fromkeys(("Volta", "Turing", "Ampere GA102", "Ada", "Blackwell GB202"), _FAMILY)
_BITS = {"fp16": 16, "bf16": 16, "fp32": 32}
#: A layer that takes longer is not delayed by its host, s. The slowest hosts issue one of Megatron-LM's, forward and
#: backward, in about 10 ms.
LONG_LAYER_s = 0.03
#: Shortest time of a layer that counts. Workers that meet at servers now and then have steps of unlike lengths: a piece
#: of their mean length may hold no pass at all.
SHORT_LAYER_s = 1e-6
#: What further parts of a step are called where it has none.
NO_PARTS = "none"
#: Year of the software that jobs are taken to run, and our own steps ran. Profiles have its kernels and libraries.
SOFTWARE_YEAR = 2026


@dataclass(frozen=True)
class StepTraits:
    """Traits of one simulated step.

    ``family``: GPUs whose kernels are of one line. ``links``: between GPUs of a node, where a job uses any.
    ``trained``: all weights, or adapters. ``mixers``: kinds of layers with operations beyond attention's, or attention.
    ``gradients``: how replicas share them. ``sharded``: parameters are gathered
    for each pass (ZeRO-3). ``attention_share``: part of the model's FLOPs
    that attention and other mixers take beside products with weights. ``layer_s``: seconds of a layer
    for a micro-batch, forward and backward. Shares are of the step; GPUs wait during them. ``year``: of the software.
    ``parts``: what few steps have beside layers of text (`_parts`).
    """

    family: str
    links: str
    architecture: str
    precision_bits: int
    trained: str
    gradients: str
    offloaded: bool
    framework: str
    compiled: bool
    gpu: str
    experts: bool
    mixers: str
    sharded: bool
    n_gpus: int
    attention_share: float
    layer_s: float
    host_share: float
    communication_share: float
    year: int = SOFTWARE_YEAR
    parts: str = NO_PARTS


def traits_of(workload: Workload, figures: Mapping[str, Any], year: int = SOFTWARE_YEAR) -> StepTraits:
    """Return the traits of a step of ``workload``, whose ``figures`` are those by which jobs are compared.

    ``year``: of the software.
    """
    model, training, parallelism = workload.model, workload.training, workload.parallelism
    layers = workload.microbatches * model.layers / parallelism.pp
    compressed = parallelism.grad_compression != "none"
    architectures = [architecture_of(gpu) for gpu in workload.gpu_types]
    flops = model_flops(workload)
    return StepTraits(
        family=" and ".join(dict.fromkeys(_FAMILY if one in _ONE_FAMILY else one for one in architectures)),
        links=_links_in_nodes(workload),
        architecture=" and ".join(dict.fromkeys(architectures)),
        precision_bits=training.product_recipe.bits if training.product_recipe else _BITS[training.precision],
        trained="all weights" if training.adapters is None else "adapters",
        gradients=f"{parallelism.data_parallel}{f', {parallelism.grad_compression}' if compressed else ''}",
        offloaded=set(parallelism.offload.model_dump().values()) != {"none"},
        framework=workload.framework.name,
        compiled=workload.framework.compile,
        gpu=" and ".join(workload.gpu_types),
        experts=model.moe is not None,
        mixers=_mixers(workload),
        sharded=parallelism.zero == 3,
        n_gpus=workload.n_ranks,
        attention_share=flops.mixers / flops.whole if flops.whole else 0.0,
        layer_s=figures["step_time_s"] * (1 - figures["idle_in_passes_fraction"]) / layers,
        host_share=figures["host_bound_fraction"],
        communication_share=figures["exposed_communication_fraction"],
        year=year,
        parts=" and ".join(_parts(workload)) or NO_PARTS,
    )


def _parts(workload: Workload) -> Iterator[str]:
    """Yield what a step has that says nothing of steps without it, and they nothing of it."""
    model, graphs = workload.model, workload.framework.cuda_graphs
    if model.encoder is not None:
        yield "an encoder"
    if model.residual_streams > 1:
        yield "residual streams"
    if model.layer_inputs is not None:
        yield "inputs of each layer"
    if model.reused_keys is not None:
        yield "keys of other layers"
    if "full_iteration" in graphs:
        yield "a CUDA graph of all passes"
    elif graphs:
        yield "CUDA graphs of parts of layers"


def _mixers(workload: Workload) -> str:
    """Return the mixers that do something else than attention; windows and the like only hide keys from queries."""
    model = workload.model
    kinds = {model.mixer(number) for number in range(model.layers)}
    return " and ".join(sorted(kind.name for kind in kinds if kind.operations is not None)) or "attention"


def architecture_of(gpu: str) -> str:
    """Return the architecture of a type of GPU; of one that is not listed its own name."""
    return next((name for start, name in _ARCHITECTURES.items() if gpu.startswith(start)), gpu)


def _links_in_nodes(workload: Workload) -> str:
    """Return how GPUs of a node are joined; a job of one GPU uses no links, as if they were the best."""
    nodes = [node for node in workload.cluster.kinds if set(node.gpus.types) & set(workload.gpu_types)]
    kinds = ["nvswitch" if workload.n_ranks == 1 else node.nvlink.kind for node in nodes]
    return " and ".join(dict.fromkeys("PCIe" if kind == "none" else str(kind) for kind in kinds))

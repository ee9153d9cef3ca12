"""torchtitan's Llama 3 and DeepSeek-V3: modules on PyTorch, sharded by ``fully_shard``, split by DTensor.

github.com/pytorch/torchtitan 0.2.1: models/llama3/model/model.py, models/deepseek_v3/model/model.py, models/moe/moe.py,
models/attention.py, components/loss.py, train.py. Its experts are those of plain PyTorch (`pytorch_experts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import hugging_face, pytorch
from simulator.frameworks.framework import JobTraits, Traffic
from simulator.frameworks.hugging_face_limits import AUTOCAST
from simulator.frameworks.layout_habits import LayoutHabits
from simulator.frameworks.limits import Limit, plain_layers

#: Queries, or keys, become fp32, are multiplied as complex numbers, and are cast back (``apply_rotary_emb``).
ROTATION = (
    Traffic(" float", "upcast", 1, 2),
    Traffic(" complex", "residual", 2, 2),
    Traffic(" cast", "cast", 2, 1),
)
#: Inductor writes the casts, and leaves the complex product to PyTorch.
COMPILED_ROTATION = (
    Traffic(" float", "residual", 1, 2),
    Traffic(" complex", "residual", 2, 2),
    Traffic(" cast", "cast", 2, 1),
)
#: What DTensor dispatches for split layers. Compiled ones leave the dispatch to the compiler, but for what
#: redistributes a tensor; weights, gradients and what goes in and out of a graph stay DTensors.
ON_DTENSORS = ("forward_matmul", "backward_matmul", "forward_norm", "backward_norm", "collective")
COMPILED_ON_DTENSORS = ("collective",)
LIMITS = (
    *plain_layers("layers of torchtitan's models"),
    Limit("model.joined_products", (False,), "its products of queries, keys, values, gate and up are apart"),
    Limit("model.position", ("rope",), "its Llama 3 and DeepSeek-V3 have rope"),
    Limit("model.norm", ("rmsnorm",), "its Llama 3 and DeepSeek-V3 have RMSNorm"),
    Limit("model.activation", ("swiglu",), "its Llama 3 and DeepSeek-V3 have SiLU with a gate"),
    Limit(
        "parallelism.cp", (1,), "torch's ring attention, which gathers all keys and merges in fp32, is not simulated"
    ),
    Limit("parallelism.overlap.tp", (False,), "asynchronous tensor parallelism of torchtitan is not simulated"),
    Limit("parallelism.zero", (0, 3), "replicas are fully_shard (3), or torch's DistributedDataParallel (0)"),
    *(
        Limit(key, (None,), f"{what} under torch.autocast (weights in fp32, no zero: 3) are not simulated", AUTOCAST)
        for key, what in {
            "model.moe": "experts",
            "model.mla": "compressed queries, keys and values",
            "training.freeze": "frozen weights",
        }.items()
    ),
)


def joins_projections(position: str) -> bool:
    """Return False: queries, keys and values, and gate and up, come from products of their own, whatever the positions.

    In its experts gate and up are two grouped products, which are one here (`pytorch_experts`).
    """
    return False


#: Experts and latent attention of its DeepSeek-V3 were looked at as they run without torch.compile, on whole tensors.
COMPILED_LIMITS = (
    *LIMITS,
    Limit("model.moe", (None,), "experts under torchtitan's torch.compile are not simulated"),
    Limit("model.mla", (None,), "latent attention under torchtitan's torch.compile is not simulated"),
)
SPLIT_LIMITS = (
    *LIMITS,
    Limit("model.moe", (None,), "experts beside torchtitan's tensor parallelism are not simulated"),
    Limit("model.mla", (None,), "latent attention split by DTensor is not simulated"),
)


def titan_defaults(job: JobTraits) -> dict[str, object]:
    """Return defaults of torchtitan's job configuration: AdamW is PyTorch's fused one."""
    kept = "fp32" if job.master_weights else job.precision
    return {
        "model.vocab_multiple": 1,
        "training.grad_dtype": kept,
        "training.optimizer.state_dtype": kept,
        "training.optimizer.implementation": "fused",
        **({"model.moe.router_dtype": job.precision} if job.experts else {}),
        # fsdp_reshard_after_forward "default" (distributed/fsdp.py, ``get_fsdp_reshard_after_forward_policy``)
        **({"parallelism.reshard_after_forward": False} if job.stages > 1 and job.zero == 3 else {}),
    }


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of torchtitan, which hold over PyTorch's."""
    return {**pytorch.defaults(job), **titan_defaults(job)}


def split_defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of split layers: logits stay split over the vocabulary (``disable_loss_parallel`` is false)."""
    return {**defaults(job), "training.loss.name": "loss_parallel"}


def compiled_defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of torchtitan with ``compile.enable``, which compiles layers and the loss."""
    return {**pytorch.compiled_defaults(job), **titan_defaults(job)}


FRAMEWORK = replace(
    pytorch.FRAMEWORK,
    name="torchtitan",
    about="torchtitan's Llama 3 on PyTorch, or under torch.compile; its DeepSeek-V3 on PyTorch",
    before=(),
    adapter_kinds=(),
    runs_captured=False,
    launch_section="torchtitan",
    habits=LayoutHabits((0, 3), ("none", "ops", "full"), begins_sharded=True),
    defaults=defaults,
    limits=LIMITS,
    joins_projections=joins_projections,
    activation=hugging_face.activation,
    rotation=(ROTATION, ROTATION),
    autocasts=hugging_face.autocasts,
    replication=hugging_face.replication,
    repeats_keys=True,
    keeps_gathered_inputs=True,
)
COMPILED = replace(
    pytorch.COMPILED,
    name="torchtitan",
    about=FRAMEWORK.about,
    before=(),
    adapter_kinds=(),
    defaults=compiled_defaults,
    limits=COMPILED_LIMITS,
    joins_projections=joins_projections,
    rotation=(COMPILED_ROTATION, COMPILED_ROTATION),
    autocasts=hugging_face.autocasts,
    replication=hugging_face.replication,
    repeats_keys=True,
    compiles_loss_apart=True,
    keeps_gathered_inputs=True,
    # What is run again and needed by nothing is no part of the backward graph.
    recompute_ends_before=pytorch.RECOMPUTE_ENDS_BEFORE,
)


SPLIT = replace(
    FRAMEWORK,
    gathers_by_product=True,
    gathers_logits=True,
    copies_gathered=True,
    work_on_dtensors=ON_DTENSORS,
    defaults=split_defaults,
    limits=SPLIT_LIMITS,
    losses=(*FRAMEWORK.losses, "loss_parallel"),
)
COMPILED = replace(
    COMPILED,
    split=replace(COMPILED, work_on_dtensors=COMPILED_ON_DTENSORS, gathers_by_product=True, gathers_logits=True),
)
FRAMEWORK = replace(FRAMEWORK, compiled=COMPILED, split=SPLIT)

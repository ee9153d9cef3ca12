"""Limits of the trainers of others' code. What refuses a workload needs none of their libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.config.model import Model
from simulator.config.workload import Workload

#: A key of the workload, its value, the values that can be trained, and the reason.
TrainingLimit = tuple[str, object, tuple[object, ...], str]

#: Schedules of a workload -> torchtitan's ``pipeline_parallel_schedule``.
TITAN_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
}


#: Recipes of a workload -> torchtitan's ``recipe_name``; without a name torchao's is that of whole tensors.
TITAN_RECIPES = {"torchao_tensorwise": None, "torchao_rowwise": "rowwise"}


def _hugging_face(workload: Workload) -> Iterator[TrainingLimit]:
    """Yield limits of this trainer."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    yield "parallelism.tp", layout.tp, (1,), "is not written"
    yield "parallelism.pp", layout.pp, (1,), "is not written"
    yield "parallelism.zero", layout.zero, (0, 3), "replicas are DDP or fully_shard"
    yield "training.optimizer.name", training.optimizer.name, ("adamw",), "is not written"
    implementation = training.optimizer.implementation
    yield "training.optimizer.implementation", implementation, ("fused", "foreach"), "is not written"
    if model.inherited.config:
        yield "training.adapters", training.adapters, (None,), "adapters are of models whose file gives the sizes"
        yield "training.frozen", training.frozen, ((),), "is written with adapters alone"
        return
    yield from _hugging_face_sizes(model)
    if training.adapters is None:
        yield "training.frozen", training.frozen, ((),), "is written with adapters alone"
        return
    yield "training.freeze", training.freeze, (None,), "with adapters all else is frozen"
    yield "parallelism.dp", layout.dp, (1,), "adapters are trained on one GPU"
    yield "model.position", workload.model.position, ("rope",), "adapters are of Llama's products"
    yield "model.moe", workload.model.moe is not None, (False,), "adapters of experts are not written"


def _hugging_face_sizes(model: Model) -> Iterator[TrainingLimit]:
    """Yield what no configuration is made of where a file gives sizes and no config.json."""
    gemma = model.activation == "geglu"
    yield "model.norm_place", model.norm_place, ("both",) if gemma else ("before",), "only Gemma has norms behind"
    if gemma and not model.qk_norm:
        for key in ("attention_softcap", "logit_softcap"):
            capped = getattr(model, key) is not None
            yield f"model.{key}", capped, (True,), "without norms of heads it is Gemma 2, which has caps"
    if model.attention_sinks:
        yield "model.moe", model.moe is not None, (True,), "sinks are gpt-oss', which has experts"
        yield "model.biases", "experts" in model.biases, (True,), "experts of gpt-oss have biases"
    elif not gemma:
        one_kind = len(model.kinds) == 1
        yield "model.mixers", one_kind, (True,), "of mixed layers only Gemma's and gpt-oss' are written"
        if model.sliding_window is not None:
            plain = model.position == "rope" and not model.qk_norm and model.moe is None
            yield "model.sliding_window", plain, (True,), "only Mistral has a window"
    if model.position == "rope" and not model.attention_sinks:
        bare = gemma or model.qk_norm or model.moe is not None
        yield "model.activation", model.activation, ("swiglu", "geglu"), "others, as StarCoder 2, need hf_config"
        yield "model.joined_products", model.joined_products, (False,), "Phi-3 needs hf_config"
        yield "model.biases", model.biases, ((),) if bare else ((), ("qkv",)), "biases are Qwen2's"


#: Key of the model -> the only value that layers are written for.
UNWRITTEN: dict[str, object] = {
    "mla": None,
    "sliding_window": None,
    "mtp_layers": 0,
    "mixers": None,
    "mlps": None,
    "norm_place": "before",
    "qk_norm_kind": "head",
    "attention_sinks": False,
    "attention_gate": False,
    "attention_softcap": None,
    "logit_softcap": None,
}


def _deepspeed(workload: Workload) -> Iterator[TrainingLimit]:
    """Yield limits of this trainer."""
    for key, value in UNWRITTEN.items():
        yield f"model.{key}", getattr(workload.model, key), (value,), "is not written"
    training, layout = workload.training, workload.parallelism
    yield "parallelism.tp", layout.tp, (1,), "is not written"
    yield "parallelism.pp", layout.pp, (1,), "is not written"
    yield "training.precision", training.precision, ("bf16",), "is not written"
    yield "training.optimizer.name", training.optimizer.name, ("adamw",), "is not written"
    yield "parallelism.offload.optimizer", layout.offload.optimizer, ("none", "cpu"), "is not written"


def _torchtitan(workload: Workload) -> Iterator[TrainingLimit]:
    """Yield limits of this trainer."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    yield "model.moe", model.moe is not None, (False,), "experts are not written"
    yield "model.position", model.position, ("rope",), "its Llama 3 turns queries and keys"
    yield "model.norm", model.norm, ("rmsnorm",), "its Llama 3 has RMSNorm"
    yield "model.activation", model.activation, ("swiglu",), "its Llama 3 has SwiGLU"
    yield "model.tied_embeddings", model.tied_embeddings, (False,), "its Llama 3 has two tables"
    yield "training.optimizer.name", training.optimizer.name, ("adamw", "adam"), "is not written"
    yield "parallelism.zero", layout.zero, (3,) if layout.dp > 1 else (0, 3), "replicas are fully_shard"
    yield "training.fp8", training.fp8 and training.fp8.recipe, (None, *TITAN_RECIPES), "is not torchao's"
    if layout.pp > 1:
        yield "parallelism.schedule", layout.schedule, tuple(TITAN_SCHEDULES), "is not one of torch's"


#: Recipes of 8 bits that a workload names -> Megatron-Core's ``fp8_recipe``.
ENGINE_RECIPES = {"te_delayed": "delayed", "te_current": "tensorwise", "te_blockwise": "blockwise"}


def _transformer_engine(workload: Workload) -> Iterator[TrainingLimit]:
    """Yield limits of this trainer."""
    model, training = workload.model, workload.training
    yield "model.attention", model.attention, ("flash",), "Transformer Engine's attention is fused"
    yield "training.fp8", training.fp8 and training.fp8.recipe, (None, *ENGINE_RECIPES), "is not Transformer Engine's"
    yield "model.qk_norm_kind", model.qk_norm_kind, ("head",), "Transformer Engine's norms are of heads"
    yield "training.loss.name", training.loss.name, ("vocab_parallel",), "is not written"
    yield "training.optimizer.implementation", training.optimizer.implementation, ("apex",), "the optimizer is fused"
    yield from _megatron(workload)


def _megatron_core(workload: Workload) -> Iterator[TrainingLimit]:
    """Yield limits of this trainer."""
    model = workload.model
    yield "model.attention", model.attention, ("unfused",), "local modules have no fused attention"
    yield "training.fp8", workload.training.fp8, (None,), "needs Transformer Engine"
    yield from _megatron(workload)


def _megatron(workload: Workload) -> Iterator[TrainingLimit]:
    """Yield limits that local modules and Transformer Engine's share."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    moe = model.moe
    if moe is not None:
        yield "model.bias", model.bias, (False,), "biases of experts are not written"
        yield "model.moe.first_dense_layers", moe.first_dense_layers, (0,), "is not written"
        yield "model.moe.capacity_factor", moe.capacity_factor, (None,), "experts are dropless"
        yield "parallelism.dispatcher", layout.dispatcher, ("all_to_all", "all_gather"), "needs DeepEP"
    yield "training.precision", training.precision, ("bf16",), "is not written"
    yield "training.grad_dtype", training.grad_dtype, ("fp32",), "main gradients are in fp32"
    yield "parallelism.zero", layout.zero, (0, 1), "is the distributed optimizer (1) or none (0)"
    yield "parallelism.cp", layout.cp, (1,), "needs Transformer Engine"
    yield "parallelism.schedule", layout.schedule, ("1f1b", "interleaved"), "is not Megatron-Core's"


#: Module of a trainer -> what it cannot run.
LIMITS: dict[str, Callable[[Workload], Iterator[TrainingLimit]]] = {
    "hugging_face": _hugging_face,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "megatron_core": _megatron_core,
    "transformer_engine": _transformer_engine,
}

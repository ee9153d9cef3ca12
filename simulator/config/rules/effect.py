"""Keys that are given, and change nothing beside the rest of the workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from simulator.config.profile import load_profile, older_attention

if TYPE_CHECKING:
    from simulator.config.model import Model
    from simulator.config.workload import Workload
    from simulator.hardware.node import NodeSpec

Condition = Callable[["Workload"], bool]


def _shared(workload: Workload) -> bool:
    """Return whether any two ranks hold the same parameters, or gradients leave for servers or the host."""
    layout = workload.parallelism
    axes = ("dp", "edp") if workload.model.moe else ("dp",)
    return layout.updates_elsewhere or any(layout.replicas(axis) > 1 for axis in axes)


def _cuts_buckets(workload: Workload) -> bool:
    """Return whether gradients are reduced, or parameters gathered, in buckets, or copied to one."""
    layout = workload.parallelism
    reduced = _shared(workload) and (layout.zero == 2 or (layout.zero < 2 and layout.overlap.grad_reduce))
    gathered = layout.zero in (1, 2) and layout.overlap.param_gather and layout.pipeline_schedule.drains
    return reduced or gathered or layout.copy_to_buckets


def _agrees(workload: Workload) -> bool:
    """Return whether ranks of a replica have a norm or infinities to agree on before the optimizer."""
    training, layout = workload.training, workload.parallelism
    several = layout.pp * layout.tp * layout.ep * layout.etp > 1
    return several and not layout.server_count and (training.grad_clip is not None or training.precision == "fp16")


def _one_axis(workload: Workload) -> bool:
    layout = workload.parallelism
    return sum(size > 1 for size in (layout.tp, layout.cp, layout.ep, layout.dp, layout.pp)) < 2


def _skewed(workload: Workload) -> bool:
    moe = workload.model.moe
    return moe is not None and not isinstance(moe.token_distribution, str | tuple)


def _windows(workload: Workload) -> bool:
    """Return whether some layer has a window shorter than its sequences."""
    model, seq = workload.model, workload.training.seq
    return any(model.keys_seen(layer, seq).window for layer in range(model.layers))


def _chunks(workload: Workload) -> bool:
    """Return whether some layer attends in chunks shorter than its sequences."""
    model, seq = workload.model, workload.training.seq
    return any(model.keys_seen(layer, seq).chunk for layer in range(model.layers))


def _none_attends(workload: Workload) -> bool:
    return not any(kind.attends for kind in workload.model.kinds)


def _none_rotates(workload: Workload) -> bool:
    return not any(kind.attends and kind.attends.rotates for kind in workload.model.kinds)


def _sinks_nowhere(workload: Workload) -> bool:
    """Return whether sinks of layers with a window are asked for, and no layer is one."""
    model = workload.model
    return model.attention_sinks == "window" and all(kind.name != "window" for kind in model.kinds)


def _windows_alone(workload: Workload) -> bool:
    """Return whether every layer that attends has a window."""
    return all(kind.name == "window" for kind in workload.model.kinds if kind.attends)


def _none_has_mlp(workload: Workload) -> bool:
    return all(workload.model.mlp(layer) == "none" for layer in range(workload.model.layers))


def _every(workload: Workload, holds: Callable[[NodeSpec], bool]) -> bool:
    return all(holds(node) for node in workload.cluster.kinds)


def _multiplies_fp32(workload: Workload) -> bool:
    """Return whether products of the model, or of its routers, are in fp32."""
    moe = workload.model.moe
    return workload.training.precision == "fp32" or (moe is not None and moe.router_dtype == "fp32")


def _lacks_tf32(workload: Workload) -> bool:
    """Return whether all GPUs of the job multiply fp32 on CUDA cores anyway."""
    profiles = (load_profile(workload.calibrations[gpu]) for gpu in workload.gpu_types)
    return not any(profile.gpu_spec.has_tf32 for profile in profiles)


def _one_attention(workload: Workload) -> bool:
    """Return whether no profile of its GPUs has the older kernels of attention that are asked for."""
    kernel = workload.training.attention_kernel
    profiles = (load_profile(workload.calibrations[gpu]) for gpu in workload.gpu_types)
    return kernel != "newest" and all(older_attention(profile, kernel) is None for profile in profiles)


#: Keys of the model that say what attention is like.
_OF_ATTENTION = (
    *("kv_heads", "head_dim", "v_head_dim", "qk_norm", "qk_norm_kind", "value_norm", "keys_as_values"),
    *("attention_sinks", "attention_gate", "attention_softcap", "mla"),
)
#: Dotted key, when it changes nothing, and why. Of several rows of a key the first that holds is told.
TABLE: tuple[tuple[str, Condition, str], ...] = (
    ("seed", lambda w: not _skewed(w), "nothing is random without model.moe.token_distribution: {skew: ...}"),
    ("model.sliding_window", lambda w: not _windows(w), "no sequence is longer than the window"),
    ("model.attention_chunk", lambda w: not _chunks(w), "no sequence is longer than a chunk"),
    *((f"model.{key}", _none_attends, "no layer has heads of keys and values") for key in _OF_ATTENTION),
    (
        "model.attention",
        lambda w: w.model.attention == "unfused" and _none_attends(w),
        "no layer has heads of keys and values",
    ),
    ("model.attention_sinks", _sinks_nowhere, "no layer has a window"),
    ("model.keys_as_values", _windows_alone, "all layers that attend have a window"),
    ("model.position", lambda w: w.model.position == "rope" and _none_rotates(w), "no layer rotates queries and keys"),
    (
        "model.joined_products",
        lambda w: w.software.joins_projections(w.model.position),
        "layers of the framework have joined products in all models",
    ),
    ("model.ffn_hidden", _none_has_mlp, "no layer has an MLP"),
    ("model.activation", _none_has_mlp, "no layer has an MLP"),
    ("training.tf32", lambda w: not _multiplies_fp32(w), "no product is in fp32"),
    ("training.tf32", _lacks_tf32, "the GPUs have no TF32"),
    ("training.attention_kernel", lambda w: w.model.attention == "unfused", "model.attention is unfused"),
    ("training.attention_kernel", _one_attention, "the profile has no FlashAttention 2 beside a newer kernel"),
    (
        "model.moe.node_limit",
        lambda w: w.parallelism.expert_nodes(w.cluster.gpus_per_node) == 1,
        "the ranks of an expert-parallel group share a node",
    ),
    ("model.moe.node_limit", lambda w: w.parallelism.dispatcher == "all_gather", "all ranks get all tokens"),
    ("parallelism.dispatcher", lambda w: w.parallelism.ep == 1, "ep is 1"),
    ("parallelism.cp_method", lambda w: w.parallelism.cp == 1, "cp is 1"),
    ("parallelism.cp_layout", lambda w: w.parallelism.cp == 1, "cp is 1"),
    (
        "parallelism.cp_layout",
        lambda w: w.parallelism.cp_method != "ring",
        "ulysses gives every rank whole sequences to attend to",
    ),
    (
        "parallelism.sequence_parallel",
        lambda w: w.parallelism.tp == 1 and w.parallelism.sequence_parallel,
        "tp is 1",
    ),
    ("parallelism.vocab_parallel", lambda w: w.parallelism.tp == 1, "tp is 1"),
    ("parallelism.overlap.tp", lambda w: w.parallelism.tp == 1, "tp is 1"),
    ("parallelism.overlap.ep", lambda w: w.parallelism.ep == 1, "ep is 1"),
    (
        "parallelism.overlap.expert_all_to_all",
        lambda w: w.microbatches == 1 and not w.parallelism.overlap.delayed_weight_grad,
        "there is one micro-batch",
    ),
    ("parallelism.overlap.p2p", lambda w: w.parallelism.pp == 1, "pp is 1"),
    (
        "parallelism.batch_p2p",
        lambda w: not w.parallelism.posts_ahead,
        "no transfer stands behind another: that takes pp > 1, overlap.p2p, and a schedule that posts receives ahead",
    ),
    ("parallelism.deallocate_pipeline_outputs", lambda w: w.parallelism.pp == 1, "pp is 1"),
    ("parallelism.scatter_gather_p2p", lambda w: w.parallelism.pp == 1, "pp is 1"),
    ("parallelism.scatter_gather_p2p", lambda w: w.parallelism.tp == 1, "tp is 1"),
    ("parallelism.account_for_embedding", lambda w: w.parallelism.n_stages == 1, "there is one stage"),
    ("parallelism.account_for_loss", lambda w: w.parallelism.n_stages == 1, "there is one stage"),
    (
        "parallelism.zb_memory_limit",
        lambda w: w.parallelism.pipeline_schedule.search is None,
        "it is of the schedule zb_auto",
    ),
    (
        "parallelism.optimizer_sync",
        lambda w: not _agrees(w),
        "ranks have nothing to agree on: that is the norm of grad_clip, or infinities in fp16, over tp, pp and ep",
    ),
    ("parallelism.servers", lambda w: not w.parallelism.server_count, "data_parallel is allreduce"),
    (
        "parallelism.hsdp",
        lambda w: bool(w.parallelism.zero) and w.parallelism.hsdp == w.parallelism.replicas("dp"),
        "it is all of dp x cp, over which ZeRO shards anyway",
    ),
    ("parallelism.prefetch", lambda w: w.parallelism.zero < 3, "parameters are sharded by zero 3 alone"),
    ("parallelism.prefetch", lambda w: not w.parallelism.overlap.param_gather, "overlap.param_gather is false"),
    ("parallelism.reshard_after_forward", lambda w: w.parallelism.zero < 3, "parameters are sharded by zero 3 alone"),
    ("parallelism.sync_each_micro_batch", lambda w: w.parallelism.zero < 3, "units of zero 3 alone have the choice"),
    ("parallelism.sync_each_micro_batch", lambda w: w.microbatches == 1, "a step has one micro-batch"),
    ("parallelism.overlap.grad_reduce", lambda w: not _shared(w), "no gradient is sent: dp x cp is 1"),
    ("parallelism.overlap.param_gather", lambda w: not w.parallelism.zero, "parameters are gathered by ZeRO alone"),
    (
        "parallelism.overlap.param_gather",
        lambda w: w.parallelism.zero < 3 and not w.parallelism.pipeline_schedule.drains,
        "the schedule's forward passes run before the optimizer of the step before, whose parameters they do not need",
    ),
    ("parallelism.bucket_bytes", lambda w: w.parallelism.zero == 3 and not _cuts_buckets(w), "zero 3 works by layer"),
    ("parallelism.bucket_bytes", lambda w: not _shared(w), "no gradient is sent: dp x cp is 1"),
    (
        "parallelism.bucket_bytes",
        lambda w: not _cuts_buckets(w),
        "with overlap.grad_reduce false gradients are reduced at once",
    ),
    ("parallelism.copy_to_buckets", lambda w: w.parallelism.replicas("dp") == 1, "no gradient is sent: dp x cp is 1"),
    ("parallelism.rank_order", _one_axis, "fewer than two axes have several ranks"),
    ("parallelism.collective_algorithm", lambda w: w.n_ranks == 1, "there is one rank"),
    (
        "cluster.price_per_gpu_hour",
        lambda w: w.training.total_tokens is None,
        "how long the run takes follows from training.total_tokens, which is not there",
    ),
    ("cluster.node.nvlink.latency_s", lambda w: _every(w, lambda n: n.nvlink.kind == "none"), "nvlink.kind is none"),
    ("cluster.node.nics.bandwidth_bps", lambda w: _every(w, lambda n: not n.nics.count), "nics.count is 0"),
    ("cluster.node.nvme.read_Bps", lambda w: _every(w, lambda n: not n.nvme.count), "nvme.count is 0"),
    ("cluster.node.nvme.write_Bps", lambda w: _every(w, lambda n: not n.nvme.count), "nvme.count is 0"),
)


def warnings(workload: Workload) -> Iterator[str]:
    """Keys of `TABLE` that the file has and that change nothing, but for those of a preset or a config.json.

    What is off by default and said to be off asks for nothing."""
    warned = set()
    for key, idle, why in TABLE:
        if key not in warned and _asked_for(workload, key) and idle(workload):
            warned.add(key)
            yield f"{key} has no effect: {why}"
    if absent := _absent_biases(workload.model):
        yield f"model.biases names {', '.join(absent)}, which no layer of the model has"


def _absent_biases(model: Model) -> list[str]:
    """Return the places of `biases` at which the model has no linear layer, or one that never has a bias."""
    if "biases" not in model.model_fields_set - model.inherited:
        return []
    moe, attends = model.moe, any(kind.attends for kind in model.kinds)
    there = {
        "qkv": attends and model.mla is None,
        "o": attends,
        "mlp": model.has_dense_mlps or bool(moe and moe.shared_experts),
        "experts": moe is not None,
        "router": moe is not None,
        "head": True,
    }
    return [place for place in dict.fromkeys(model.biases) if not there[place]]


def _asked_for(workload: Workload, key: str) -> bool:
    if key.startswith("model.") and key.removeprefix("model.") in workload.model.inherited:
        return False
    section: Any = workload
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part, None)
    if not isinstance(section, BaseModel):  # of a cluster, whose keys in `TABLE` are all off by default
        return bool(getattr(section, name, None))
    if name not in section.model_fields_set:
        return False
    value, default = getattr(section, name), type(section).model_fields[name].default
    return bool(value != default or value)

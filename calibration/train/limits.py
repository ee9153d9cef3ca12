"""Limits of the trainer, and why: plain PyTorch has no such thing, or it is not written here."""

from __future__ import annotations

from collections.abc import Iterator

from calibration.train.frameworks import is_stack, stack_refusals
from calibration.train.frameworks.limits import UNWRITTEN
from simulator.config.framework import FrameworkChoice
from simulator.config.model import BIASES
from simulator.config.workload import Workload
from simulator.errors import InputError, in_one_line

#: Schedule -> its class in ``torch.distributed.pipelining.schedules``. By name: what refuses need not wait for torch.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def refusal(workload: Workload) -> str:
    """Why a workload cannot be trained here, a line for each of its keys that is in the way; empty where none is."""
    lines = [f"\n  {in_one_line(problem)}" for problem in refusals(workload)]
    return f"cannot be trained here:{''.join(lines)}" if lines else ""


def refusals(workload: Workload) -> Iterator[InputError]:
    """Yield all parts of a workload that cannot be trained here, but none that follows from another key."""
    if is_stack(workload):
        yield from stack_refusals(workload)
        return
    plain = FrameworkChoice(name="pytorch")
    if workload.framework != plain:
        yield from _framework(workload.framework, plain)
        workload = workload.model_copy(update={"framework": plain})
    yield from _training(workload)
    yield from _optimizer(workload)
    yield from _model(workload)
    yield from _layout(workload)
    if workload.parallelism.zero == 3:
        yield from _fsdp(workload)
    if workload.parallelism.pp > 1:
        yield from _pipeline(workload)
    yield from _experts(workload)


def _framework(choice: FrameworkChoice, plain: FrameworkChoice) -> Iterator[InputError]:
    if choice.name == plain.name and choice.version is not None:
        yield _no("it is the one that is installed", "framework.version", choice.version, "null")
    if choice.name != plain.name or choice.compile:
        yield _no("is not plain PyTorch", "framework", choice.title, plain.title)


def _training(workload: Workload) -> Iterator[InputError]:
    training, layout = workload.training, workload.parallelism
    if training.precision not in ("bf16", "fp32"):
        yield _no("needs loss scaling, which is not written", "training.precision", training.precision, "bf16, fp32")
    kept = "fp32" if workload.replication.weights_are_masters else training.precision
    by_hand = layout.zero == 0 and (layout.dp == 1 or not layout.overlap.grad_reduce)
    if training.grad_dtype != kept and not (by_hand and training.grad_dtype == "fp32"):
        reason = "DDP and FSDP reduce gradients in the type of the parameters"
        yield _no(reason, "training.grad_dtype", training.grad_dtype, kept)
    if training.recompute.granularity == "ops":
        yield _no("is not written", "training.recompute", "ops", "none, selective, full")
    if training.recompute.granularity == "selective" and training.recompute.modules != ("core_attn",):
        yield _no("is not written", "training.recompute.modules", list(training.recompute.modules), "[core_attn]")
    for name in ("keep_gradients", "gradient_accumulation_fusion"):
        if getattr(training, name) and name in training.model_fields_set:
            yield _no("is not plain PyTorch", f"training.{name}", True, "false")
    if training.loss.name != "eager" and "loss" in training.model_fields_set:
        yield _no("is not written", "training.loss", training.loss.name, "eager")


def _optimizer(workload: Workload) -> Iterator[InputError]:
    optimizer, precision = workload.training.optimizer, workload.training.precision
    kept = "fp32" if optimizer.master_weights else "bf16"
    if precision == "bf16" and optimizer.state_dtype != kept:
        reason = "AdamW keeps its states in the type of what it updates"
        yield _no(reason, "training.optimizer.state_dtype", optimizer.state_dtype, kept)
    if optimizer.name not in ("adamw", "adam"):
        yield _no("is not written", "training.optimizer.name", optimizer.name, "adamw, adam")
    if optimizer.groups:
        weights = [group.weights for group in optimizer.groups]
        yield _no("has one optimizer", "training.optimizer.groups", weights, "none")
    if optimizer.implementation != "foreach" and "implementation" in optimizer.model_fields_set:
        yield _no("is not written", "training.optimizer.implementation", optimizer.implementation, "foreach")


def _model(workload: Workload) -> Iterator[InputError]:
    """Yield what of the model, and of how its kernels are chosen, cannot be trained."""
    model, training, tp = workload.model, workload.training, workload.parallelism.tp
    for name, allowed in UNWRITTEN.items():
        if getattr(model, name) != allowed:
            yield _no("is not written", f"model.{name}", getattr(model, name), str(allowed))
    if set(model.biases) != (set(BIASES) if model.bias else set()):
        yield _no("is not written", "model.biases", list(model.biases), "left out")
    if model.activation == "relu2":
        yield _no("is not written", "model.activation", "relu2", "gelu, swiglu, geglu, relu")
    if model.v_head_dim != model.head_dim:
        yield _no("is not written", "model.v_head_dim", model.v_head_dim, str(model.head_dim))
    if model.attention != "flash":
        yield _no("is not what torch's attention does", "model.attention", model.attention, "flash")
    if not training.fused_rms_norm and "fused_rms_norm" in training.model_fields_set:
        yield _no("its RMSNorm is one kernel", "training.fused_rms_norm", False, True)
    if training.attention_kernel != "newest":
        yield _no("PyTorch chooses it", "training.attention_kernel", training.attention_kernel, "newest")
    if model.heads % tp or model.kv_heads % tp:
        yield _no("more ranks than heads of keys are not written", "parallelism.tp", tp, "a divisor of kv_heads")


def _layout(workload: Workload) -> Iterator[InputError]:
    layout = workload.parallelism
    allowed = {
        "cp": (1,),
        "etp": (1,),
        "zero": (0, 3),
        "data_parallel": ("allreduce",),
        "grad_compression": ("none",),
        "hsdp": (None,),
        "rank_order": ("tp-cp-ep-dp-pp",),
        "scatter_gather_p2p": (False,),
        "vocab_parallel": (True,),
    }
    if layout.copy_to_buckets and "copy_to_buckets" in layout.model_fields_set:
        yield _no("is not written", "parallelism.copy_to_buckets", True, False)
    for name, values in allowed.items():
        if (value := getattr(layout, name)) not in values:
            yield _no("is not written", f"parallelism.{name}", value, ", ".join(map(str, values)))
    if layout.collective_algorithm != "auto":
        yield _no("NCCL chooses it", "parallelism.collective_algorithm", layout.collective_algorithm, "auto")
    for name in ("tp", "ep"):
        if getattr(layout.overlap, name):
            yield _no("is not written", f"parallelism.overlap.{name}", True, "false")
    for name in ("optimizer", "activations", "parameters"):
        if (place := getattr(layout.offload, name)) != "none":
            yield _no("is not written", f"parallelism.offload.{name}", place, "none")


def _fsdp(workload: Workload) -> Iterator[InputError]:
    layout = workload.parallelism
    if layout.prefetch != 1:
        yield _no("FSDP gathers one unit ahead", "parallelism.prefetch", layout.prefetch, 1)
    for name in ("param_gather", "grad_reduce"):
        if not getattr(layout.overlap, name):
            yield _no("FSDP communicates beside compute", f"parallelism.overlap.{name}", False, True)
    if layout.pp > 1:
        yield _no("FSDP in a pipeline is not written", "parallelism.zero", 3, "0")


def _pipeline(workload: Workload) -> Iterator[InputError]:
    layout = workload.parallelism
    if not layout.overlap.p2p:
        yield _no("torch's pipelines send beside compute", "parallelism.overlap.p2p", False, True)
    if layout.deallocate_pipeline_outputs and "deallocate_pipeline_outputs" in layout.model_fields_set:
        yield _no("torch's stages keep them", "parallelism.deallocate_pipeline_outputs", True, False)
    if workload.model.tied_embeddings:
        yield _no("two ranks with one table are not written", "model.tied_embeddings", True, "false")
    if layout.schedule not in SCHEDULES:
        reason = "torch.distributed.pipelining has no such schedule"
        yield _no(reason, "parallelism.schedule", layout.schedule, ", ".join(SCHEDULES))
        return
    if layout.tp > 1 and layout.pipeline_schedule.splits:
        reason = "layers split by hand do not split their backward pass"
        yield _no(reason, "parallelism.schedule", layout.schedule, "schedules with whole backward passes")
    if layout.dp > 1 and layout.overlap.grad_reduce and layout.pipeline_schedule.splits:
        reason = "DDP does not see a backward pass that torch's pipelines split"
        yield _no(reason, "parallelism.overlap.grad_reduce", True, False)


def _experts(workload: Workload) -> Iterator[InputError]:
    moe, layout = workload.model.moe, workload.parallelism
    if moe is None:
        return
    if layout.ep not in (1, layout.tp * layout.dp) or (layout.tp > 1 and layout.ep == 1):
        yield _no("copies of experts are not written", "parallelism.ep", layout.ep, layout.tp * layout.dp)
    if layout.ep > 1 and (layout.pp > 1 or layout.zero):
        yield _no("with a pipeline or FSDP is not written", "parallelism.ep", layout.ep, 1)
    if layout.tp > 1 and not layout.sequence_parallel:
        yield _no("with experts is not written", "parallelism.sequence_parallel", False, True)
    for name, allowed in (
        ("shared_experts", 0),
        ("redundant_experts", 0),
        ("capacity_factor", None),
        ("node_limit", None),
    ):
        if (value := getattr(moe, name)) != allowed:
            yield _no("is not written", f"model.moe.{name}", value, allowed)
    if moe.token_distribution != "balanced":
        yield _no("tokens are dealt to experts in turn", "model.moe.token_distribution", "uneven", "balanced")
    if moe.router_dtype == "fp16":
        yield _no("is not written for experts", "model.moe.router_dtype", "fp16", "fp32, bf16")
    if workload.model.bias:
        yield _no("is not written for experts", "model.bias", True, "false")
    if workload.rank_tokens * moe.top_k % moe.experts:
        yield _no("tokens do not fall evenly to the experts", "model.moe.experts", moe.experts, "a divisor of them")


def _no(reason: str, key: str, value: object, allowed: object) -> InputError:
    return InputError(reason, key=key, found=value, allowed=allowed)

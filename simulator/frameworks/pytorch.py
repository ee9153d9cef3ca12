"""PyTorch alone: a kernel per operation or, under torch.compile, what Inductor makes of them.

Replicas are torch's ``DistributedDataParallel`` and ``fully_shard``, stages those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from simulator.frameworks import fused_kernels, lora, pytorch_experts
from simulator.frameworks.framework import (
    ActivationKernels,
    EarlierDefaults,
    Framework,
    JobTraits,
    NormPlace,
    Replication,
    Traffic,
)
from simulator.frameworks.layout_habits import LayoutHabits
from simulator.frameworks.stage_runtime import StageRuntime
from simulator.operations.dropout import drop_kernel, dropout
from simulator.operations.nodes import Node, Ops, Tensor, fuse, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute

#: Gated activations read gate and up from the first product's output. The activation and the gate have a kernel each;
#: one more joins the two gradients for the backward product. Gate and up are halves of the rows of one tensor: kernels
#: that read them, and no others, are strided.
GATED = ActivationKernels(
    forward=(Traffic("", "strided", 1, 1), Traffic(" gate", "strided", 2, 1)),
    backward=(
        Traffic(" gate", "strided", 2, 1),
        Traffic(" up", "residual", 2, 1),
        Traffic("", "strided", 2, 1),
        Traffic(" join", "copy", 2, 2),
    ),
    kept=("gate",),
)
#: x cos, -x of one half, the join of both halves, x sin, and the sum.
ROTATION: tuple[Traffic, ...] = (
    Traffic(" cos", "rope", 1, 1),
    Traffic(" negate", "rope", 0.5, 0.5),
    Traffic(" join", "rope", 1, 1),
    Traffic(" sin", "rope", 1, 1),
    Traffic(" add", "rope", 2, 1),
)
#: Kernels of ``(x.float() * rsqrt(x.float().pow(2).mean(-1) + eps)).type_as(x) * weight``. PyTorch's RMSNorm was so up
#: to 2.8 (PyTorch, pull request 153666), and Meta's and Hugging Face's are in Llama. Columns: label, class, tensors
#: read in fp32 and in the working precision, tensors written in both. Kernels that take the same number from a whole
#: row or column have no vector loads. Kernels over one number per row are left out.
RMS_NORM_FORWARD = (
    ("float", "upcast", 0, 1, 1, 0),
    ("square", "activation", 1, 0, 1, 0),
    ("mean", "reduce", 1, 0, 0, 0),
    ("divide", "strided", 1, 0, 1, 0),
    ("cast", "cast", 1, 0, 0, 1),
    ("weight", "bias", 0, 1, 0, 1),
)
#: Autograd's kernels in its order: of the product with the weight, of the cast, and of the division (of x, and of its
#: row's number). Then come the mean, whose gradient is written for every element of a row, and the square (2 x times
#: that). Last are the sum of both gradients of x.float(), and the cast of that.
RMS_NORM_BACKWARD = (
    ("weight", "bias", 0, 1, 0, 1),
    ("cast", "upcast", 0, 1, 1, 0),
    ("divide", "strided", 1, 0, 1, 0),
    ("divisor", "residual", 2, 0, 1, 0),
    ("divisor sum", "reduce", 1, 0, 0, 0),
    ("mean", "strided", 0, 0, 1, 0),
    ("square base", "copy", 1, 0, 1, 0),
    ("square doubled", "activation", 1, 0, 1, 0),
    ("square", "residual", 2, 0, 1, 0),
    ("sum", "residual", 2, 0, 1, 0),
    ("float", "cast", 1, 0, 0, 1),
)

#: Torch's checkpoint of a layer without dropout stops when the last tensor is there that the backward pass needs
#: (torch/utils/checkpoint.py, ``_StopRecomputationError``). Autograd's products keep their operands before they
#: compute; a split layer's is a function of its own (index 1), which keeps them when it returns.
RECOMPUTE_ENDS_BEFORE = (
    frozenset(("mlp.fc2", "mlp.down.lora_B", "moe.weigh", "mlp.residual")),
    frozenset(("mlp.fc2 bias", "mlp.down.lora_B", "moe.weigh", "mlp.residual")),
)


def activation(shapes: Shapes) -> ActivationKernels:
    """Return a kernel each way, for GELU a special one, or several for a gated activation."""
    if shapes.gated:
        return GATED
    op = "gelu" if shapes.activation == "gelu" else "activation"
    return ActivationKernels((Traffic("", op, 1, 1),), (Traffic("", f"{op}_bwd", 2, 1),))


def residual(shapes: Shapes, block: str) -> Node:
    """Return dropout, and the sum in a kernel of its own."""
    add = memory("F", f"{block}.residual", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype)
    if not shapes.dropout:
        return Node(forward=(add,), grad_bytes=shapes.row_bytes)
    drop = dropout(shapes, f"{block}.dropout", shapes.rows * shapes.hidden, mask=f"{block}.dropout mask")
    return replace(drop, forward=(*drop.forward, add))


def norm_kernels(
    shapes: Shapes, place: NormPlace, phase: str, table: Iterable[tuple[str, str, int, int, int, int]]
) -> Ops:
    """Return the kernels of a norm.

    A row of ``table`` is a name, a class, and how many tensors are read in fp32 and in the working precision, and
    written likewise.
    """
    wide, suffix = 4.0 * shapes.rows * shapes.hidden, " bwd" if phase == "B" else ""
    return tuple(
        memory(
            phase,
            f"{place.name}.{label}{suffix}",
            op,
            read[0] * wide + read[1] * shapes.row_bytes,
            written[0] * wide + written[1] * shapes.row_bytes,
            shapes.dtype,
        )
        for label, op, *tensors in table
        for read, written in [(tensors[:2], tensors[2:])]
    )


def rms_norm_by_operations(shapes: Shapes, place: NormPlace) -> Node:
    """Return RMSNorm as `RMS_NORM_FORWARD` and `RMS_NORM_BACKWARD`.

    Kept are its input in fp32, for the square and the division, and the quotient, which the weight multiplies.
    """
    name, wide = place.name, 4.0 * shapes.rows * shapes.hidden
    return Node(
        forward=norm_kernels(shapes, place, "F", RMS_NORM_FORWARD),
        input_grad=norm_kernels(shapes, place, "B", RMS_NORM_BACKWARD),
        weight_grad=(
            memory("W", f"{name}.weight wgrad", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype),
            memory(
                "W",
                f"{name}.weight wgrad sum",
                "reduce",
                shapes.row_bytes,
                shapes.element * shapes.hidden,
                shapes.dtype,
                shapes.hidden,
            ),
        ),
        saved=(Tensor(f"{name}.float", wide), Tensor(f"{name}.divided", shapes.row_bytes)),
        saved_for_weights=(Tensor(f"{name}.divided", shapes.row_bytes),),
        grad_bytes=3 * wide,
        output_grad_bytes=shapes.row_bytes,
    )


def joined_qkv_width(shapes: Shapes) -> int:
    """Return the width of all three gradients: every one is copied."""
    return shapes.q_width + 2 * shapes.kv_width


def score_kernel(
    shapes: Shapes, phase: str, name: str, op: str, read: float, written: float, width: int = 0
) -> Compute:
    """Return a kernel over attention's scores from its bytes; ``width``: of a row, where that matters."""
    return memory(phase, f"attn.{name}", op, read, written, shapes.dtype, width)


def softmax(shapes: Shapes, elements: int) -> tuple[Node, Node]:
    """Return scale, mask and softmax in a kernel each, and dropout."""
    square, row, kernel = float(shapes.element * elements), shapes.seq, partial(score_kernel, shapes)
    probs = Node(
        forward=(
            kernel("F", "scale", "activation", square, square, row),
            kernel("F", "mask", "mask", square, square, row),
            kernel("F", "softmax", "softmax", square, square, row),
        ),
        input_grad=(
            kernel("B", "softmax bwd", "softmax_bwd", 2 * square, square, row),
            kernel("B", "mask bwd", "mask", square, square, row),
            kernel("B", "scale bwd", "activation", square, square, row),
        ),
        saved=(Tensor("attn.probs", square),),
        grad_bytes=2 * square,
    )
    drop = dropout(shapes, "attn.probs dropout", elements, mask="attn.probs mask") if shapes.dropout else Node()
    return probs, drop


def embedding_mask(shapes: Shapes, nbytes: float) -> tuple[Ops, Ops]:
    """Return the kernels that fill rows of words of other ranks in a copy, and their gradients likewise."""
    return (
        (memory("F", "embedding.mask", "mask", nbytes, nbytes, shapes.dtype),),
        (memory("W", "embedding.mask bwd", "mask", nbytes, nbytes, shapes.dtype),),
    )


def replication(job: JobTraits) -> Replication:
    """Return how PyTorch keeps and shares gradients.

    Autograd hands over the first gradient as it is; a buffer of another type is zeroed and added to. FSDP adds up
    reduced gradients.
    """
    fully, same_type = job.zero == 3, job.grad_dtype == job.precision
    kept = fully or (job.zero == 0 and same_type)
    return Replication(
        fully_sharded=fully,
        weights_are_masters=fully and job.master_weights,
        in_ddp=same_type and job.zero == 0 and job.reduces_beside,
        hands_over_gradients=kept and job.updates_on_gpu and not job.keeps_gradients,
        adds_first_gradients=not fully and not same_type,
        adds_later_gradients=not fully,
        clears_buffers=not fully and not same_type,
    )


def _defaults(job: JobTraits) -> dict[str, object]:
    """Return defaults of PyTorch, compiled or not: stages keep their outputs, and whole gradients."""
    in_stages: dict[str, object] = {"parallelism.deallocate_pipeline_outputs": False} if job.stages > 1 else {}
    if job.stages > 1 and job.zero == 3:
        in_stages["parallelism.sync_each_micro_batch"] = False
    return {**in_stages, **job.threads_of_torchrun}


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of eager PyTorch: AdamW is the multi-tensor one."""
    return {**_defaults(job), "training.optimizer.implementation": "foreach"}


def _batched(job: JobTraits) -> Mapping[str, object]:
    """Return defaults up to 2.11, whose pipelines send by ``batch_isend_irecv``."""
    return {"parallelism.batch_p2p": True}


def _without_fused_norm(job: JobTraits) -> Mapping[str, object]:
    """Return defaults up to 2.8; RMSNorm has kernels of its own since 2.9 (pull request 153666)."""
    return {"training.fused_rms_norm": job.norm != "rmsnorm"}


def compiled_joined_qkv_width(shapes: Shapes) -> int:
    """Return the width of values alone where a rotation writes the gradients of queries and keys in place."""
    return shapes.kv_width if shapes.position == "rope" else shapes.q_width + 2 * shapes.kv_width


def compiled_softmax(shapes: Shapes, elements: int) -> tuple[Node, Node]:
    """Return scale, mask, softmax and dropout in one kernel, which reads the whole square."""
    square = float(shapes.element * elements)
    forward = memory("F", "attn.softmax", "softmax", square, square, shapes.dtype, shapes.seq)
    drop = Node()
    if shapes.dropout:
        forward = fuse("F", forward, drop_kernel(shapes, "attn.probs dropout", elements), square, keep=True)
        drop = replace(dropout(shapes, "attn.probs dropout", elements, mask="attn.probs mask"), forward=())
    probs = Node(
        forward=(forward,),
        input_grad=(memory("B", "attn.softmax bwd", "softmax_bwd", 2 * square, square, shapes.dtype, shapes.seq),),
        saved=(Tensor("attn.probs", square),),
        grad_bytes=2 * square,
    )
    return probs, drop


def compiled_defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of compiled PyTorch: the loss is compiled too."""
    return {**_defaults(job), "training.loss.name": "compiled", "training.loss.compile": True}


FRAMEWORK = Framework(
    name="pytorch",
    about="PyTorch alone, or under torch.compile",
    habits=LayoutHabits((0, 3), one_rank_layers=True),
    launch_section="eager",
    memory_sections=("eager",),
    defaults=defaults,
    losses=("eager", "eager_narrow", "compiled", "chunked", "fused", "fused_linear", "vocab_parallel"),
    adds_in_products=False,
    activation=activation,
    rotation=(ROTATION, ROTATION),
    joined_qkv_width=joined_qkv_width,
    softmax=softmax,
    residual=residual,
    embedding_mask=embedding_mask,
    experts=pytorch_experts.EXPERTS,
    adapters=replace(lora.ADAPTERS, copied=lora.COPIED),
    replication=replication,
    by_row="strided",
    keeps_log_softmax=True,
    rms_norm_by_operations=rms_norm_by_operations,
    adds_bias_after_sums=True,
    recompute_ends_before=RECOMPUTE_ENDS_BEFORE,
    adapter_kinds=("lora", "dora"),
    runs_captured=True,
    stages=StageRuntime(
        buffers_each_microbatch=True,
        keeps_last_outputs=True,
        keeps_graphs=True,
        first_backward_whole=True,
        awaits_apart=True,
        # torch/distributed/pipelining/stage.py: ``backward_maybe_with_nosync``, ``perform_reduce_grad``
        keeps_units=True,
    ),
    before=(EarlierDefaults((2, 9), _without_fused_norm), EarlierDefaults((2, 12), _batched)),
)
#: Experts are taken as the fused kernels: what Inductor makes of theirs is not known.
COMPILED = replace(
    FRAMEWORK,
    launch_section="compiled",
    memory_sections=("eager", "fused"),
    compiles=True,
    defaults=compiled_defaults,
    activation=fused_kernels.activation,
    rotation=fused_kernels.ROTATION,
    joined_qkv_width=compiled_joined_qkv_width,
    softmax=compiled_softmax,
    residual=fused_kernels.residual,
    embedding_mask=fused_kernels.embedding_mask,
    experts=fused_kernels.EXPERTS,
    adapters=fused_kernels.ADAPTERS,
    keeps_split_log_softmax=True,
    rms_norm_by_operations=None,
    fuses_residual_and_norm=True,
    adds_bias_after_sums=False,
    recompute_ends_before=(frozenset(), frozenset()),
    adapter_kinds=("lora",),
    pads_products=True,
    before=(EarlierDefaults((2, 12), _batched),),
)
FRAMEWORK = replace(FRAMEWORK, compiled=COMPILED)

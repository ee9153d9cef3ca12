"""Hugging Face's transformers 5 in eager PyTorch: modules of GPT-2, and of Llama and models like it (Qwen3, Mistral).

Operations are those of PyTorch alone. What differs are the modules: how they are put together of operations. Weights
in fp32 are trained under torch.autocast.

github.com/huggingface/transformers 5.17, src/transformers: models/llama/modeling_llama.py,
models/qwen3/modeling_qwen3.py, models/olmo2/modeling_olmo2.py, models/starcoder2/modeling_starcoder2.py,
models/gpt2/modeling_gpt2.py, activations.py, loss/loss_utils.py. Gemma, gpt-oss, Phi-3, windows, attention in steps
and experts have files of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from simulator.frameworks import (
    hugging_face_eager,
    hugging_face_experts,
    hugging_face_gemma,
    hugging_face_gpt_oss,
    hugging_face_phi3,
    hugging_face_windows,
    pytorch,
)
from simulator.frameworks.framework import (
    ActivationKernels,
    JobTraits,
    NormPlace,
    Replication,
    Traffic,
    gradient_of_lookup,
)
from simulator.frameworks.hugging_face_compiled import compiled
from simulator.frameworks.hugging_face_limits import LIMITS
from simulator.frameworks.rotation import rotated
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes

#: ``act_fn(gate_proj(x)) * up_proj(x)``: gate and up are tensors of their own, so that every kernel has vector loads.
GATED = ActivationKernels(
    forward=(Traffic("", "activation", 1, 1), Traffic(" gate", "residual", 2, 1)),
    backward=(
        Traffic(" gate", "residual", 2, 1),
        Traffic(" up", "residual", 2, 1),
        Traffic("", "activation_bwd", 2, 1),
    ),
    kept=("gate",),
)
#: ``gelu(c_fc(x), approximate="tanh")`` of StarCoder 2, which PyTorch has a kernel for, as fast as memory.
GELU_BY_TANGENT = ActivationKernels((Traffic("", "activation", 1, 1),), (Traffic("", "activation_bwd", 2, 1),))
#: ``0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))`` (``NewGELUActivation``), a kernel per operation. Autograd keeps
#: the operands of the power and of the last product, and what the hyperbolic tangent gave.
GELU_NEW = ActivationKernels(
    forward=(
        Traffic(" half", "activation", 1, 1),
        Traffic(" cube", "activation", 1, 1),
        Traffic(" cube scale", "activation", 1, 1),
        Traffic(" add", "residual", 2, 1),
        Traffic(" scale", "activation", 1, 1),
        Traffic(" tanh", "activation", 1, 1),
        Traffic(" plus", "activation", 1, 1),
        Traffic("", "residual", 2, 1),
    ),
    backward=(
        Traffic(" half", "residual", 2, 1),
        Traffic(" plus", "residual", 2, 1),
        Traffic(" tanh", "activation_bwd", 2, 1),
        Traffic(" scale", "activation", 1, 1),
        Traffic(" cube scale", "activation", 1, 1),
        Traffic(" cube square", "activation", 1, 1),
        Traffic(" cube triple", "activation", 1, 1),
        Traffic(" cube", "residual", 2, 1),
        Traffic(" add", "residual", 2, 1),
        Traffic(" half scale", "activation", 1, 1),
        Traffic("", "residual", 2, 1),
    ),
    kept=("half", "tanh", "plus"),
)
#: Gradient of ``q * cos + rotate_half(q) * sin``. Of each half that was cut out, autograd copies the gradient into a
#: tensor of zeros of the whole size. The sum goes back to rows of tokens by a copy.
ROTATION_BACKWARD: tuple[Traffic, ...] = (
    Traffic(" sin", "rope", 1, 1),
    Traffic(" negate", "rope", 0.5, 0.5),
    Traffic(" zero first", "zero", 0, 1),
    Traffic(" first half", "rope", 0.5, 0.5),
    Traffic(" zero second", "zero", 0, 1),
    Traffic(" second half", "rope", 0.5, 0.5),
    Traffic(" halves", "residual", 2, 1),
    Traffic(" cos", "rope", 1, 1),
    Traffic(" add", "rope", 2, 1),
    Traffic(" transpose", "rope", 1, 1),
)

#: Under autocast powers are in fp32, and so is what follows from one: tensors that are twice as wide count twice.
GELU_NEW_IN_FP32 = ActivationKernels(
    forward=(
        Traffic(" half", "activation", 1, 1),
        Traffic(" float", "upcast", 1, 2),
        Traffic(" cube", "activation", 2, 2),
        Traffic(" cube scale", "activation", 2, 2),
        Traffic(" add", "accumulate", 3, 2),
        Traffic(" scale", "activation", 2, 2),
        Traffic(" tanh", "activation", 2, 2),
        Traffic(" plus", "activation", 2, 2),
        Traffic("", "accumulate", 3, 2),
    ),
    backward=(
        Traffic(" plus", "accumulate", 3, 2),
        Traffic(" half", "residual", 4, 2),
        Traffic(" half cast", "cast", 2, 1),
        Traffic(" tanh", "activation_bwd", 4, 2),
        Traffic(" scale", "activation", 2, 2),
        Traffic(" add cast", "cast", 2, 1),
        Traffic(" cube scale", "activation", 2, 2),
        Traffic(" cube square", "activation", 2, 2),
        Traffic(" cube triple", "activation", 2, 2),
        Traffic(" cube", "residual", 4, 2),
        Traffic(" float", "cast", 2, 1),
        Traffic(" add", "residual", 2, 1),
        Traffic(" half scale", "activation", 1, 1),
        Traffic("", "residual", 2, 1),
    ),
    kept=("half",),
    kept_in_fp32=("float", "tanh", "plus"),
    keeps_input=False,
)
#: Classes of kernels without vector loads. Elements bound them and not bytes, so that fp32 counts as 16 bits. A product
#: of 16.8 million elements by a row's number takes an H200 54 us in fp32, and 50 us in bf16.
BY_ELEMENT = ("rope", "bias")
#: Under autocast the tables of positions are in fp32, and so are products by them. Those of queries in 16 bits cast on
#: the way. OLMo 2 keeps its tables in fp32 always.
BY_FP32 = (
    Traffic(" cos", "rope", 1, 2),
    Traffic(" negate", "rope", 0.5, 0.5),
    Traffic(" join", "rope", 1, 1),
    Traffic(" sin", "rope", 1, 2),
    Traffic(" add", "accumulate", 4, 2),
    Traffic(" cast", "cast", 2, 1),
)
BY_FP32_BACKWARD = (
    Traffic(" float", "upcast", 1, 2),
    Traffic(" sin", "rope", 1, 1),
    Traffic(" sin cast", "cast", 2, 1),
    *ROTATION_BACKWARD[1:7],
    Traffic(" cos", "rope", 1, 1),
    Traffic(" cos cast", "cast", 2, 1),
    *ROTATION_BACKWARD[8:],
)


def _in_fp32(table: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return kernels of 16 bits as those of fp32."""
    return tuple(
        kernel if kernel.op in BY_ELEMENT else kernel._replace(read=2 * kernel.read, written=2 * kernel.written)
        for kernel in table
    )


def _by_elements(table: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return kernels of 16 bits as those of fp32. What elements bound takes as long at any width: half its bytes."""
    return tuple(
        kernel._replace(read=0.5 * kernel.read, written=0.5 * kernel.written) if kernel.op in BY_ELEMENT else kernel
        for kernel in table
    )


#: Heads that are normed come in fp32, so that all of it is.
ROTATION_IN_FP32 = (*_in_fp32(pytorch.ROTATION), Traffic(" cast", "cast", 2, 1))
ROTATION_IN_FP32_BACKWARD = (
    Traffic(" float", "upcast", 1, 2),
    *_in_fp32(ROTATION_BACKWARD[:-1]),
    ROTATION_BACKWARD[-1],
)

#: Kernels that tell whether sequences are packed (masking_utils.py, ``find_packed_sequence_indices``), on positions in
#: int64. The host reads the answer of the last one.
PACKED = ("positions", "shift", "first", "join", "difference", "unlike", "sum", "last", "all")
#: Kernels of the tables of rotary positions in fp32 (``LlamaRotaryEmbedding.forward``), once for all layers.
TABLES = ("float", "angles", "join", "cos", "sin", "cos scale", "sin scale", "cos cast", "sin cast")


def before_layers(shapes: Shapes) -> Node:
    """Return what all layers share: the look for packed sequences, for which the host waits, masks, and positions."""
    positions, table = 8.0 * shapes.tokens, 4.0 * shapes.seq * shapes.head_dim
    look = [memory("F", f"positions.{name}", "copy", positions, positions, shapes.dtype) for name in PACKED]
    look[-1] = replace(look[-1], host_waits=True)
    tables = TABLES if shapes.position == "rope" else ()
    rotary = (memory("F", f"rotary.{name}", "copy", table, table, shapes.dtype) for name in tables)
    scaled = hugging_face_gemma.scaled_words(shapes, "F") if hugging_face_gemma.is_gemma(shapes) else ()
    return Node(forward=(*scaled, *look, *_masks(shapes), *rotary))


def _masks(shapes: Shapes) -> Ops:
    """Return the kernels that make masks for all layers. Fused attention needs none but for windows."""
    if shapes.attention != "flash":
        return hugging_face_eager.masks(shapes)
    return hugging_face_windows.mask(shapes) if hugging_face_windows.is_masked(shapes) else ()


def activation(shapes: Shapes) -> ActivationKernels:
    """Return SiLU with a gate, Gemma's GELU with one, StarCoder 2's GELU, or GPT-2's, both by a tangent."""
    if hugging_face_gemma.is_gemma(shapes):
        return hugging_face_gemma.GATED
    if shapes.gated:
        return hugging_face_phi3.GATED_BY_HALVES if hugging_face_phi3.is_phi3(shapes) else GATED
    if shapes.position == "rope":
        return GELU_BY_TANGENT
    return GELU_NEW_IN_FP32 if shapes.autocast else GELU_NEW


def is_olmo2(shapes: Shapes) -> bool:
    """Return True for OLMo 2, which norms on the outputs of blocks alone mean."""
    return shapes.norm_place == "after"


def positions(shapes: Shapes) -> Node:
    """Return queries and keys turned by their positions."""
    forward, backward = pytorch.ROTATION, ROTATION_BACKWARD
    if hugging_face_gpt_oss.is_gpt_oss(shapes):
        return rotated(shapes, hugging_face_gpt_oss.ROTATION, hugging_face_gpt_oss.ROTATION_BACKWARD)
    if shapes.dtype == "fp32":
        forward, backward = (_by_elements(table) for table in (forward, backward))
    if is_olmo2(shapes):
        forward, backward = BY_FP32, BY_FP32_BACKWARD
    if shapes.autocast:
        forward = ROTATION_IN_FP32 if shapes.qk_norm else BY_FP32
        backward = ROTATION_IN_FP32_BACKWARD if shapes.qk_norm else BY_FP32_BACKWARD
    if hugging_face_phi3.is_phi3(shapes):
        return hugging_face_phi3.positions(shapes, forward, backward)
    return rotated(shapes, forward, backward)


def residual(shapes: Shapes, block: str) -> Node:
    """Return dropout, and the sum with a block's input, which is in fp32 under autocast."""
    node = pytorch.residual(shapes, block)
    if not shapes.autocast:
        return node
    narrow = float(shapes.element * shapes.rows * shapes.hidden)
    add = memory("F", f"{block}.residual", "accumulate", shapes.row_bytes + narrow, shapes.row_bytes, shapes.dtype)
    back = memory("B", f"{block}.residual grad cast", "cast", shapes.row_bytes, narrow, shapes.dtype)
    return replace(node, forward=(*node.forward[:-1], add), input_grad=(back, *node.input_grad))


def rms_norm_by_operations(shapes: Shapes, place: NormPlace) -> Node:
    """Return RMSNorm operation by operation. Under autocast the weight is in fp32, and so is what it multiplies.

    Sums of blocks are in fp32 already, so that nothing is cast, and autograd keeps the norm's input itself. Heads come
    from products in the working precision, to which the quotient is cast back. In fp32 nothing is cast anywhere.
    """
    if hugging_face_gemma.is_gemma(shapes):
        return hugging_face_gemma.rms_norm(shapes, place)
    if hugging_face_gpt_oss.is_gpt_oss(shapes) or is_olmo2(shapes):
        return hugging_face_gpt_oss.rms_norm(shapes, place)
    if not shapes.autocast and shapes.dtype != "fp32":
        return pytorch.rms_norm_by_operations(shapes, place)
    name, wide, narrow = place.name, shapes.row_bytes, float(shapes.element * shapes.rows * shapes.hidden)
    casts = place.per_head and shapes.dtype != "fp32"
    divided = narrow if place.per_head else wide

    def kernel(phase: str, label: str, op: str, read: float, written: float) -> Ops:
        return (memory(phase, f"{name}.{label}{' bwd' if phase == 'B' else ''}", op, read, written, shapes.dtype),)

    def kernels(phase: str, table: Iterable[tuple[str, str, int, int, int, int]]) -> Ops:
        ops: Ops = ()
        for label, op, *tensors in table:
            if label == "weight":
                mixed = casts and phase == "F"
                ops += kernel(phase, label, op, narrow, wide if mixed else narrow)
                if phase == "B" and casts:
                    ops += kernel(phase, "weight cast", "cast", wide, narrow)
            elif casts or label not in ("float", "cast"):
                ops += kernel(phase, label, op, *(wide * tensors[at] + narrow * tensors[at + 1] for at in (0, 2)))
        return ops

    return Node(
        forward=kernels("F", pytorch.RMS_NORM_FORWARD),
        input_grad=kernels("B", pytorch.RMS_NORM_BACKWARD),
        weight_grad=(
            memory("W", f"{name}.weight wgrad", "residual", wide + divided, wide, shapes.dtype),
            memory(
                "W",
                f"{name}.weight wgrad sum",
                "reduce",
                wide,
                shapes.weight_element * shapes.hidden,
                shapes.dtype,
                shapes.hidden,
            ),
        ),
        saved=(Tensor(f"{name}.float", wide), Tensor(f"{name}.divided", divided)),
        saved_for_weights=(Tensor(f"{name}.divided", divided),),
        grad_bytes=3 * wide,
        output_grad_bytes=wide,
    )


def lookup_gradient(shapes: Shapes, table: int, tied: bool) -> Ops:
    """Return the gradient of a table, and its sum with the head's where that is the same weight."""
    nbytes = float(shapes.weight_element * table)
    add = memory("W", "embedding.lookup tied grad", "residual", 2 * nbytes, nbytes, shapes.dtype)
    scaled = hugging_face_gemma.scaled_words(shapes, "W") if hugging_face_gemma.is_gemma(shapes) else ()
    return (*scaled, *gradient_of_lookup(shapes, table, tied), *((add,) if tied else ()))


def autocasts(job: JobTraits) -> bool:
    """Return True for weights in fp32 that are not sharded: those that fully_shard gathers it casts itself."""
    return job.master_weights and job.zero == 0


def replication(job: JobTraits) -> Replication:
    """Return how PyTorch keeps and shares gradients, which under autocast have the weights' type."""
    if not autocasts(job):
        return pytorch.replication(job)
    return replace(pytorch.replication(replace(job, precision="fp32")), weights_are_masters=True)


def before_attention(shapes: Shapes) -> Node:
    """Return the kernels around fused attention: those of a window, and those of Phi-3's heads."""
    node = hugging_face_windows.before_attention(shapes)
    if not hugging_face_phi3.is_phi3(shapes):
        return node
    copied = hugging_face_phi3.before_attention(shapes)
    return replace(node, forward=(*node.forward, *copied.forward), saved=(*node.saved, *copied.saved))


def joined_qkv_width(shapes: Shapes) -> int:
    """Return the width of gradients that GPT-2 copies side by side; those of Phi-3 come with positions."""
    return 0 if hugging_face_phi3.is_phi3(shapes) else pytorch.joined_qkv_width(shapes)


def joins_projections(position: str) -> bool:
    """Return True for GPT-2, which learned positions mean; Llama's modules have a product each."""
    return position == "learned"


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults: weights, gradients and AdamW's states of the working precision, and PyTorch's fused AdamW.

    The fused one is the default of ``TrainingArguments.optim``. States have the type of what it updates. Of several
    micro-batches of a sharded model ``Trainer`` reduces the last one's gradients alone, unless
    ``accelerator_config.gradient_accumulation_kwargs.sync_each_batch`` is true.
    """
    return {
        **job.threads_of_torchrun,
        "model.vocab_multiple": 1,
        "training.grad_dtype": "fp32" if autocasts(job) else job.precision,
        "training.optimizer.state_dtype": "fp32" if job.master_weights else job.precision,
        "training.optimizer.implementation": "fused",
        "training.fused_rms_norm": job.norm != "rmsnorm",
        **({"model.moe.router_dtype": job.precision} if job.experts else {}),
        **({"parallelism.sync_each_micro_batch": False} if job.zero == 3 else {}),
    }


EAGER = replace(
    pytorch.FRAMEWORK,
    name="hugging_face",
    launch_section="hugging_face",
    memory_sections=("eager", "transformers"),
    about="Hugging Face's transformers 5, eager or under torch.compile: GPT-2, Llama, Qwen3, Mixtral and their like",
    defaults=defaults,
    losses=("eager", "fused_linear"),
    limits=LIMITS,
    master_weights=False,
    habits=replace(pytorch.FRAMEWORK.habits, begins_sharded=True),
    joins_projections=joins_projections,
    joined_qkv_width=joined_qkv_width,
    before_layers=before_layers,
    masks_by_bias=hugging_face_windows.is_masked,
    before_attention=before_attention,
    falls_back_to_steps=hugging_face_eager.falls_back,
    copies_heads_by_element=True,
    caps_by_operations=True,
    forms_in_steps=("attention_sinks", "attention_softcap"),
    # integrations/sdpa_attention.py does not pass ``softcap`` on
    caps_in_fused_kernel=False,
    softmax=hugging_face_eager.softmax,
    activation=activation,
    positions=positions,
    residual=residual,
    rms_norm_by_operations=rms_norm_by_operations,
    lookup_gradient=lookup_gradient,
    autocasts=autocasts,
    replication=replication,
    experts=hugging_face_experts.EXPERTS,
    before=(),
    compiled=None,
)
FRAMEWORK = replace(EAGER, compiled=compiled(EAGER))

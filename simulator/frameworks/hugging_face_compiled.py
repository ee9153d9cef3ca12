"""Hugging Face's transformers 5 under torch.compile: kernels that Inductor makes of their modules.

As counted in the code that Inductor writes (``TORCH_LOGS=output_code``, torch 2.11) for GPT-2, Llama and Qwen3.

While a model is compiled, transformers does not drop the causal mask (src/transformers/masking_utils.py,
``_ignore_causal_mask_sdpa``), so that attention is not the causal kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import fused_kernels
from simulator.frameworks.framework import ActivationKernels, Framework, JobTraits, NormPlace, Traffic, never, nothing
from simulator.frameworks.limits import Limit
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, Memory, StepPhase
from simulator.units import FP32_BYTES

#: Blocks among which a kernel of both gradients of a norm spreads the rows; each leaves a sum for the weight.
BLOCKS = 512
#: Most columns of a row that a kernel keeps in registers (torch/_inductor/choices.py, ``should_use_persistent``).
PERSISTENT = 1024
#: Where one kernel makes both gradients of a norm (torch/_inductor/scheduler.py, ``MixOrderReduction.can_fuse``): at
#: least so many elements and rows, and so many times as many rows as columns.
LEAST_ELEMENTS, LEAST_ROWS, LEAST_ROWS_PER_COLUMN = 5 * 2**20, 4096, 2
#: Gradients of heads that one kernel adds up and turns; of more the sum is written first
#: (``config.realize_reads_threshold``).
MOST_HEADS = 3
#: Sines and cosines that turning one element takes: those of its own place forward. Backward the sine of its partner's
#: place is worked out for each half apart.
TURN, TURN_BACK = 2, 3
#: ``gelu_new`` in one kernel each way.
GELU_NEW = ActivationKernels((Traffic("", "gelu", 1, 1),), (Traffic("", "gelu_bwd", 2, 1),))


def activation(shapes: Shapes) -> ActivationKernels:
    """Return a kernel each way."""
    return fused_kernels.activation(shapes) if shapes.gated else GELU_NEW


def norm(shapes: Shapes, place: NormPlace) -> Node:
    """Return a norm in one kernel with the sum before it, and backward with the sums behind it.

    Forward the kernel reads both operands of the sum and writes the sum, and what it gives; it drops on the way.
    Backward it reads the gradients that all readers give, and the one that goes round the block.
    """
    op = "norm" if shapes.norm == "layernorm" else "rms_norm"
    weights = 2 if shapes.norm == "layernorm" else 1
    dropped = place.residual and shapes.dropout > 0
    mask = float(shapes.rows * shapes.hidden) if dropped else 0.0
    narrow = float(shapes.element * shapes.rows * shapes.hidden)  # what blocks give, and products read
    stream = narrow if place.per_head else shapes.row_bytes
    if place.per_head:
        forward = memory("F", place.name, op, narrow, 0, shapes.dtype, shapes.hidden)
    else:
        forward = memory("F", place.name, op, stream + narrow, stream + narrow + mask, shapes.dtype, shapes.hidden)
    if dropped:
        forward = _dropping(shapes, forward)
    read = place.readers * narrow + (1 + place.residual) * stream + mask
    together = _one_kernel_for_both(shapes)
    written = stream + dropped * narrow + (float(FP32_BYTES * BLOCKS * shapes.hidden * weights) if together else 0.0)
    backward: Ops = (memory("B", f"{place.name} bwd", f"{op}_bwd", read, written, shapes.dtype, shapes.hidden),)
    return Node(
        forward=(forward,),
        # The rotation of queries norms them on its way back.
        input_grad=() if place.per_head and place.name.endswith("q_norm") else backward,
        weight_grad=_sums_over_blocks(shapes, place, weights) if together else _sums_over_rows(shapes, place, op),
        saved=(Tensor(place.saved, stream),),
        grad_bytes=place.readers * narrow + stream,
        output_grad_bytes=narrow,
    )


def _dropping(shapes: Shapes, kernel: Compute) -> Compute:
    """Return a norm's kernel as one that drops, which the making of random numbers bounds.

    A row of few columns is padded to a power of two. One of more columns is gone through twice, random numbers and all.
    """
    columns = 2 ** math.ceil(math.log2(shapes.hidden)) if shapes.hidden <= PERSISTENT else 2 * shapes.hidden
    assert isinstance(kernel.kernel, Memory)
    return replace(kernel, kernel=replace(kernel.kernel, op="dropout", elements=float(shapes.rows * columns)))


def _one_kernel_for_both(shapes: Shapes) -> bool:
    """Return True where the gradients of a norm's input and weight come from one kernel."""
    large = shapes.rows * shapes.hidden >= LEAST_ELEMENTS and shapes.rows >= LEAST_ROWS
    return large and shapes.rows >= LEAST_ROWS_PER_COLUMN * shapes.hidden


def _sums_over_blocks(shapes: Shapes, place: NormPlace, weights: int) -> Ops:
    """Return the sum over blocks for each weight, and its cast."""
    sums = memory(
        "W",
        f"{place.name} wgrad sum",
        "combine",
        FP32_BYTES * BLOCKS * shapes.hidden,
        FP32_BYTES * shapes.hidden,
        "fp32",
        shapes.hidden,
    )
    cast = memory(
        "W",
        f"{place.name} wgrad cast",
        "cast",
        FP32_BYTES * shapes.hidden,
        shapes.element * shapes.hidden,
        shapes.dtype,
    )
    return (*(sums,) * weights, *(() if shapes.autocast else (cast,) * weights))


def _sums_over_rows(shapes: Shapes, place: NormPlace, op: str) -> Ops:
    """Return the kernels that read gradients and input again for the weight."""
    narrow = float(shapes.element * shapes.rows * shapes.hidden)
    stream = narrow if place.per_head else shapes.row_bytes
    read, blocks = place.readers * narrow + stream, float(FP32_BYTES * BLOCKS * shapes.hidden)
    return (
        memory("W", f"{place.name} wgrad", f"{op}_bwd", read, blocks, shapes.dtype, shapes.hidden),
        memory(
            "W",
            f"{place.name} wgrad sum",
            f"{op}_bwd",
            blocks,
            shapes.weight_element * shapes.hidden,
            shapes.dtype,
            shapes.hidden,
        ),
    )


def residual(shapes: Shapes, block: str) -> Node:
    """Return the sum with a block's input, which is part of the norm behind it, with the mask of what is dropped.

    The sum at the end of a layer belongs to the next layer's norm. Here it counts with the layer's own, as layers are
    alike. Under autocast the gradient of what a block gives is cast, on the way of what was dropped where that is.
    """
    elements = float(shapes.rows * shapes.hidden)
    mask = (Tensor(f"{block}.dropout mask", elements),) if shapes.dropout else ()
    cast = memory("B", f"{block}.residual grad cast", "cast", shapes.row_bytes, shapes.element * elements, shapes.dtype)
    return Node(
        input_grad=(cast,) if shapes.autocast and not shapes.dropout else (), saved=mask, grad_bytes=shapes.row_bytes
    )


def positions(shapes: Shapes) -> Node:
    """Return queries and keys with positions, and keys and values repeated for every head.

    Each kernel works out sines and cosines for all of its elements. Normed keys are turned before they are repeated.
    """
    q, k, context = (float(shapes.tokens * width) for width in (shapes.q_width, shapes.kv_width, shapes.context_width))
    shared = shapes.kv_heads < shapes.heads
    forward = [_turning(shapes, "F", "q", q, q, TURN * q)]
    if shapes.qk_norm and shared:
        forward += [_turning(shapes, "F", "k", k, k, TURN * k), _turning(shapes, "F", "k repeat", k, q, q)]
    else:
        forward.append(_turning(shapes, "F", "k", k, q, TURN * q))
    input_grad = [_turning(shapes, "B", "q", 2 * q if shapes.qk_norm else q, q, TURN_BACK * q)]
    if shapes.heads // shapes.kv_heads > MOST_HEADS:
        input_grad += [_turning(shapes, "B", "k sin", q, k, k), _turning(shapes, "B", "k", q + k, k, 2 * k)]
    else:
        input_grad.append(_turning(shapes, "B", "k", q, k, TURN_BACK * k))
    if shared:
        v, wide = shapes.element * k, shapes.element * context
        forward.append(memory("F", "attn.repeat v", "copy", v, wide, shapes.dtype))
        input_grad.append(memory("B", "attn.repeat v bwd", "copy", wide, v, shapes.dtype))
    return Node(
        forward=tuple(forward), input_grad=tuple(input_grad), grad_bytes=shapes.element * (2 * q + context + 2 * k)
    )


def _turning(shapes: Shapes, phase: str, name: str, read: float, written: float, angles: float) -> Compute:
    """Return a kernel that reads and writes so many elements, and works out sines or cosines of so many angles."""
    kernel = Memory("rope", shapes.element * read, shapes.element * written, dtype=shapes.dtype, elements=angles)
    return Compute(f"attn.rope {name}{' bwd' if phase == 'B' else ''}", kernel, StepPhase(phase))


def before_layers(shapes: Shapes) -> Node:
    """Return the mask of attention, written once for all layers, where whole sequences are packed as one."""
    mask = float(shapes.element * shapes.batch * shapes.seq * shapes.seq)
    look = memory("F", "positions", "copy", 0, 8.0 * shapes.tokens, shapes.dtype)
    return Node(forward=(look, memory("F", "mask", "mask", 0, mask, shapes.dtype)), saved=(Tensor("mask", mask),))


def lookup_gradient(shapes: Shapes, table: int, tied: bool) -> Ops:
    """Return the gradient of a table, which is added up in fp32, and cast to the type of the table.

    Where the head's weight is the same its product adds to a copy of it; under autocast that gradient is added.
    """
    rows, wide, narrow = float(shapes.tokens * shapes.hidden), float(FP32_BYTES * table), float(shapes.element * table)
    kernels = (
        memory("W", "embedding.lookup zero grad", "zero", 0, wide, "fp32"),
        memory(
            "W",
            "embedding.lookup wgrad",
            "accumulate",
            (shapes.element + FP32_BYTES) * rows,
            FP32_BYTES * rows,
            shapes.dtype,
        ),
    )
    if shapes.autocast:
        add = memory("W", "embedding.lookup tied grad", "residual", wide + narrow, wide, shapes.dtype)
        return (*kernels, *((add,) if tied else ()))
    cast = memory("W", "embedding.lookup grad cast", "cast", wide, narrow, shapes.dtype)
    copy = memory("W", "embedding.lookup grad copy", "copy", narrow, narrow, shapes.dtype)
    return (*kernels, cast, *((copy,) if tied else ()))


def joined_qkv_width(shapes: Shapes) -> int:
    """Return the width of all three gradients of GPT-2's one product; Llama's modules have a product each."""
    return shapes.q_width + 2 * shapes.kv_width


def returns_logits(position: str) -> bool:
    """Return False for GPT-2, which learned positions mean: its loss is compiled apart."""
    return position != "learned"


def compiled(eager: Framework) -> Framework:
    """Return the stack ``eager`` under torch.compile."""

    def defaults(job: JobTraits) -> Mapping[str, object]:
        loss = {"training.loss.name": "compiled", "training.loss.compile": True}
        return {**eager.defaults(job), **loss, "training.fused_rms_norm": True}

    return replace(
        eager,
        launch_section="compiled_model",
        memory_sections=("eager", "fused", "inductor"),
        compiles=True,
        defaults=defaults,
        losses=("compiled",),
        limits=(
            *eager.limits,
            Limit("model.moe", (None,), "experts of compiled models are not simulated"),
            Limit("model.activation", ("gelu", "swiglu"), "Gemma, which GeGLU means, is not simulated compiled"),
            Limit("training.adapters", (None,), "adapters of compiled models are not simulated"),
            Limit("model.attention", ("flash",), "attention in steps is not simulated compiled"),
            Limit("training.precision", ("bf16", "fp16"), "fp32 is not simulated compiled"),
        ),
        activation=activation,
        rotation=fused_kernels.ROTATION,
        joined_qkv_width=joined_qkv_width,
        residual=residual,
        norm=norm,
        positions=positions,
        before_layers=before_layers,
        lookup_gradient=lookup_gradient,
        masks_by_bias=lambda shapes: True,
        before_attention=nothing,
        falls_back_to_steps=never,
        caps_by_operations=False,
        fuses_pointwise=True,
        returns_logits=returns_logits,
        online_softmax=True,
        rms_norm_by_operations=None,
        adapter_kinds=("lora",),
        pads_products=True,
    )

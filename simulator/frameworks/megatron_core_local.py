"""Megatron-Core with its local modules: PyTorch's kernels, without Transformer Engine and Apex.

github.com/NVIDIA/Megatron-LM, core_v0.19, megatron/core: models/gpt/gpt_layer_specs.py (``get_gpt_layer_local_spec``),
transformer/dot_product_attention.py, fusions/fused_softmax.py, fusions/fused_bias_gelu.py, fused_bias_swiglu.py,
fused_bias_dropout.py, tensor_parallel/layers.py, optimizer/clip_grads.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import megatron_core, megatron_experts
from simulator.frameworks.framework import ActivationKernels, JobTraits, Traffic
from simulator.frameworks.limits import Limit, plain_layers
from simulator.frameworks.megatron_rotation import ROTATION
from simulator.operations.dropout import dropout
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.units import FP32_BYTES

#: SiLU with a gate by Inductor. Backward joins both gradients in one kernel. Each half of it reads what it needs: the
#: gradient, gate and up for one, the gradient and gate for the other.
GATED = ActivationKernels((Traffic("", "activation", 2, 1),), (Traffic("", "activation_bwd", 5, 2),))
#: GELU by a tangent, and the bias before it, by Inductor. The tangent is taken to cost what the error function does.
GELU = ActivationKernels((Traffic("", "gelu", 1, 1),), (Traffic("", "gelu_bwd", 2, 1),))

LIMITS = (
    *plain_layers("local modules"),
    Limit("model.attention", ("unfused",), "local modules have no fused attention"),
    Limit("model.activation", ("swiglu", "gelu"), "others have no fused kernel in local modules"),
    Limit("parallelism.dispatcher", ("all_to_all",), "of dispatchers the all-to-all alone was looked at"),
    Limit("parallelism.overlap.expert_all_to_all", (False,), "hidden all-to-alls need Transformer Engine"),
    Limit("parallelism.overlap.ep", (False,), "shared experts beside all-to-alls were not looked at"),
    Limit("model.mla", (None,), "latent attention as local modules run it is not simulated"),
    Limit("parallelism.cp", (1,), "context parallelism of Megatron-Core needs Transformer Engine"),
    Limit("parallelism.zero", (0, 1), "the distributed optimizer is ZeRO 1"),
)


def activation(shapes: Shapes) -> ActivationKernels:
    """Return a kernel each way, made by torch.compile (``jit_fuser``)."""
    return GATED if shapes.gated else GELU


def activation_of_experts(shapes: Shapes) -> ActivationKernels:
    """Return Inductor's kernels of experts, weighted: that of the weights' gradients is one more."""
    plain = activation(shapes)
    weights = Traffic(" weights", "activation_bwd", 3 if shapes.gated else 2, 0)
    return replace(plain, backward=(*plain.backward, weights))


def softmax(shapes: Shapes, elements: int) -> tuple[Node, Node]:
    """Return the softmax in fp32 (``forward_torch_softmax``), and dropout.

    Scores are cast to fp32, filled under the mask in place, and the probabilities are cast back. The fill has no vector
    loads. The gradient goes the same way back; its fill makes a copy. The softmax keeps the probabilities in fp32.
    While the forward pass runs there are the scores in both types. At its fullest the backward pass has three tensors
    in fp32 beside them. Scores are the sum of a product and a buffer that stays and counts for nothing (``baddbmm``
    with ``beta`` 0).
    """
    square, wide = float(shapes.element * elements), float(FP32_BYTES * elements)
    probs = Node(
        forward=(
            memory("F", "attn.upcast", "upcast", square, wide, shapes.dtype),
            memory("F", "attn.mask", "strided", wide, wide, "fp32"),
            memory("F", "attn.softmax", "softmax", wide, wide, "fp32", shapes.seq),
            memory("F", "attn.cast", "cast", wide, square, shapes.dtype),
        ),
        input_grad=(
            memory("B", "attn.cast bwd", "upcast", square, wide, shapes.dtype),
            memory("B", "attn.softmax bwd", "softmax_bwd", 2 * wide, wide, "fp32", shapes.seq),
            memory("B", "attn.mask bwd", "mask", wide, wide, "fp32"),
            memory("B", "attn.upcast bwd", "cast", wide, square, shapes.dtype),
        ),
        saved=(Tensor("attn.probs fp32", wide), Tensor("attn.probs", square)),
        forward_bytes=square + wide,
        grad_bytes=3 * wide,
        placeholders=(Tensor(f"attention scores {elements}", square),),
    )
    drop = dropout(shapes, "attn.probs dropout", elements, mask="attn.probs mask") if shapes.dropout else Node()
    return probs, drop


def joined_qkv_width(shapes: Shapes) -> int:
    """Return the width of all three gradients: ``torch.split`` of heads has a join as its gradient."""
    return shapes.q_width + 2 * shapes.kv_width


def joined_qkv_kernel(shapes: Shapes) -> str:
    """Return a plain copy where rotations have put heads in order, else one of transposed products."""
    return "copy" if shapes.position == "rope" else "transposed"


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults: attention by operations, gradients added by kernels of their own, AdamW of PyTorch.

    Stages wait for what they send and receive (model_parallel_config.py, ``overlap_p2p_comm``).
    """
    waiting: dict[str, object] = {"parallelism.overlap.p2p": False} if job.stages > 1 else {}
    permutes: dict[str, object] = {"training.fused_permutation": False} if job.experts else {}
    return {
        **permutes,
        "model.attention": "unfused",
        **megatron_core.buckets(job),
        "training.loss.name": "vocab_parallel",
        "training.optimizer.implementation": "foreach",
        **waiting,
        **job.threads_of_torchrun,
    }


FRAMEWORK = replace(
    megatron_core.FRAMEWORK,
    name="megatron_core_local",
    about="Megatron-Core with its local modules, without Transformer Engine and Apex",
    memory_sections=("eager", "local_modules"),
    defaults=defaults,
    limits=LIMITS,
    losses=("vocab_parallel", "eager"),
    adds_in_products=False,
    activation=activation,
    rotation=ROTATION,
    joined_qkv_width=joined_qkv_width,
    joined_qkv_kernel=joined_qkv_kernel,
    softmax=softmax,
    experts=replace(megatron_experts.EXPERTS, activation=activation_of_experts, biased=None),
    by_operations=(),
    by_row="strided",
    adds_qkv_bias=True,
    updates_by_tensor=True,
)

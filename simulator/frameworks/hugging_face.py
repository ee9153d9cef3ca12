"""Hugging Face's transformers 5 in eager PyTorch: modules of GPT-2, and of Llama and models like it (Qwen3, Mistral).

Operations are those of PyTorch alone. What differs are the modules: how they are put together of operations.

github.com/huggingface/transformers 5.17, src/transformers: models/llama/modeling_llama.py,
models/qwen3/modeling_qwen3.py, models/gpt2/modeling_gpt2.py, activations.py, loss/loss_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import pytorch
from simulator.frameworks.framework import ActivationKernels, JobTraits, Limit, Traffic
from simulator.frameworks.hugging_face_compiled import compiled
from simulator.operations.nodes import Node, memory
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
ROTATION_BACKWARD = (
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

_LEARNED: Mapping[str, object] = {"model.position": "learned"}
_ROTARY: Mapping[str, object] = {"model.position": "rope"}
LIMITS = (
    Limit("parallelism.tp", (1,), "tensor parallelism of Hugging Face's models (by DTensor) is not simulated"),
    Limit("parallelism.pp", (1,), "pipelines of Hugging Face's models are not simulated"),
    Limit("parallelism.cp", (1,), "context parallelism of Hugging Face's models is not simulated"),
    Limit("parallelism.zero", (0, 3), "replicas are torch's DistributedDataParallel (0) or fully_shard (3)"),
    Limit("model.moe", (None,), "experts as transformers 5 runs them are not simulated"),
    Limit("model.mla", (None,), "latent attention as transformers 5 runs it is not simulated"),
    Limit("model.mtp_layers", (0,), "Hugging Face's models do not train a prediction of several tokens"),
    Limit("model.attention", ("flash",), "attention is scaled_dot_product_attention; the eager one is not simulated"),
    Limit("model.position", ("rope", "learned"), "its models are Llama's kind (rope) or GPT-2 (learned)"),
    Limit("model.norm", ("layernorm",), "GPT-2, which learned positions mean, has LayerNorm", _LEARNED),
    Limit("model.activation", ("gelu",), "GPT-2, which learned positions mean, has gelu_new", _LEARNED),
    Limit("model.qk_norm", (False,), "GPT-2, which learned positions mean, has no norms of heads", _LEARNED),
    Limit("model.norm", ("rmsnorm",), "models of Llama's kind, which rope means, have RMSNorm", _ROTARY),
    Limit("model.activation", ("swiglu",), "models of Llama's kind, which rope means, have SiLU with a gate", _ROTARY),
    Limit("model.dropout", (0.0,), "models of Llama's kind, which rope means, have no dropout", _ROTARY),
    Limit("training.precision", ("bf16", "fp16"), "norms that need no casts to fp32 are not simulated"),
    Limit("training.recompute.granularity", ("none", "full"), "gradient checkpointing is that of whole layers"),
    Limit(
        "training.optimizer.master_weights",
        (False,),
        "weights in fp32 under torch.autocast are not simulated, only those that fully_shard casts",
        {"parallelism.zero": 0},
    ),
)


#: Kernels that tell whether sequences are packed (masking_utils.py, ``find_packed_sequence_indices``), on positions in
#: int64. The host reads the answer of the last one.
PACKED = ("positions", "shift", "first", "join", "difference", "unlike", "sum", "last", "all")
#: Kernels of the tables of rotary positions in fp32 (``LlamaRotaryEmbedding.forward``), once for all layers.
TABLES = ("float", "angles", "join", "cos", "sin", "cos scale", "sin scale", "cos cast", "sin cast")


def before_layers(z: Shapes) -> Node:
    """Return the look for packed sequences, for which the host waits, and the tables of rotary positions."""
    positions, table = 8.0 * z.tokens, 4.0 * z.seq * z.head_dim
    look = [memory("F", f"positions.{name}", "copy", positions, positions, z.dtype) for name in PACKED]
    look[-1] = replace(look[-1], host_waits=True)
    tables = TABLES if z.position == "rope" else ()
    made = (memory("F", f"rotary.{name}", "copy", table, table, z.dtype) for name in tables)
    return Node(forward=(*look, *made))


def activation(z: Shapes) -> ActivationKernels:
    """Return SiLU with a gate, or GPT-2's GELU by a tangent."""
    return GATED if z.gated else GELU_NEW


def joins_projections(position: str) -> bool:
    """Return True for GPT-2, which learned positions mean; Llama's modules have a product each."""
    return position == "learned"


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults: weights, gradients and AdamW's states of the working precision, and PyTorch's fused AdamW.

    The fused one is the default of ``TrainingArguments.optim``. States have the type of what it updates.
    """
    return {
        **job.threads_of_torchrun,
        "model.vocab_multiple": 1,
        "training.grad_dtype": job.precision,
        "training.optimizer.state_dtype": "fp32" if job.master_weights else job.precision,
        "training.optimizer.implementation": "fused",
        "training.fused_rms_norm": job.norm != "rmsnorm",
    }


EAGER = replace(
    pytorch.FRAMEWORK,
    name="hugging_face",
    about="Hugging Face's transformers 5 in eager PyTorch: models like GPT-2, Llama and Qwen3",
    defaults=defaults,
    losses=("eager", "fused_linear"),
    limits=LIMITS,
    master_weights=False,
    joins_projections=joins_projections,
    before_layers=before_layers,
    activation=activation,
    rotation_backward=ROTATION_BACKWARD,
    before=(),
    compiled=None,
)
FRAMEWORK = replace(EAGER, compiled=compiled(EAGER))

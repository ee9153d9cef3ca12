"""torchtitan's Llama 3: modules of Meta's Llama on PyTorch, sharded by ``fully_shard``, split by DTensor.

github.com/pytorch/torchtitan 0.2.1: models/llama3/model/model.py, models/attention.py, components/loss.py, train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import hugging_face, pytorch
from simulator.frameworks.framework import JobTraits, Limit, Traffic

#: Queries, or keys, become fp32, are multiplied as complex numbers, and are cast back (``apply_rotary_emb``).
ROTATION = (
    Traffic(" float", "upcast", 1, 2),
    Traffic(" complex", "rope", 2, 2),
    Traffic(" cast", "cast", 2, 1),
)
LIMITS = (
    Limit("model.moe", (None,), "experts as torchtitan runs them are not simulated"),
    Limit("model.mla", (None,), "latent attention as torchtitan runs it is not simulated"),
    Limit("model.position", ("rope",), "its Llama 3 has rope"),
    Limit("model.norm", ("rmsnorm",), "its Llama 3 has RMSNorm"),
    Limit("model.activation", ("swiglu",), "its Llama 3 has SiLU with a gate"),
    Limit("parallelism.zero", (0, 3), "replicas are fully_shard (3), or torch's DistributedDataParallel (0)"),
)


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of torchtitan's job configuration: AdamW is PyTorch's fused one."""
    return {
        **pytorch.defaults(job),
        "model.vocab_multiple": 1,
        "training.optimizer.implementation": "fused",
    }


def never(position: str) -> bool:
    """Return False: queries, keys and values have a product each, and so have gate and up."""
    return False


FRAMEWORK = replace(
    pytorch.FRAMEWORK,
    name="torchtitan",
    about="torchtitan's Llama 3 on PyTorch, or under torch.compile",
    defaults=defaults,
    limits=LIMITS,
    joins_projections=never,
    activation=hugging_face.activation,
    rotation=ROTATION,
    rotation_backward=ROTATION,
)
FRAMEWORK = replace(
    FRAMEWORK,
    compiled=replace(
        pytorch.COMPILED, name="torchtitan", limits=LIMITS, joins_projections=never, defaults=defaults, compiled=None
    ),
)

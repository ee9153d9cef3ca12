"""Megatron-Core with its local modules: PyTorch's kernels, without Transformer Engine and Apex.

github.com/NVIDIA/Megatron-LM, core_v0.19: models/gpt/gpt_layer_specs.py (``get_gpt_layer_local_spec``),
transformer/dot_product_attention.py, fusions/fused_softmax.py, distributed/distributed_data_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import megatron_core
from simulator.frameworks.framework import JobTraits, Limit

LIMITS = (Limit("model.attention", ("unfused",), "local modules have no fused attention"),)


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults: attention by operations, gradients added by kernels of their own."""
    return {
        "model.attention": "unfused",
        "training.loss.name": "vocab_parallel",
        "training.optimizer.implementation": "foreach",
        **job.threads_of_torchrun,
    }


FRAMEWORK = replace(
    megatron_core.FRAMEWORK,
    name="megatron_core_local",
    about="Megatron-Core with its local modules, without Transformer Engine and Apex",
    defaults=defaults,
    limits=LIMITS,
    adds_in_products=False,
)

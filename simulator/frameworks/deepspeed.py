"""DeepSpeed's engine under the model of Megatron-DeepSpeed.

Kernels are Megatron's, and gradients are copied into buckets.

github.com/deepspeedai/DeepSpeed, deepspeed/runtime: zero/stage_1_and_2.py, bf16_optimizer.py, pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import megatron_core
from simulator.frameworks.framework import JobTraits
from simulator.units import DTYPE_BYTES

#: ``reduce_bucket_size``: elements of a bucket of gradients.
REDUCE_BUCKET_SIZE = 500_000_000


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of DeepSpeed.

    Buckets have ``reduce_bucket_size`` elements, and outputs of stages wait in ``pipe_buffers``. BF16_Optimizer adds
    gradients up in fp32 and keeps those of a micro-batch until the next (``update_hp_grads(clear_lp_grads=False)``).
    """
    return {
        "training.keep_gradients": job.precision == "bf16" and job.grad_dtype == "fp32" and job.zero <= 1,
        "parallelism.copy_to_buckets": True,
        "parallelism.bucket_bytes": REDUCE_BUCKET_SIZE * DTYPE_BYTES[job.grad_dtype],
        "parallelism.deallocate_pipeline_outputs": False,
        "training.loss.name": "vocab_parallel",
    }


FRAMEWORK = replace(
    megatron_core.FRAMEWORK,
    name="deepspeed",
    about="DeepSpeed's engine, with the model and kernels of Megatron-DeepSpeed",
    defaults=defaults,
    adds_in_products=False,
)

"""DeepSpeed's engine under the model of Megatron-DeepSpeed.

Kernels are Megatron's, and gradients are copied into buckets. Stages 1 and 2 all-reduce these, whatever their setting
``reduce_scatter`` (``allreduce_and_copy_with_multiple_ranks``), and so does the engine for BF16_Optimizer
(``buffered_allreduce_fallback``).

github.com/deepspeedai/DeepSpeed 0.19.8, deepspeed/runtime: engine.py, zero/config.py, zero/stage_1_and_2.py,
bf16_optimizer.py, pipe/engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import fused_kernels, megatron_core
from simulator.frameworks.framework import JobTraits, Replication
from simulator.frameworks.layout_habits import LayoutHabits
from simulator.units import DTYPE_BYTES

#: ``reduce_bucket_size``: elements of a bucket of gradients.
REDUCE_BUCKET_SIZE = 500_000_000


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of DeepSpeed.

    Buckets have ``reduce_bucket_size`` elements, and outputs of stages wait in ``pipe_buffers``. BF16_Optimizer adds
    gradients up in fp32 and keeps those of a micro-batch until the next (``update_hp_grads(clear_lp_grads=False)``).
    """
    return {
        **sent_between(job),
        "training.keep_gradients": job.precision == "bf16" and job.grad_dtype == "fp32" and job.zero <= 1,
        "parallelism.copy_to_buckets": True,
        "parallelism.bucket_bytes": REDUCE_BUCKET_SIZE * DTYPE_BYTES[job.grad_dtype],
        "parallelism.deallocate_pipeline_outputs": False,
        "training.loss.name": "vocab_parallel",
    }


def sent_between(job: JobTraits) -> Mapping[str, object]:
    """Return the defaults of overlap: below stage 3 nothing is sent beside computation.

    ``overlap_comm`` is off there (``overlap_comm_valid``), and a step ends with the all-gather of parameters
    (``all_gather_dp_groups``).
    """
    if job.zero not in (1, 2):
        return {}
    return {"parallelism.overlap.grad_reduce": False, "parallelism.overlap.param_gather": False}


def replication(job: JobTraits) -> Replication:
    """Return Megatron-Core's, but for buckets of which each rank takes its shard."""
    return replace(megatron_core.FRAMEWORK.replication(job), shards_buckets=job.zero > 0)


#: DeepSpeed's layer of experts sends tokens there and back (``MOELayer`` of deepspeed/moe/sharded_moe.py).
#: Probabilities stay on the rank that routes, where they weigh what comes back.
#: It has no maps of Transformer Engine's.
EXPERTS = replace(megatron_core.permuted_by(fused_kernels.EXPERTS), counted=None, sends_probabilities=False)
FRAMEWORK = replace(
    megatron_core.FRAMEWORK,
    name="deepspeed",
    about="DeepSpeed's engine, with the model and kernels of Megatron-DeepSpeed",
    launch_section="eager",
    makes_states_early=True,
    defaults=defaults,
    losses=("vocab_parallel", "eager"),
    adds_in_products=False,
    has_core_experts=False,
    captures_graphs=False,
    experts=EXPERTS,
    replication=replication,
    habits=LayoutHabits((0, 1, 2, 3)),
)

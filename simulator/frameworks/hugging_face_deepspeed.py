"""DeepSpeed's ZeRO around models of Hugging Face's transformers, as its Trainer and accelerate run it.

With bf16 the engine makes a ``DeepSpeedZeroOptimizer`` for stages 1 and 2 and a ``DeepSpeedZeroOptimizer_Stage3`` for
stage 3, and no ``BF16_Optimizer`` (``_configure_zero_optimizer``). Gradients are made, added up and reduced in bf16
(``get_data_types``), and exist in fp32 for the update alone.

github.com/deepspeedai/DeepSpeed 0.19.8, deepspeed/runtime: engine.py, zero/config.py, zero/stage_1_and_2.py,
zero/stage3.py, zero/partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import deepspeed, hugging_face, hugging_face_limits, zero_kernels
from simulator.frameworks.framework import JobTraits, Replication
from simulator.frameworks.hugging_face_limits import AUTOCAST, IN_FP32
from simulator.frameworks.layout_habits import LayoutHabits
from simulator.frameworks.limits import Limit
from simulator.units import DTYPE_BYTES

#: ``stage3_max_live_parameters``. Before each module more is gathered, until so many parameters are whole.
MAX_LIVE_PARAMETERS = 1_000_000_000

REPLACED = ("parallelism.zero", "training.optimizer.master_weights", "training.precision")
#: What fp32 itself is refused for is not said again of what follows from it.
_OF_16_BITS = (
    Limit("training.optimizer.master_weights", (True,), "DeepSpeed keeps fp32 weights beside 16-bit ones"),
    Limit(
        "training.grad_dtype", ("bf16", "fp16"), "gradients that add up in fp32 (grad_accum_dtype) are not simulated"
    ),
)
LIMITS = (
    *(
        limit
        for limit in hugging_face_limits.LIMITS
        if limit.key not in REPLACED and not any(other.items() <= limit.where.items() for other in (IN_FP32, AUTOCAST))
    ),
    Limit("training.precision", ("bf16", "fp16"), "DeepSpeed's engine in fp32 is not simulated"),
    Limit("parallelism.zero", (1, 2, 3), "its engine without ZeRO is not simulated"),
    *(limit._replace(where={"training.precision": narrow}) for narrow in ("bf16", "fp16") for limit in _OF_16_BITS),
    Limit("parallelism.hsdp", (None,), "groups of ranks that share a state (MiCS, hpZ) are not simulated"),
    Limit("parallelism.reshard_after_forward", (True,), "parameters are released after the forward pass"),
    Limit("parallelism.prefetch", (1,), "layers are gathered ahead until 1e9 parameters are whole, not so many layers"),
    Limit(
        "parallelism.overlap.grad_reduce",
        (False,),
        "without overlap_comm, which is off below stage 3, gradients are reduced between kernels",
        {"parallelism.zero": 2},
    ),
)

#: What stages have in common.
COPIED = Replication(adds_first_gradients=False, clears_buffers=False, shards_buckets=True, widens_for_host=True)


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of both: buckets and what is sent when are DeepSpeed's, and all else is Hugging Face's."""
    return {
        **hugging_face.defaults(job),
        **deepspeed.sent_between(job),
        "training.optimizer.state_dtype": "fp32",
        "parallelism.sync_each_micro_batch": True,
        "parallelism.copy_to_buckets": True,
        "parallelism.bucket_bytes": deepspeed.REDUCE_BUCKET_SIZE * DTYPE_BYTES[job.precision],
    }


def replication(job: JobTraits) -> Replication:
    """Return how DeepSpeed keeps gradients.

    Up to stage 2 they are autograd's until they are copied to a bucket, which lives as long as gradients are copied
    (``setup_buckets``). Stage 3 has a bucket and a buffer of its shards all the time (``_setup_for_real_optimizer``):
    shards are copied there first, and added later. Where the host updates, gradients are cast to fp32 and copied to its
    memory (``async_inplace_copy_grad_to_fp32_buffer_from_gpu``, ``_offload_grad_partition_at_boundary``).
    """
    if job.zero == 3:
        return replace(COPIED, bucket="whole")
    return replace(COPIED, hands_over_gradients=job.updates_on_gpu, bucket="none")


FRAMEWORK = replace(
    hugging_face.FRAMEWORK,
    name="hugging_face_deepspeed",
    runs_captured=False,
    about="DeepSpeed's ZeRO around Hugging Face's transformers",
    launch_section="deepspeed",
    makes_states_early=True,
    defaults=defaults,
    limits=LIMITS,
    master_weights=True,
    replication=replication,
    gradient_kernels=zero_kernels.kernels,
    hooked_modules=zero_kernels.hooked_modules,
    live_parameters=MAX_LIVE_PARAMETERS,
    compiled=None,
    habits=LayoutHabits((1, 2, 3), one_rank_layers=True, begins_sharded=True),
)

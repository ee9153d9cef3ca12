"""DeepSpeed's ZeRO around models of Hugging Face's transformers, as its Trainer and accelerate run it.

github.com/deepspeedai/DeepSpeed 0.19: runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py, stage3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import deepspeed, hugging_face
from simulator.frameworks.framework import JobTraits, Limit, Replication

REPLACED = ("parallelism.zero", "training.optimizer.master_weights")
LIMITS = tuple(limit for limit in hugging_face.LIMITS if limit.key not in REPLACED) + (
    Limit("training.optimizer.master_weights", (True,), "DeepSpeed keeps fp32 weights beside 16-bit ones"),
)


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of both: buckets are DeepSpeed's, and all else is Hugging Face's."""
    return {
        **hugging_face.defaults(job),
        "training.optimizer.state_dtype": "fp32",
        "parallelism.copy_to_buckets": True,
        "parallelism.bucket_bytes": deepspeed.REDUCE_BUCKET_SIZE * 2,
    }


def replication(job: JobTraits) -> Replication:
    """Return how DeepSpeed keeps gradients: of a micro-batch until they are reduced."""
    return Replication()


FRAMEWORK = replace(
    hugging_face.FRAMEWORK,
    name="hugging_face_deepspeed",
    about="DeepSpeed's ZeRO around Hugging Face's transformers",
    defaults=defaults,
    limits=LIMITS,
    master_weights=True,
    replication=replication,
    compiled=None,
)

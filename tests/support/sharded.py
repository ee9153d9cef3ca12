"""Small jobs whose state is sharded, each played once."""

from __future__ import annotations

from typing import Any

from simulator.config import Workload
from simulator.step_result import StepResult
from tests.support import quick
from tests.support.jobs import job


def load(
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    framework: str = "megatron_core",
    **parallelism: Any,
) -> Workload:
    workload = job(framework=framework)
    workload["training"] |= {"grad_clip": None, "global_batch": 8} | (training or {})
    workload["model"] |= model or {}
    workload["parallelism"] |= parallelism
    return quick.load(workload)


def play(
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    framework: str = "megatron_core",
    **parallelism: Any,
) -> StepResult:
    return quick.play_once(load(training, model, framework, **parallelism))

"""Small jobs whose state is sharded, each played once."""

from __future__ import annotations

from typing import Any

from simulator.api import StepResult
from simulator.config import Workload
from tests.support import quick
from tests.support.jobs import job

_PLAYED: dict[str, StepResult] = {}


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
    key = repr((training, model, framework, parallelism))
    if key not in _PLAYED:
        _PLAYED[key] = quick.play(load(training, model, framework, **parallelism))
    return _PLAYED[key]

"""Software stacks that train models, one file each. A new one is a file with a `Framework`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from simulator.frameworks import (
    deepspeed,
    hugging_face,
    hugging_face_deepspeed,
    megatron_core,
    megatron_core_local,
    pytorch,
    torchtitan,
)
from simulator.frameworks.framework import Framework, JobTraits, Replication
from simulator.frameworks.stage_runtime import StageRuntime

#: By name, the default first.
FRAMEWORKS: Mapping[str, Framework] = {
    framework.name: framework
    for framework in (
        megatron_core.FRAMEWORK,
        pytorch.FRAMEWORK,
        hugging_face.FRAMEWORK,
        deepspeed.FRAMEWORK,
        hugging_face_deepspeed.FRAMEWORK,
        torchtitan.FRAMEWORK,
        megatron_core_local.FRAMEWORK,
    )
}
DEFAULT = next(iter(FRAMEWORKS.values()))


@lru_cache
def find_framework(name: str, version: str | None = None, compile: bool = False) -> Framework:
    """Return a framework as of ``version``, such as ``"2.8"``, the newest where that is None, compiled if ``compile``.

    Raises `ValueError` on a version or a compiler that the framework does not know.
    """
    framework = FRAMEWORKS[name]
    if version is not None and not framework.before:
        raise ValueError(f"nothing of {name} depends on its version")
    if compile and framework.compiled is None:
        raise ValueError(f"{name} is not compiled")
    framework = framework.compiled if compile and framework.compiled else framework
    if version is None:
        return framework
    number = tuple(map(int, version.split(".")))
    earlier = [before.defaults for before in framework.before if number < before.version]

    def defaults(job: JobTraits) -> Mapping[str, object]:
        values = dict(framework.defaults(job))
        for changes in earlier:
            values |= changes(job)
        return values

    return replace(framework, defaults=defaults)


@lru_cache
def without_fused(stack: Framework, parts: tuple[str, ...]) -> Framework:
    """Return the stack whose ``parts`` run operation by operation; those that have no fused kernel stay."""
    for name, changed in stack.by_operations:
        if name in parts:
            stack = changed(stack)
    return stack


@lru_cache
def with_inductors_kernels(stack: Framework) -> Framework:
    """Return the stack with speeds of Inductor's own kernels, whichever model they are of."""
    return replace(stack, memory_sections=tuple(dict.fromkeys((*stack.memory_sections, "inductor"))))


@lru_cache
def in_one_graph(stack: Framework) -> Framework:
    """Return the stack whose passes are launched by one CUDA graph."""
    return replace(stack, passes_in_graph=True)


__all__ = [
    "DEFAULT",
    "FRAMEWORKS",
    "Framework",
    "JobTraits",
    "Replication",
    "StageRuntime",
    "find_framework",
    "in_one_graph",
    "with_inductors_kernels",
    "without_fused",
]

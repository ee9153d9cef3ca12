"""Rules of workloads: every check that looks at more than one key, and what it proposes instead.

There is one file per subject. Each one's `problems` are asked of a file's own keys, its `layout_problems` when every
default has its value. Both yield errors. `warnings` tell of jobs that run, and are probably not meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from simulator.config.rules import (
    captured,
    context,
    cuda_graphs,
    data,
    dispatching,
    effect,
    encoder,
    experts,
    framework,
    hidden_exchange,
    mixers,
    offload,
    optimizer,
    pipeline,
    placement,
    precision,
    scale,
    servers,
    tensor,
    training,
    tuning,
)
from simulator.config.rules.pipeline import even_split
from simulator.config.rules.scale import check_scale, replicas
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload

_PROBLEMS = (
    *(tensor.problems, training.problems, framework.problems, context.problems, experts.problems, pipeline.problems),
    *(mixers.problems, tuning.problems, servers.problems, offload.problems, optimizer.problems, precision.problems),
    *(hidden_exchange.problems, dispatching.problems, cuda_graphs.problems, encoder.problems),
)
#: Checks of captured models, whose operations nothing changes: not those of keys that `captured` refuses anyway.
_CAPTURED_PROBLEMS = (
    *(captured.problems, training.problems, pipeline.problems, servers.problems, offload.problems, optimizer.problems),
    *(hidden_exchange.problems, dispatching.problems),
)
_LAYOUT_PROBLEMS = (
    *(scale.layout_problems, placement.layout_problems, data.layout_problems),
    *(pipeline.layout_problems, experts.layout_problems, framework.layout_problems),
    *(precision.layout_problems, dispatching.layout_problems, captured.layout_problems),
)
_WARNINGS = (
    *(scale.warnings, data.warnings, servers.warnings, experts.warnings, pipeline.warnings),
    *(tensor.warnings, training.warnings, optimizer.warnings),
    effect.warnings,
)


def problems(workload: Workload) -> Iterator[InputError]:
    """Return errors that hold whatever the cluster; those of an unknown framework alone."""
    unknown = list(framework.choice_problems(workload))
    checks = _CAPTURED_PROBLEMS if workload.model.captured else _PROBLEMS
    return iter(unknown) if unknown else chain.from_iterable(check(workload) for check in checks)


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield errors between the resolved layout, the batch and the cluster."""
    return chain.from_iterable(check(workload) for check in _LAYOUT_PROBLEMS)


def warnings(workload: Workload) -> list[str]:
    """Return warnings of what runs, and is probably not meant."""
    return [*workload.cluster.warnings, *(note for notes in _WARNINGS for note in notes(workload))]


__all__ = ["check_scale", "even_split", "layout_problems", "problems", "replicas", "warnings"]

"""Python entry point of plans: `plan`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.bounds import as_number
from simulator.config.section import is_whole
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.planning.gpu_counts import CountRange
from simulator.planning.plan_rows import PlanQuestion
from simulator.planning.result import PlanResult
from simulator.searching.dimensions import DIMENSIONS
from simulator.searching.entry import check_counts, layout_choices, layout_evaluator
from simulator.searching.layout_search import SearchWatch, check_no_dimension
from simulator.sweeping.point import Source
from simulator.sweeping.space import grid

#: Shortest run of a plan: a tenth of a second.
LEAST_DAYS = 1e-6


def plan(
    workload: Source,
    *,
    gpus: Sequence[int] | None = None,
    between: tuple[int, int] | None = None,
    days: float | None = None,
    more: int = 0,
    vary: Mapping[str, Sequence[Any]] | None = None,
    fix: Mapping[str, Sequence[Any]] | None = None,
    limit: Mapping[str, tuple[float, float]] | None = None,
    set: Mapping[str, Any] | None = None,
    jobs: int | None = None,
    on: str | None = None,
    out: str | Path | None = None,
    retry_failed: bool = False,
    watch: Callable[[int], SearchWatch] = lambda gpus: SearchWatch(),
) -> PlanResult:
    """Find the fastest layout on several numbers of GPUs, or the fewest GPUs that are fast enough.

    ``gpus``: the numbers to try. ``between``: least and most of them, of which whole nodes are tried. ``days``: a run
    of ``training.total_tokens`` is to take no longer. Numbers are then tried from the fewest on, until one is enough.
    ``more``: so many larger numbers with a legal layout are tried too, for what they would buy.

    ``vary``: dotted key -> values, such as another cluster or speed of its network; every combination has rows of its
    own. ``watch``: returns the listeners to the search on a number of GPUs. All else is as of `simulator.search`.

    Raises `InputError` on what cannot be used.
    """
    choices = layout_choices(workload, fix, limit, set)
    question = PlanQuestion(
        choices=choices,
        counts=_counts(gpus, between, days),
        days=None if days is None else _days(days),
        more=_more(more),
        settings=_settings(vary or {}, {**choices.changes, **choices.fixed}),
    )
    with layout_evaluator(jobs, on, out, retry_failed) as evaluator:
        parts = tuple(question.parts(evaluator, watch))
    return PlanResult(question, parts, evaluator.n_kept)


def _counts(
    gpus: Sequence[int] | None, between: tuple[int, int] | None, days: float | None
) -> Sequence[int] | CountRange | None:
    if gpus is not None and between is not None:
        raise InputError("is given beside a range", file="gpus", found=brief(gpus), fix="one of both")
    if between is not None:
        if isinstance(between, str | bytes) or not isinstance(between, Sequence) or len(between) != 2:
            allowed = "least and most, such as (64, 2048)"
            raise InputError("must be two numbers", file="between", found=brief(between), allowed=allowed)
        check_counts(least=between[0], most=between[1])
        return CountRange(*between)
    if gpus is not None:
        if isinstance(gpus, str | bytes) or not isinstance(gpus, Sequence) or not gpus:
            raise InputError("must be a list of numbers", file="gpus", found=brief(gpus), allowed="such as [512, 1024]")
        for number in gpus:
            check_counts(gpus=number)
        return list(gpus)
    if days is None:
        fix = "--gpus 512,1024 or --gpus 512..1024; or --days 30 for the fewest that are enough"
        raise InputError("there is no number of GPUs to plan for", file="gpus", fix=fix)
    return None


def _days(days: object) -> float:
    allowed = f"a number, >= {LEAST_DAYS:g}"
    number = as_number(days, file="days", allowed=allowed)
    if number < LEAST_DAYS:
        raise InputError("is too short a run", file="days", found=brief(days), allowed=allowed)
    return number


def _more(more: object) -> int:
    if not is_whole(more) or more < 0:
        raise InputError("must be a whole number", file="more", found=brief(more), allowed=">= 0")
    return int(more)


def _settings(vary: Mapping[str, Sequence[Any]], same: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of values of the varied keys; ``same``: what has values for all settings.

    Raises `InputError` for keys that layouts differ in, and for the number of nodes, which follows from the GPUs.
    """
    dimensions = grid(vary, "vary")
    for key in vary:
        if key == "cluster.nodes":
            raise InputError("follows from the number of GPUs", file="vary", key=key, fix="--gpus")
        check_no_dimension(key, vary[key], "vary")
        if any(_meet(key, one.key) for one in DIMENSIONS):
            raise InputError("is what layouts differ in", file="vary", key=key, fix="--fix KEY=V1,V2")
        if key in same:
            raise InputError("has values for all settings too", file="vary", key=key, fix="one of both")
    combinations = itertools.product(*(one.settings for one in dimensions))
    return [{key: value for setting in settings for key, value in setting.items()} for settings in combinations]


def _meet(key: str, layout_key: str) -> bool:
    """Tell whether a key is the last part of a layout's, a section around it, or a part of it.

    >>> [_meet(key, "training.recompute") for key in ("recompute", "training", "training.recompute.modules", "train")]
    [True, True, True, False]
    """
    last = layout_key.rpartition(".")[2]
    return key == last or layout_key.startswith(f"{key}.") or key.startswith(f"{layout_key}.")

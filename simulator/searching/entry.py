"""Python entry point of the search for a layout: `search`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simulator.bounds import MAX_GPUS, as_number
from simulator.config import load_workload
from simulator.config.section import is_whole
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.output.search_table import layout_text
from simulator.searching.candidates import Refusals
from simulator.searching.layout_search import LayoutChoices, LayoutSearch, SearchWatch
from simulator.searching.result import SearchResult
from simulator.searching.space import LayoutSpace, SizeLimit, whole_key
from simulator.sweeping.entry import database_path
from simulator.sweeping.evaluator import Evaluator
from simulator.sweeping.point import Source
from simulator.sweeping.runners import search_runner_on
from simulator.sweeping.space import listed_values
from simulator.sweeping.store import Store
from simulator.units import counted


def search(
    workload: Source,
    *,
    gpus: int | None = None,
    fix: Mapping[str, Sequence[Any]] | None = None,
    limit: Mapping[str, tuple[float, float]] | None = None,
    set: Mapping[str, Any] | None = None,
    top: int = 10,
    budget_s: float = math.inf,
    jobs: int | None = None,
    on: str | None = None,
    out: str | Path | None = None,
    retry_failed: bool = False,
    watch: SearchWatch | None = None,
) -> SearchResult:
    """Find the fastest layouts of ``workload`` on so many GPUs that fit in memory.

    ``gpus``: their number [that of the workload's job]. ``workload``: a file, a shipped name or a mapping. ``fix``: key
    -> the only values to try, by its dotted key or, of `simulator.searching.dimensions`, its last part. ``limit``: key
    of a number -> least and most. ``set``: what all layouts change. ``top``: how many are to be proven. ``budget_s``:
    seconds after which no simulation begins.

    ``jobs``: simulations at once [one per core]. ``on``: where they run, as of `simulator.sweep`. ``out``: a database
    that keeps every simulated layout as soon as it is finished [none]. Its layouts are not simulated again, unless
    their simulator or process broke down and ``retry_failed`` is set.

    Raises `InputError` on what cannot be used, and where no layout is legal.
    """
    began = time.monotonic()
    if gpus is None:
        gpus = load_workload(workload, by_key(set or {}, "set")).n_ranks
    check_counts(gpus=gpus, top=top)
    budget_s = as_number(budget_s, file="budget_s")
    asked = LayoutSearch(layout_choices(workload, fix, limit, set), gpus, top)
    with layout_evaluator(jobs, on, out, retry_failed) as evaluator:
        result = asked.result(
            evaluator,
            SearchWatch() if watch is None else watch,
            lambda: time.monotonic() - began > budget_s,
        )
    if not result.bounded.n_legal and result.bounded.complete:
        raise no_layout(result.space, result.bounded.refusals)
    return result


def layout_choices(
    workload: Source,
    fix: Mapping[str, Sequence[Any]] | None,
    limit: Mapping[str, tuple[float, float]] | None,
    changes: Mapping[str, Any] | None,
) -> LayoutChoices:
    """Return the layouts that parameters of `search` name. Raises `InputError` on what cannot be used."""
    fixed = {whole_key(key, "fix"): _fixed_values(key, values) for key, values in by_key(fix or {}, "fix").items()}
    limits = {whole_key(key, "limit"): _limit(key, both) for key, both in by_key(limit or {}, "limit").items()}
    return LayoutChoices(workload, fixed, limits, dict(by_key(changes or {}, "set")))


@contextmanager
def layout_evaluator(
    jobs: int | None, on: str | None, out: str | Path | None, retry_failed: bool
) -> Iterator[Evaluator]:
    """Yield what simulates layouts, as parameters of `search` say, and close its database behind the block."""
    runner = search_runner_on(jobs, on)
    with Store.open(None if out is None else database_path(out)) as store:
        yield Evaluator(runner, store, retry_failed)


def check_counts(**counts: object) -> None:
    """Raise `InputError`, with the option's name, for a number that is not above 0, or above the most GPUs."""
    for option, number in counts.items():
        if not is_whole(number) or not 1 <= number <= MAX_GPUS:
            allowed = f">= 1, <= {MAX_GPUS:,}"
            raise InputError("must be a whole number", file=option, found=brief(number), allowed=allowed)


def by_key(values: object, option: str) -> Mapping[str, Any]:
    """Return a mapping of keys as it is. Raises `InputError`, naming ``option``, where it is something else."""
    if not isinstance(values, Mapping):
        raise InputError("must be a mapping of keys", file=option, found=brief(values), allowed="{KEY: ...}")
    return values


def _fixed_values(key: str, values: object) -> tuple[Any, ...]:
    """Return the values of a key that is fixed. Raises `InputError` where they are none, or one stands twice."""
    listed, texts = listed_values(key, values, "fix"), set[str]()
    for value in listed:
        if (text := repr(value)) in texts:
            raise InputError("stands twice", file="fix", key=key, found=brief(value), fix="once is enough")
        texts.add(text)
    return tuple(listed)


def _limit(key: str, both: object) -> SizeLimit:
    pair = tuple(both) if isinstance(both, Sequence) and not isinstance(both, str) else ()
    if len(pair) != 2 or any(isinstance(one, bool) or not isinstance(one, int | float) for one in pair):
        raise InputError("must be least and most", file="limit", key=key, found=brief(both), allowed="such as (1, 8)")
    if not pair[0] <= pair[1]:
        raise InputError(
            "has no number", file="limit", key=key, found=f"{pair[0]:g}..{pair[1]:g}", allowed="MIN <= MAX"
        )
    return SizeLimit(*pair)


def no_layout(space: LayoutSpace, refusals: Refusals) -> InputError:
    """The error of a space without any legal layout: what a rule says of one, or which key lacks values."""
    message = f"no layout on {counted(space.gpus, 'GPU')} is legal"
    for examples in refusals.examples.values():
        changes, rule = examples[0]
        return InputError(f"{message}; of {layout_text(changes)} is to say: {rule}", file="search")
    key = max(space.skipped, key=space.skipped.__getitem__, default="gpus")
    fix = "fewer --fix and --limit, or another number of GPUs"
    return InputError(f"{message}; most often for want of a value of {key}", file="search", fix=fix)

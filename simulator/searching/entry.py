"""Python entry point of the search for a layout: `search`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator.bounds import as_number
from simulator.config import Workload, load_workload
from simulator.config.variants import Variants
from simulator.errors import InputError, located
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import brief
from simulator.output.search_table import layout_text
from simulator.searching.bounds import LayoutBounds
from simulator.searching.branch_and_bound import SimulatedLayout, ranked
from simulator.searching.candidates import Candidate, Refusals, bounded_space
from simulator.searching.dimensions import DIMENSIONS
from simulator.searching.result import SearchResult
from simulator.searching.space import LayoutSpace, SizeLimit, whole_key
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point, Source
from simulator.sweeping.processes import Processes, cores
from simulator.sweeping.runner import Runner

#: Number of the point that is the file's own layout.
_OWN = -1


@dataclass(frozen=True)
class SearchWatch:
    """Listeners to a search under way: one is told how many layouts have bounds, one each simulated layout."""

    bounded: Callable[[int], object] = lambda count: None
    simulated: Callable[[SimulatedLayout], object] = lambda one: None


class _ThisProcess:
    """Runner that simulates one point after another in this process."""

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        """Yield points with their outcomes (see `simulator.sweeping.runner.Runner`)."""
        for point in points:
            yield point, evaluate(point, finished)


def search(
    workload: Source,
    *,
    gpus: int,
    fix: Mapping[str, Sequence[Any]] | None = None,
    limit: Mapping[str, tuple[float, float]] | None = None,
    set: Mapping[str, Any] | None = None,
    top: int = 10,
    budget_s: float = math.inf,
    jobs: int | None = None,
    watch: SearchWatch | None = None,
) -> SearchResult:
    """Find the fastest layouts of ``workload`` on so many GPUs that fit in memory.

    ``workload``: a file, a shipped name or a mapping. ``fix``: key -> the only values to try, by its dotted key or, of
    `simulator.searching.dimensions`, its last part. ``limit``: key of a number -> least and most. ``set``: what all
    layouts change. ``top``: how many are to be proven. ``budget_s``: seconds after which no simulation begins.
    ``jobs``: processes [one per core].

    Raises `InputError` on what cannot be used, and where no layout is legal.
    """
    began = time.monotonic()
    _check_counts(gpus, top, jobs)
    budget_s = as_number(budget_s, file="budget_s")
    watch = SearchWatch() if watch is None else watch
    changes = dict(set or {})
    base = load_workload(workload, changes)
    cluster = _cluster_with(base, gpus)
    if cluster != base.cluster and not cluster.fixed_nodes:
        changes["cluster.nodes"] = cluster.n_nodes
    fixed = {whole_key(key, "fix"): _listed(key, values) for key, values in (fix or {}).items()}
    limits = {whole_key(key, "limit"): _limit(key, both) for key, both in (limit or {}).items()}
    space = LayoutSpace(Variants(base, cluster), gpus, fixed, limits)
    _check_set(set or {}, fixed)
    sizes = base.parallelism.model_copy(update={"tp": 1, "cp": 1, "pp": 1, "dp": gpus})
    there = base.model_copy(update={"cluster": cluster, "parallelism": sizes})

    def is_over() -> bool:
        return time.monotonic() - began > budget_s

    bounded = bounded_space(space, LayoutBounds.for_workload(there), watch.bounded, is_over)
    bounded_s = time.monotonic() - began
    if not bounded.n_legal and bounded.complete:
        raise no_layout(space, bounded.refusals)

    def point_of(candidate: Candidate) -> Point:
        return Point(candidate.number, workload, {**changes, **candidate.changes})

    runner: Runner = _ThisProcess() if jobs == 1 else Processes(cores() if jobs is None else jobs)
    ranking = ranked(bounded, runner, point_of, top, is_over, watch.simulated)
    file_layout = _file_layout(Point(_OWN, workload, changes), base, gpus, ranking.simulated, is_over)
    seconds = (bounded_s, time.monotonic() - began)
    return SearchResult(workload, gpus, changes, space, bounded, ranking, top, file_layout, seconds)


def _check_counts(gpus: int, top: int, jobs: int | None) -> None:
    """Raise `InputError` for a number that is not above 0."""
    for option, number in (("gpus", gpus), ("top", top), ("jobs", 1 if jobs is None else jobs)):
        if not isinstance(number, int) or number < 1:
            raise InputError("must be a whole number", file=option, found=brief(number), allowed=">= 1")


def _check_set(changes: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise `InputError` for a change of a key that layouts differ in: none of them would have it."""
    for key in changes:
        if key in {one.key for one in DIMENSIONS} - fixed.keys():
            value = layout_text(changes[key])
            raise InputError("is what layouts differ in", file="set", key=key, found=value, fix=f"--fix {key}={value}")


def _listed(key: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence) or not values:
        raise InputError("must be a list of values", file="fix", key=key, found=brief(values))
    return tuple(values)


def _limit(key: str, both: object) -> SizeLimit:
    """Return least and most of a number. Raises `InputError` where they are not two numbers."""
    pair = tuple(both) if isinstance(both, Sequence) and not isinstance(both, str) else ()
    if len(pair) != 2 or not all(isinstance(one, int | float) for one in pair):
        raise InputError("must be least and most", file="limit", key=key, found=brief(both), allowed="such as (1, 8)")
    return SizeLimit(*pair)


def _cluster_with(base: Workload, gpus: int) -> ClusterSpec:
    """Return the workload's cluster with the fewest nodes that hold so many GPUs, beside its parameter servers."""
    cluster = base.cluster
    with located(lambda key: (None, f"cluster.{key}" if key else "cluster")):
        if base.nodes is not None or cluster.fixed_nodes:
            if cluster.n_gpus < gpus:
                raise InputError("has fewer GPUs, and a size of its own", found=cluster.n_gpus, allowed=f">= {gpus}")
            return cluster
        return replace(cluster, nodes=cluster.nodes_for(gpus) + base.parallelism.server_count)


def no_layout(space: LayoutSpace, refusals: Refusals) -> InputError:
    """The error of a space without any legal layout: what a rule says of one, or which key lacks values."""
    message = f"no layout on {space.gpus:,} GPUs is legal"
    for examples in refusals.examples.values():
        changes, rule = examples[0]
        return InputError(f"{message}; of {layout_text(changes)} is to say: {rule}", file="search")
    key = max(space.skipped, key=space.skipped.__getitem__, default="gpus")
    fix = "fewer --fix and --limit, or another number of GPUs"
    return InputError(f"{message}; most often for want of a value of {key}", file="search", fix=fix)


def _file_layout(
    point: Point, base: Workload, gpus: int, simulated: Sequence[SimulatedLayout], is_over: Callable[[], bool]
) -> PointOutcome | None:
    """Return the outcome of the file's own layout, where it is for so many GPUs.

    It is simulated now, unless it was among the layouts.
    """
    if base.n_ranks != gpus:
        return None
    for one in simulated:
        if one.candidate.is_own:
            return one.outcome
    return None if is_over() else evaluate(point)

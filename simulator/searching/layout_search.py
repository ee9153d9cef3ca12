"""One search as it was asked for, and how it is carried out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.config import Workload, load_workload
from simulator.config.variants import Variants
from simulator.errors import InputError, located
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.output.search_table import layout_text
from simulator.searching.bounds import LayoutBounds
from simulator.searching.branch_and_bound import SimulatedLayout, ranked
from simulator.searching.candidates import NO_LAYOUTS, Candidate, bounded_space
from simulator.searching.dimensions import DIMENSIONS
from simulator.searching.result import SearchResult
from simulator.searching.space import LayoutSpace, SizeLimit, legal_values
from simulator.sweeping.evaluator import Evaluator
from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Point, Source

#: Number of the point that is the file's own layout.
_OWN = -1


@dataclass(frozen=True)
class SearchWatch:
    """Listeners to a search under way: one is told how many layouts have bounds, one each simulated layout."""

    bounded: Callable[[int], object] = lambda count: None
    simulated: Callable[[SimulatedLayout], object] = lambda one: None


@dataclass(frozen=True)
class LayoutChoices:
    """The layouts of ``workload`` among which searches choose, on any number of GPUs.

    ``fixed``: dotted key -> the only values to try. ``limits``: dotted key of a number -> its bounds. ``changes``: what
    all layouts change.
    """

    workload: Source
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    limits: Mapping[str, SizeLimit] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayoutSearch:
    """A search for the ``top`` fastest layouts on so many ``gpus``.

    ``slowest_s``: no layout with a slower step is of interest.
    """

    choices: LayoutChoices
    gpus: int
    top: int = 10
    slowest_s: float = math.inf

    def prepared(self) -> LayoutSpace:
        """Return the layouts of the workload with its changes, on its cluster with so many GPUs.

        Raises `InputError` where a change is of a key that layouts differ in, a key cannot have one of its values, or
        the cluster has fewer GPUs.
        """
        choices = self.choices
        base = load_workload(choices.workload, choices.changes)
        for key, value in choices.changes.items():
            if key not in choices.fixed:
                check_no_dimension(key, [value], "set")
            elif list(choices.fixed[key]) != [value]:
                text = layout_text(value)
                raise InputError("has other values of --fix too", file="set", key=key, found=text, fix="one of both")
        variants = Variants(base, _cluster_with(base, self.gpus))
        fixed = {key: legal_values(variants, key, values) for key, values in choices.fixed.items()}
        return LayoutSpace(variants, self.gpus, fixed, choices.limits)

    def result(
        self,
        evaluator: Evaluator,
        watch: SearchWatch,
        is_over: Callable[[], bool] = lambda: False,
        *,
        compare_own: bool = True,
    ) -> SearchResult:
        """Return what the search comes to, which may be that no layout is legal. No simulation begins once ``is_over``.

        ``compare_own``: the file's own layout is simulated too. Raises `InputError` on what cannot be used.
        """
        began, n_kept = time.monotonic(), evaluator.n_kept
        space = self.prepared()
        base, cluster = space.variants.workload, space.variants.cluster
        workload, changes = self.choices.workload, dict(self.choices.changes)
        if cluster != base.cluster and not cluster.fixed_nodes:
            changes["cluster.nodes"] = cluster.n_nodes
        bounded = NO_LAYOUTS
        if next(space.layouts(), None) is not None:  # else the cluster need not be built
            sizes = base.parallelism.model_copy(update={"tp": 1, "cp": 1, "pp": 1, "dp": self.gpus})
            there = base.model_copy(update={"cluster": cluster, "parallelism": sizes})
            bounded = bounded_space(space, LayoutBounds.for_workload(there), watch.bounded, is_over)
        bounded_s = time.monotonic() - began

        def point_of(candidate: Candidate) -> Point:
            return Point(candidate.number, workload, {**changes, **candidate.changes})

        ranking = ranked(bounded, evaluator, point_of, self.top, is_over, watch.simulated, self.slowest_s)
        file_layout: PointOutcome | None = None
        if compare_own and bounded.n_legal and base.n_ranks == self.gpus:
            file_layout = _own_outcome(Point(_OWN, workload, changes), evaluator, ranking.simulated, is_over)
        return SearchResult(
            workload=workload,
            gpus=self.gpus,
            changes=changes,
            space=space,
            bounded=bounded,
            ranking=ranking,
            top=self.top,
            file_layout=file_layout,
            seconds=(bounded_s, time.monotonic() - began),
            kept=evaluator.n_kept - n_kept,
        )


def check_no_dimension(key: str, values: Sequence[Any], option: str) -> None:
    """Raise `InputError`, naming ``option``, for values of a key that layouts differ in: those are for a search."""
    if key in {one.key for one in DIMENSIONS}:
        texts = ",".join(map(layout_text, values))
        raise InputError("is what layouts differ in", file=option, key=key, found=texts, fix=f"--fix {key}={texts}")


def _cluster_with(base: Workload, gpus: int) -> ClusterSpec:
    """Return the workload's cluster with the fewest nodes that hold so many GPUs, beside its parameter servers."""
    cluster = base.cluster
    with located(lambda key: (None, f"cluster.{key}" if key else "cluster")):
        if base.nodes is not None or cluster.fixed_nodes:
            if cluster.n_gpus < gpus:
                raise InputError("has fewer GPUs, and a size of its own", found=cluster.n_gpus, allowed=f">= {gpus}")
            return cluster
        return replace(cluster, nodes=cluster.nodes_for(gpus) + base.parallelism.server_count)


def _own_outcome(
    point: Point, evaluator: Evaluator, simulated: Sequence[SimulatedLayout], is_over: Callable[[], bool]
) -> PointOutcome | None:
    """Return the outcome of the file's own layout, simulated now unless it was among the layouts."""
    for one in simulated:
        if one.candidate.is_own:
            return one.outcome
    return None if is_over() else evaluator.here(point)

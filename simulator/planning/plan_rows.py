"""Rows of a plan: the fastest layout on a number of GPUs, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.analysis.training.report import SECONDS_PER_DAY
from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.planning.gpu_counts import MOST_TIMES_LEAST, CountRange, least_gpus, whole_nodes
from simulator.searching.branch_and_bound import SimulatedLayout
from simulator.searching.layout_search import LayoutSearch, SearchWatch
from simulator.searching.result import SearchResult
from simulator.sweeping.evaluator import Evaluator
from simulator.sweeping.point import Source


@dataclass(frozen=True)
class PlanRow:
    """A search on a number of GPUs.

    ``setting``: the varied keys with their values. ``slowest_s``: step time that is asked for; infinite where none is.
    """

    setting: Mapping[str, Any]
    search: SearchResult
    slowest_s: float = math.inf

    @property
    def gpus(self) -> int:
        """GPUs of the layouts."""
        return self.search.gpus

    @property
    def best(self) -> SimulatedLayout | None:
        """The fastest layout that fits and is fast enough."""
        best = self.search.best
        return best if best is not None and best.step_time_s <= self.slowest_s else None

    @property
    def is_legal(self) -> bool:
        """Some layout on so many GPUs is legal."""
        return self.search.bounded.n_legal > 0


@dataclass(frozen=True)
class PlanQuestion:
    """The layouts of a plan, and which numbers of GPUs it asks about.

    ``counts``: a list of them, or a range whose whole nodes are tried; None: all that could be enough. ``days``: a run
    of ``training.total_tokens`` is to take no longer, and the fewest GPUs are asked for; None: every number is.
    ``more``: so many larger numbers with a legal layout are tried too. ``settings``: values of the varied keys. Other
    fields are those of `LayoutSearch`.
    """

    workload: Source
    counts: Sequence[int] | CountRange | None
    days: float | None = None
    more: int = 0
    settings: Sequence[Mapping[str, Any]] = ({},)
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def rows(
        self, evaluator: Evaluator, watch: Callable[[int], SearchWatch] = lambda gpus: SearchWatch()
    ) -> Iterator[PlanRow]:
        """Yield the rows of every setting, fewest GPUs first; ``watch`` returns the listeners of a search.

        Raises `InputError` on what cannot be used, before the first search.
        """
        each = [(setting, load_workload(self.workload, {**self.changes, **setting})) for setting in self.settings]
        for _, base in each:
            self._slowest_s(base)
        for setting, base in each:
            yield from self._rows_of(setting, base, evaluator, watch)

    def _rows_of(
        self, setting: Mapping[str, Any], base: Workload, evaluator: Evaluator, watch: Callable[[int], SearchWatch]
    ) -> Iterator[PlanRow]:
        """Yield the rows of a setting: until the first number of GPUs that is enough, if that is the question."""
        slowest_s, left, last = self._slowest_s(base), self.more, 0
        blank = LayoutSearch(
            self.workload, 1, self.fixed, self.limits, {**self.changes, **setting}, top=1, slowest_s=slowest_s
        )

        def row_on(gpus: int, search: LayoutSearch = blank) -> PlanRow:
            result = replace(search, gpus=gpus).result(evaluator, watch(gpus), compare_own=False)
            return PlanRow(setting, result, search.slowest_s)

        for last in self._counts_of(base, slowest_s):
            row = row_on(last)
            yield row
            if self.days is not None and row.best is not None:
                break
        following = CountRange(last + 1, last * MOST_TIMES_LEAST) if last else None
        for gpus in whole_nodes(base.cluster, following) if following is not None and left else ():
            row = row_on(gpus, replace(blank, slowest_s=math.inf))
            yield row
            left -= row.is_legal
            if not left:
                return

    def _slowest_s(self, base: Workload) -> float:
        """Return the step time with which the run takes ``days``. Raises `InputError` where it has no length."""
        if self.days is None:
            return math.inf
        training = base.training
        if training.total_tokens is None:
            fix = "--tokens 300B, or training.total_tokens in the file"
            raise InputError("the length of the run is needed", file="days", key="training.total_tokens", fix=fix)
        return self.days * SECONDS_PER_DAY * training.global_batch * training.seq / training.total_tokens

    def _counts_of(self, base: Workload, slowest_s: float) -> Iterator[int]:
        """Yield the numbers of GPUs to try, ascending, without those too few even at the peak."""
        floor = 1 if math.isinf(slowest_s) else least_gpus(base, slowest_s)
        counts = CountRange(1, floor * MOST_TIMES_LEAST) if self.counts is None else self.counts
        if not isinstance(counts, CountRange):
            yield from (gpus for gpus in sorted(set(counts)) if gpus >= floor)
        elif counts.most >= floor:
            yield from whole_nodes(base.cluster, CountRange(max(counts.least, floor), counts.most))

"""Rows of a plan: the fastest layout on a number of GPUs, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simulator.analysis.training.report import SECONDS_PER_DAY
from simulator.bounds import MAX_GPUS
from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.planning.gpu_counts import MOST_TIMES_LEAST, CountRange, least_gpus, most_gpus, whole_nodes
from simulator.searching.branch_and_bound import SimulatedLayout
from simulator.searching.layout_search import LayoutChoices, LayoutSearch, SearchWatch
from simulator.searching.result import SearchResult
from simulator.sweeping.evaluator import Evaluator
from simulator.units import counted


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
class SettingRows:
    """Rows of one setting of the varied keys, fewest GPUs first.

    ``too_few``: numbers of the range asked for that are not searched, as they are not enough at the peak of the GPUs.
    ``per_node``: GPUs of a node.
    """

    setting: Mapping[str, Any]
    rows: tuple[PlanRow, ...]
    too_few: tuple[int, ...] = ()
    per_node: int = 1

    @property
    def fewest(self) -> PlanRow | None:
        """The row with the fewest GPUs that are fast enough."""
        return next((row for row in self.rows if row.best is not None), None)

    @property
    def fastest(self) -> PlanRow | None:
        """The row with the shortest step, of equal ones the first."""
        with_layout = [(row.best.step_time_s, row.gpus, row) for row in self.rows if row.best is not None]
        return min(with_layout, key=lambda one: one[:2])[2] if with_layout else None


@dataclass(frozen=True)
class PlanQuestion:
    """The layouts of a plan, and which numbers of GPUs it asks about.

    ``counts``: a list of them, or a range whose whole nodes are tried; None: all that could be enough. ``days``: a run
    of ``training.total_tokens`` is to take no longer, and the fewest GPUs are asked for; None: every number is.
    ``more``: so many larger numbers with a legal layout are tried too. ``settings``: values of the varied keys.
    """

    choices: LayoutChoices
    counts: Sequence[int] | CountRange | None
    days: float | None = None
    more: int = 0
    settings: Sequence[Mapping[str, Any]] = ({},)

    def parts(self, evaluator: Evaluator, watch: Callable[[int], SearchWatch]) -> Iterator[SettingRows]:
        """Yield the rows of every setting; ``watch`` returns the listeners of a search.

        Raises `InputError` on what cannot be used, before the first search.
        """
        each = [(setting, self._checked(setting)) for setting in self.settings]
        for setting, base in each:
            blank = self._search(setting, 1, self._slowest_s(base))
            numbers, too_few = self._counts_of(base, blank.slowest_s)
            rows = tuple(self._rows(setting, base, numbers, blank, evaluator, watch))
            yield SettingRows(setting, rows, too_few, base.cluster.gpus_per_node)

    def not_searched(self, part: SettingRows) -> Iterator[str]:
        """Yield which numbers of GPUs the rows of a setting leave out, and why; those too few for a range aside."""
        if not part.rows:
            return
        first, last = part.rows[0].gpus, part.rows[-1].gpus
        enough = None if self.days is None or part.fewest is None else f"as {part.fewest.gpus:,} are enough"
        if self.counts is not None and not isinstance(self.counts, CountRange):
            if larger := sorted({gpus for gpus in self.counts if gpus > last}):
                yield f"{', '.join(f'{gpus:,}' for gpus in larger)}, {enough}"
            return
        if part.per_node > 1:
            yield f"numbers that fill neither whole nodes of {part.per_node} nor an even part of one"
        if self.counts is None and first > 1:
            yield f"fewer than {first:,}, which are too few even at their peak"
        if enough and (self.counts is None or self.counts.most > last):
            yield f"more than {last:,}, {enough}"
        elif self.counts is None:
            yield f"more than {last:,}, as far as a plan without --gpus goes"

    def _search(self, setting: Mapping[str, Any], gpus: int, slowest_s: float = math.inf) -> LayoutSearch:
        choices = replace(self.choices, changes={**self.choices.changes, **setting})
        return LayoutSearch(choices, gpus, top=1, slowest_s=slowest_s)

    def _checked(self, setting: Mapping[str, Any]) -> Workload:
        """Return the workload of a setting. Raises `InputError` where it, or a number of GPUs, cannot be used."""
        listed = () if self.counts is None or isinstance(self.counts, CountRange) else self.counts
        workload, changes = self.choices.workload, self.choices.changes
        load_workload(workload, changes)
        load_workload(workload, {**changes, **setting}, by="--vary")
        base = self._search(setting, 1).prepared().variants.workload
        for gpus in listed:
            self._search(setting, gpus).prepared()
        slowest_s = self._slowest_s(base)
        if self.counts is None and least_gpus(base, slowest_s) > (most := most_gpus(base) or MAX_GPUS):
            least = f"{counted(least_gpus(base, slowest_s), 'GPU')} or more are needed even at their peak"
            raise InputError(
                least, file="days", found=f"{self.days:g}", allowed=f"as of {counted(most, 'GPU')} at most"
            )
        if isinstance(self.counts, CountRange) and next(whole_nodes(base, self.counts), None) is None:
            ends = f"{self.counts.least}..{self.counts.most}"
            size = f"whole nodes of {counted(base.cluster.gpus_per_node, 'GPU')}, or an even part of one"
            size += f"; the cluster has {base.cluster.n_gpus:,}" if most_gpus(base) else ""
            raise InputError("has no number that could be tried", file="gpus", found=ends, allowed=size)
        return base

    def _rows(
        self,
        setting: Mapping[str, Any],
        base: Workload,
        numbers: Iterable[int],
        blank: LayoutSearch,
        evaluator: Evaluator,
        watch: Callable[[int], SearchWatch],
    ) -> Iterator[PlanRow]:
        """Yield the rows of a setting: until the first number of GPUs that is enough, if that is the question."""

        def row_on(gpus: int, search: LayoutSearch) -> PlanRow:
            result = replace(search, gpus=gpus).result(evaluator, watch(gpus), compare_own=False)
            return PlanRow(setting, result, search.slowest_s)

        left, last = self.more, 0
        for last in numbers:
            row = row_on(last, blank)
            yield row
            if self.days is not None and row.best is not None:
                break
        following = CountRange(last + 1, last * MOST_TIMES_LEAST) if last else None
        for gpus in whole_nodes(base, following) if following is not None and left else ():
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

    def _counts_of(self, base: Workload, slowest_s: float) -> tuple[Iterable[int], tuple[int, ...]]:
        """Return the numbers of GPUs to try, ascending, and those of a range that are too few even at the peak.

        Numbers that are listed are all tried.
        """
        if self.counts is not None and not isinstance(self.counts, CountRange):
            return sorted(set(self.counts)), ()
        floor = 1 if math.isinf(slowest_s) else least_gpus(base, slowest_s)
        if self.counts is None:
            return whole_nodes(base, CountRange(floor, floor * MOST_TIMES_LEAST)), ()
        asked = list(whole_nodes(base, self.counts))
        return [gpus for gpus in asked if gpus >= floor], tuple(gpus for gpus in asked if gpus < floor)

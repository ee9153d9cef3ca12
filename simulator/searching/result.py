"""The result of a search: the ranking, what is proven of it, and why every other layout lost."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from simulator.config import load_workload
from simulator.errors import InputError, each, in_one_line
from simulator.output.search_files import write_csv
from simulator.output.search_table import (
    LostLayouts,
    SearchRow,
    SearchView,
    changed_keys,
    layout_text,
    search_summary,
)
from simulator.output.sweep_table import setting_text
from simulator.results import Result
from simulator.searching.branch_and_bound import Ranking, SimulatedLayout, pareto_front
from simulator.searching.candidates import BoundedSpace, Candidate
from simulator.searching.space import LayoutSpace, value_at
from simulator.sweeping.outcome import PointOutcome
from simulator.sweeping.point import Source, source_name
from simulator.units import counted, format_gib, format_time

#: Keys that tables always show.
DEGREES = ("parallelism.tp", "parallelism.pp", "parallelism.dp", "parallelism.ep")

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, repr=False)
class SearchResult(Result):
    """Result of a search for layouts of ``workload`` on ``gpus`` GPUs.

    ``changes``: what all layouts change. ``top``: how many were to be proven. ``file_layout``: outcome of the file's
    own, where it is for so many GPUs. ``seconds``: wall time until all layouts had bounds, and until the end.
    ``kept``: how many outcomes were in the database before.
    """

    command: ClassVar[str] = "search"

    workload: Source
    gpus: int
    changes: Mapping[str, Any]
    space: LayoutSpace
    bounded: BoundedSpace
    ranking: Ranking
    top: int
    file_layout: PointOutcome | None
    seconds: tuple[float, float]
    kept: int = 0

    @property
    def best(self) -> SimulatedLayout | None:
        """The fastest layout that was simulated and fits."""
        return self.ranking.fitting[0] if self.ranking.fitting else None

    @property
    def is_proven(self) -> bool:
        """No layout without a simulated step can be among the first ``top``."""
        return not self.out_of_time and not (self.ranking.failed and self.ranking.failed_bound_s < self._last_s)

    @property
    def out_of_time(self) -> bool:
        """The time was over before all layouts were looked at that can be among the first ``top``."""
        return not self.bounded.complete or (self._n_left > 0 and self.ranking.next_bound_s < self._last_s)

    @property
    def _last_s(self) -> float:
        """Step time of the last of the first ``top``; infinite where fewer fit."""
        fitting = self.ranking.fitting
        return fitting[self.top - 1].step_time_s if len(fitting) >= self.top else math.inf

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the file's own layout the best one is."""
        step_time_s = None if self.file_layout is None else self.file_layout.figures.get("step_time_s")
        return None if step_time_s is None or self.best is None else float(step_time_s) / self.best.step_time_s

    @property
    def _n_left(self) -> int:
        return len(self.bounded.fitting) - len(self.ranking.simulated)

    @cached_property
    def lost(self) -> LostLayouts:
        """Why layouts are not in the ranking."""
        unfit = [one for one in self.ranking.simulated if one.outcome.figures.get("fits") is False]
        none = [one for one in self.ranking.simulated if not one.outcome.figures]
        too_large = self.bounded.too_large
        return LostLayouts(
            skipped=dict(self.space.skipped.most_common()),
            refused=dict(self.bounded.refusals.counts.most_common()),
            too_large=len(too_large),
            least_lacking_bytes=too_large[0].bound.memory_bytes - self.bounded.capacity_bytes if too_large else 0.0,
            unfit=len(unfit),
            without_figures=len(none),
            bounded=self._n_left,
            next_bound_s=self.ranking.next_bound_s,
            slower=max(len(self.ranking.fitting) - self.top, 0),
        )

    @cached_property
    def warnings(self) -> list[str]:
        """Gaps of the proof, and warnings of the layouts in the ranking."""
        texts = [] if self.is_proven else [self._unproven()]
        shown, places = self.ranking.fitting[: self.top], dict[str, list[int]]()
        for place, one in enumerate(shown, start=1):
            for text in dict.fromkeys(one.outcome.warnings):
                places.setdefault(text, []).append(place)
        if failed := self.ranking.failed:
            texts.append(f"{counted(len(failed), 'layout')} broke the simulator: {failed[0].outcome.error}")
        return [*texts, *(f"{_places(numbers, len(shown))}{text}" for text, numbers in places.items())]

    def _unproven(self) -> str:
        if not self.bounded.complete:
            return "the time was over before all layouts had bounds: the ranking is of those that were looked at first"
        ranking = self.ranking
        n_proven = ranking.n_proven
        places = "the first place is" if n_proven == 1 else f"the first {n_proven} places are"
        proven = f"{places if n_proven else 'no place of the ranking is'} proven"
        if self.out_of_time:
            left = _layouts_of(self._n_left, ranking.next_bound_s)
            return f"the time was over before {left} {'was' if self._n_left == 1 else 'were'} simulated: {proven}"
        return f"{_layouts_of(len(ranking.failed), ranking.failed_bound_s)} could not be simulated: {proven}"

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The degrees of the layout, and all keys in which layouts that are shown differ, or from the file's."""
        shown = [*self.ranking.fitting[: self.top], *pareto_front(self.ranking)]
        layouts = {one.candidate.number: one.candidate.changes for one in shown}
        differing = changed_keys([*layouts.values(), *self._own_values()])
        return tuple(one.key for one in self.space.dimensions if one.key in DEGREES or one.key in differing)

    def _own_values(self) -> list[Mapping[str, Any]]:
        """Return the layout of the file as far as the space has it."""
        return [one.changes for one in (*self.bounded.fitting, *self.bounded.too_large) if one.is_own][:1]

    @cached_property
    def rows(self) -> tuple[SearchRow, ...]:
        """A flat mapping per legal layout: its keys, ``status``, bounds and figures; those of the ranking first."""
        simulated = {one.candidate.number for one in self.ranking.simulated}
        left = [one for one in self.bounded.fitting if one.number not in simulated]
        return (
            *(self._row(one.candidate, self._status(one), one.outcome) for one in self.ranking.simulated),
            *(self._row(one, "not simulated" if self.out_of_time else "bound is too slow") for one in left),
            *(self._row(one, "does not fit") for one in self.bounded.too_large),
        )

    @staticmethod
    def _status(one: SimulatedLayout) -> str:
        fits = one.outcome.figures.get("fits")
        return str(one.outcome.status) if fits is None else "simulated" if fits else "simulated, does not fit"

    def _row(self, one: Candidate, status: str, outcome: PointOutcome | None = None) -> SearchRow:
        return {
            "workload": source_name(self.workload),
            **one.changes,
            "status": status,
            "error": (outcome.error or None) if outcome else None,
            "key": outcome.key if outcome else None,
            "least_step_time_s": one.bound.step_time_s,
            "least_memory_bytes": one.bound.memory_bytes,
            **(outcome.figures if outcome else {}),
        }

    def command_line(self, one: SimulatedLayout) -> str | None:
        """Return the command that simulates a layout; None of a workload that is a mapping, which no command reads."""
        if isinstance(self.workload, Mapping):
            return None
        texts = [
            f"--set {shlex.quote(f'{key}={setting_text(value, key)}')}"
            for key, value in self._settings(one, self.workload).items()
        ]
        return " ".join(["llmsim run", shlex.quote(source_name(self.workload)), *texts])

    def _settings(self, one: SimulatedLayout, file: str | Path) -> Mapping[str, Any]:
        """Return the fewest changes of the workload that make it a layout: those that are not the file's anyway."""
        everything = {**self.changes, **one.candidate.changes}
        layout, base = load_workload(file, everything), self.space.variants.workload
        needed = {key: value for key, value in everything.items() if value_at(layout, key) != value_at(base, key)}
        needed = {**self.changes, **needed}
        without_nodes = {key: value for key, value in needed.items() if key != "cluster.nodes"}
        for settings in (without_nodes, needed):
            try:
                same = load_workload(file, settings)
            except InputError:
                continue
            if all(getattr(same, name) == getattr(layout, name) for name in ("parallelism", "training", "cluster")):
                return settings
        return everything

    def content(self) -> dict[str, Any]:
        """Return the ranking under the names of the JSON output, the Pareto front, and why other layouts lost."""
        lost, outcome = self.lost, self.file_layout
        return {
            "workload": source_name(self.workload),
            "set": dict(self.changes),
            "n_gpus": self.gpus,
            "keys": [one.key for one in self.space.dimensions],
            "layouts": {
                "legal": self.bounded.n_legal,
                "simulated": len(self.ranking.simulated),
                "kept": self.kept,
                "skipped_by_key": lost.skipped,
                "refused_by_key": lost.refused,
                "do_not_fit": lost.too_large,
                "least_lacking_bytes": lost.least_lacking_bytes,
                "simulated_do_not_fit": lost.unfit,
                "without_figures": lost.without_figures,
                "not_simulated": lost.bounded,
                "next_bound_s": lost.next_bound_s if lost.bounded else None,
            },
            "proven": self.is_proven,
            "n_proven": self.ranking.n_proven,
            "ranking": [self._entry(one) for one in self.ranking.fitting[: self.top]],
            "pareto": [self._entry(one) for one in pareto_front(self.ranking)],
            "own": None if outcome is None else dict(outcome.figures) or {"error": outcome.error},
            "speedup": self.speedup,
            "command_line": None if self.best is None else self.command_line(self.best),
            "bounds_wall_s": self.seconds[0],
            "wall_s": self.seconds[1],
        }

    @staticmethod
    def _entry(one: SimulatedLayout) -> dict[str, Any]:
        bound = one.candidate.bound
        return {
            "set": dict(one.candidate.changes),
            "bound": {"step_time_s": bound.step_time_s, "memory_bytes": bound.memory_bytes},
            "figures": dict(one.outcome.figures),
            "wall_s": one.outcome.wall_s,
        }

    def why(self, settings: Mapping[str, Any]) -> list[str]:
        """Return why layouts with these values of dotted keys are not first, in a few lines.

        Keys that are left out may have any value of the space. Raises `InputError` on a key that is none of it.
        """
        keys = [one.key for one in self.space.dimensions]
        for key in settings:
            if key not in keys:
                raise InputError("is no key of the search", file="why", found=key, allowed=", ".join(keys))
        alike = [one for one in self._legal() if all(one.changes[key] == value for key, value in settings.items())]
        if not alike:
            return [self._refusal(settings)]
        reasons = [f"{counted(len(alike), 'legal layout')} {'has' if len(alike) == 1 else 'have'} these values"]
        places = {one.candidate.number: place for place, one in enumerate(self.ranking.simulated, 1)}
        reasons += [self._place(places[one.number]) for one in alike if one.number in places][:1]
        if not any(one.number in places for one in alike):
            reasons += self._bound_lines(alike)
        return reasons

    def _legal(self) -> Iterator[Candidate]:
        yield from (one.candidate for one in self.ranking.simulated)
        numbers = {one.candidate.number for one in self.ranking.simulated}
        yield from (one for one in self.bounded.fitting if one.number not in numbers)
        yield from self.bounded.too_large

    def _place(self, place: int) -> str:
        one = self.ranking.simulated[place - 1]
        figures = one.outcome.figures
        if not figures:
            return f"the first of them could not be simulated: {one.outcome.error}"
        if not figures["fits"]:
            return f"the first of them does not fit: it lacks {format_gib(-figures['headroom_bytes'])}"
        return f"the fastest of them takes {format_time(figures['step_time_s'])}, place {place} of those simulated"

    def _bound_lines(self, alike: list[Candidate]) -> list[str]:
        fitting = [one for one in alike if one.bound.memory_bytes <= self.bounded.capacity_bytes]
        if not fitting:
            lacking = min(one.bound.memory_bytes for one in alike) - self.bounded.capacity_bytes
            return [f"none of them fits: each lacks {format_gib(lacking)} or more"]
        least = min(one.bound.step_time_s for one in fitting)
        best = [] if self.best is None else [f"the best takes {format_time(self.best.step_time_s)}"]
        return [", ".join([f"a step of any that may fit takes {format_time(least)} or more", *best])]

    def _refusal(self, settings: Mapping[str, Any]) -> str:
        """Return which rule refuses these values beside those of the best layout, or why they were not tried."""
        beside = self.best.candidate.changes if self.best else next((one.changes for one in self._legal()), {})
        try:
            self.space.variants.variant({**beside, **settings})
        except InputError as error:
            rule = in_one_line(each(error)[0][0])
            return f"no legal layout has these values. Beside {layout_text(dict(beside))}: {rule}"
        return "no layout of the space has these values: --fix, --limit or the number of GPUs leave them out"

    def save_csv(self, path: str | Path) -> None:
        """Write a CSV file, a row per legal layout, those of the ranking first."""
        write_csv(self.rows, tuple(one.key for one in self.space.dimensions), Path(path))

    def view(self) -> SearchView:
        """Return what tables show."""
        counts = f"{counted(self.bounded.n_legal, 'legal layout')} on {counted(self.gpus, 'GPU')}"
        simulated = f"{len(self.ranking.simulated):,} simulated"
        return SearchView(
            head=f"{source_name(self.workload)}: {counts}, {simulated}",
            keys=self.keys,
            ranking=[self._ranked(one) for one in self.ranking.fitting[: self.top]],
            front=[self._ranked(one) for one in pareto_front(self.ranking)],
            n_proven=self.ranking.n_proven,
            lost=self.lost,
            foot=list(self._foot()),
        )

    def _ranked(self, one: SimulatedLayout) -> SearchRow:
        return self._row(one.candidate, self._status(one), one.outcome)

    def _foot(self) -> Iterator[str]:
        """Yield lines on the time that it took, on the best layout, and how it compares with the file's own."""
        yield f"Bounds took {format_time(self.seconds[0])}, all of it {format_time(self.seconds[1])}."
        if self.best is None:
            yield "No layout of the space fits in memory." if self.is_proven else "None of those simulated fits."
            return
        figures = None if self.file_layout is None else self.file_layout.figures
        if self.best.candidate.is_own:
            yield "The first is the file's own layout."
        elif figures and self.speedup is not None:
            unfit = "" if figures["fits"] else ", which does not fit in memory"
            layout = f"the file's own layout ({format_time(figures['step_time_s'])}{unfit})"
            yield f"The first is {self.speedup:.3f} times as fast as {layout}."
        if (command := self.command_line(self.best)) is not None:
            yield f"To see it: {command}"

    def summary(self) -> RenderableType:
        """Return the results as tables for a terminal."""
        return search_summary(self.view())

    def __repr__(self) -> str:
        """Return how many layouts there are, and the best of them."""
        counts = f"{self.bounded.n_legal:,} legal layouts on {counted(self.gpus, 'GPU')}"
        first = f"{counts}, {len(self.ranking.simulated):,} simulated"
        if self.best is None:
            return f"{first}: none fits"
        layout = layout_text(dict(self.best.candidate.changes))
        return f"{first}\nbest step time {format_time(self.best.step_time_s)}: {layout}"


def _layouts_of(count: int, least_s: float) -> str:
    """Return so many layouts, and their least step time.

    >>> _layouts_of(1, 1.18), _layouts_of(2, 0.5)
    ('1 layout whose step takes 1.18 s or more', '2 layouts whose steps take 500.00 ms or more')
    """
    steps = "step takes" if count == 1 else "steps take"
    return f"{counted(count, 'layout')} whose {steps} {format_time(least_s)} or more"


def _places(numbers: Sequence[int], shown: int) -> str:
    """Return the places of a ranking that a warning is about; an empty text where all ``shown`` places are meant.

    >>> _places([1, 3], 5), _places([2], 5), _places([1, 2], 2)
    ('places 1, 3: ', 'place 2: ', '')
    """
    if len(numbers) == shown:
        return ""
    return f"place{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}: "

"""The result of a plan: a row per number of GPUs and setting, the fewest GPUs that are enough, and Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from simulator.output.plan_table import PlanView, plan_summary, setting_words
from simulator.output.search_files import write_csv
from simulator.output.search_table import SearchRow, changed_keys, layout_text
from simulator.planning.plan_rows import PlanQuestion, PlanRow, SettingRows
from simulator.results import Result
from simulator.searching.pareto import losses, undominated
from simulator.searching.result import DEGREES
from simulator.sweeping.point import source_name
from simulator.units import counted, format_gib, format_time

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Rules that are told of a number of GPUs without a legal layout.
_MOST_WARNINGS = 5
#: Figures of a Pareto front.
_WEIGHED = ("step_time_s", "headroom_bytes", "n_gpus", "cost")
#: Why numbers of GPUs are not searched.
_TOO_FEW = "too few even if each computed at its peak all the time"


@dataclass(frozen=True, repr=False)
class PlanResult(Result):
    """Result of a plan. ``parts``: rows by setting. ``kept``: how many outcomes were in the database before."""

    command: ClassVar[str] = "plan"

    question: PlanQuestion
    parts: tuple[SettingRows, ...]
    kept: int = 0

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The rows of all settings."""
        return tuple(row for part in self.parts for row in part.rows)

    @cached_property
    def warnings(self) -> list[str]:
        """Layouts that broke the simulator, and warnings of the best layouts, each once."""
        warnings = dict.fromkeys(text for row in self.rows if row.best for text in row.best.outcome.warnings)
        broken = [text for row in self.rows for text in row.search.warnings if "broke the simulator" in text]
        rest = len(warnings) - _MOST_WARNINGS
        shown = list(warnings)[:_MOST_WARNINGS]
        return [*broken, *shown, *([f"and {rest:,} other warnings"] if rest > 0 else [])]

    def rows_of(self, setting: Mapping[str, Any]) -> list[PlanRow]:
        """Return the rows of a setting, fewest GPUs first."""
        return list(self._part(setting).rows)

    def fewest(self, setting: Mapping[str, Any]) -> PlanRow | None:
        """Return the row with the fewest GPUs that are fast enough, of a setting."""
        return self._part(setting).fewest

    def _part(self, setting: Mapping[str, Any]) -> SettingRows:
        return next(part for part in self.parts if part.setting == setting)

    def pareto(self, setting: Mapping[str, Any]) -> list[SearchRow]:
        """Return the simulated layouts of a setting than which no other is as good in all of four figures.

        These are step time, memory left, GPUs and, with a price, cost. The fastest is first.
        """
        return _pareto(self._part(setting))

    def content(self) -> dict[str, Any]:
        """Return settings and rows under the names of the JSON output."""
        question = self.question
        return {
            "workload": source_name(question.choices.workload),
            "set": dict(question.choices.changes),
            "days": question.days,
            "kept": self.kept,
            "settings": [
                {
                    "set": dict(part.setting),
                    "fewest_gpus": None if question.days is None or part.fewest is None else part.fewest.gpus,
                    "too_few_gpus": list(part.too_few),
                    "not_searched": list(question.not_searched(part)),
                    "rows": [self._entry(row) for row in part.rows],
                    "pareto": [dict(one) for one in _pareto(part)],
                }
                for part in self.parts
            ],
        }

    def _entry(self, row: PlanRow) -> dict[str, Any]:
        best = row.best
        return {
            "n_gpus": row.gpus,
            "legal_layouts": row.search.bounded.n_legal,
            "simulated": len(row.search.ranking.simulated),
            "layout": None if best is None else dict(best.candidate.changes),
            "figures": None if best is None else dict(best.outcome.figures),
            "why": why_not(row) or None,
            "command_line": None if best is None else row.search.command_line(best),
        }

    @cached_property
    def table_rows(self) -> tuple[SearchRow, ...]:
        """A flat mapping per row: the setting, GPUs, layout, and figures of the best, or why there is none.

        ``speedup``: tokens per second over those of the first row that has figures.
        """
        table: list[SearchRow] = []
        first: Mapping[str, Any] = {}
        for row in self.rows:
            figures = row.best.outcome.figures if row.best else {}
            first = first or figures
            gain = {"speedup": figures["tokens_per_s"] / first["tokens_per_s"]} if figures else {}
            layout = dict(row.best.candidate.changes) if row.best else {}
            status = {"status": "simulated" if figures else why_not(row)}
            key = {"key": row.best.outcome.key} if row.best else {}
            source = {"workload": source_name(self.question.choices.workload)}
            table.append({**source, **row.setting, **layout, **figures, **gain, **status, **key, "n_gpus": row.gpus})
        return tuple(table)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The degrees of layouts, and the keys in which those that are shown differ."""
        layouts = [row.best.candidate.changes for row in self.rows if row.best]
        if layouts and len(self.parts) == 1:
            layouts += [{key: one[key] for key in layouts[0]} for one in _pareto(self.parts[0])]
        differing = changed_keys(layouts) if len(layouts) > 1 else ()
        return tuple(key for key in (layouts[0] if layouts else ()) if key in DEGREES or key in differing)

    def save_csv(self, path: str | Path) -> None:
        """Write a CSV file, a row per number of GPUs and setting."""
        varied = tuple(self.question.settings[0])
        layout = next((tuple(row.best.candidate.changes) for row in self.rows if row.best), ())
        write_csv(self.table_rows, (*varied, *layout), Path(path))

    def summary(self) -> RenderableType:
        """Return the results as tables for a terminal."""
        return plan_summary(self.summary_view())

    def summary_view(self) -> PlanView:
        """Return the contents of the tables."""
        question = self.question
        several = len(question.settings) > 1
        return PlanView(
            head=f"{source_name(question.choices.workload)}: {'; '.join(self._head())}",
            varied=tuple(question.settings[0]) if several else (),
            keys=self.keys,
            rows=[row for row in self.table_rows if row["status"] == "simulated"],
            without=self._without(),
            front=[] if several else self.pareto(question.settings[0]),
            foot=list(self._foot()),
        )

    def _head(self) -> Iterator[str]:
        """Yield the answer where the fewest GPUs were asked for, and how much was looked at."""
        question = self.question
        unit = "day" if question.days == 1 else "days"
        for part in self.parts if question.days is not None else ():
            condition, fewest = _with(part.setting), part.fewest
            if fewest is None:
                yield f"no number of GPUs that was tried is enough for {question.days:g} {unit}{condition}"
            else:
                yield f"the fewest for {question.days:g} {unit}{condition} are {counted(fewest.gpus, 'GPU')}"
        simulated = sum(len(row.search.ranking.simulated) for row in self.rows)
        yield f"{counted(len(self.rows), 'search', 'es')}, {counted(simulated, 'layout')} simulated"

    def _without(self) -> list[tuple[Mapping[str, Any], str, str]]:
        """Return the numbers of GPUs without a layout: setting, numbers and reason; neighbours alike stand together."""
        reasons: list[tuple[Mapping[str, Any], list[int], str]] = []
        for part in self.parts:
            if part.too_few:
                reasons.append((part.setting, list(part.too_few), _TOO_FEW))
            for row in part.rows:
                why = why_not(row)
                if why and reasons and reasons[-1][0] == row.setting and reasons[-1][2] == why:
                    reasons[-1][1].append(row.gpus)
                elif why:
                    reasons.append((row.setting, [row.gpus], why))
        return [(setting, _numbers(gpus), why) for setting, gpus, why in reasons]

    def _foot(self) -> Iterator[str]:
        """Yield of each setting what was not searched, and the command that shows the answer.

        That is the fewest GPUs for the days, or the fastest.
        """
        for part in self.parts:
            if left_out := "; ".join(self.question.not_searched(part)):
                yield f"Numbers of GPUs not searched{_with(part.setting)}: {left_out}."
            row = part.fastest if self.question.days is None else part.fewest
            command = None if row is None or row.best is None else row.search.command_line(row.best)
            if row is not None and command is not None:
                yield f"To see {counted(row.gpus, 'GPU')}{_with(part.setting)}: {command}"

    def __repr__(self) -> str:
        """Return the answer, and the best layout of every row."""
        lines = [
            f"{counted(row.gpus, 'GPU')}: {format_time(best.step_time_s)}, {layout_text(dict(best.candidate.changes))}"
            for row in self.rows
            if (best := row.best)
        ]
        return "\n".join(["; ".join(self._head()), *lines])


def _with(setting: Mapping[str, Any]) -> str:
    return f" with {setting_words(setting)}" if setting else ""


def _pareto(part: SettingRows) -> list[SearchRow]:
    layouts = [
        {"n_gpus": row.gpus, **one.candidate.changes, **one.outcome.figures}
        for row in part.rows
        for one in row.search.ranking.fitting
    ]
    return undominated(layouts, lambda one: losses(one, _WEIGHED))


def why_not(row: PlanRow) -> str:
    """Return why a number of GPUs has no layout in the plan; nothing where it has one."""
    if row.best is not None:
        return ""
    search = row.search
    if not row.is_legal:
        refused = next(iter(search.bounded.refusals.examples.values()), None)
        return "no legal layout" if refused is None else f"no legal layout: {refused[0][1]}"
    if search.best is not None:
        return f"the fastest is too slow: {_late(search.best.step_time_s, '', row)}"
    late = _late(search.ranking.next_bound_s, " or more", row)
    if math.isfinite(row.slowest_s) and search.ranking.next_bound_s > row.slowest_s and search.lost.bounded:
        return f"all that may fit are too slow: {late}"
    which = "none that could be simulated" if search.ranking.failed else "none"
    return f"{which} fits in memory{_lacking(row)}"


def _late(step_time_s: float, least: str, row: PlanRow) -> str:
    return f"{format_time(step_time_s)}{least} a step, {step_time_s / row.slowest_s:.3g} times the time that there is"


def _lacking(row: PlanRow) -> str:
    search = row.search
    headrooms = [one.outcome.figures["headroom_bytes"] for one in search.ranking.simulated if one.outcome.figures]
    lacking = [-nbytes for nbytes in headrooms if nbytes < 0]
    lacking += [search.lost.least_lacking_bytes] if search.lost.too_large else []
    return f": each lacks {format_gib(min(lacking))} or more" if lacking else ""


def _numbers(gpus: Sequence[int]) -> str:
    """Return ascending numbers as a user would say them: the ends alone of three or more with the same steps.

    >>> _numbers([8]), _numbers([8, 16, 24]), _numbers([8, 64, 512]), _numbers([1, 2, 4, 8, 16, 24])
    ('8', '8 to 24', '8, 64, 512', '1, 2, 4, 8 to 24')
    """
    texts: list[str] = []
    first = 0
    while first < len(gpus):
        last = min(first + 1, len(gpus) - 1)
        while last + 1 < len(gpus) and gpus[last + 1] - gpus[last] == gpus[first + 1] - gpus[first]:
            last += 1
        if last - first < 2:
            last = first
        texts.append(f"{gpus[first]:,}" if last == first else f"{gpus[first]:,} to {gpus[last]:,}")
        first = last + 1
    return ", ".join(texts)

"""A layout that fits, found by a search of what the users of a framework choose among."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from simulator.config import load_workload
from simulator.config.training import Training
from simulator.drafting.methods import METHODS
from simulator.errors import InputError
from simulator.searching.branch_and_bound import SimulatedLayout
from simulator.searching.entry import search
from simulator.searching.layout_search import SearchWatch
from simulator.searching.result import SearchResult
from simulator.units import counted, format_gib

#: Share of a GPU's memory that a proposed layout leaves free if any does: figures of memory are met within 6 % in the
#: mean (docs/how-to/fit.md).
SPARE = 0.05
#: Places of the ranking among which one is looked for that leaves so much; more where none of the first does.
_PLACES, _MORE_PLACES = 3, 12
#: Tokens per sequence from which on sequences are split over ranks too.
_LONG = 32768
_MOST_SEQUENCES = 8


@dataclass(frozen=True)
class ProposedLayout:
    """A layout that fits. ``changes``: its keys with their values. ``figures``: of its simulated step.

    ``n_legal`` layouts were weighed, ``n_simulated`` of them simulated. ``in_time``: none that is left can be faster.
    """

    changes: Mapping[str, Any]
    figures: Mapping[str, Any]
    n_legal: int
    n_simulated: int
    in_time: bool

    @property
    def spare(self) -> float:
        """Share of a GPU's memory that is left."""
        return float(self.figures["headroom_bytes"] / self.figures["capacity_bytes"])


def proposed_layout(
    data: Mapping[str, Any], gpus: int, budget_s: float, jobs: int | None, watch: SearchWatch | None
) -> ProposedLayout:
    """Return the fastest layout of a workload's data that leaves `SPARE` of memory, or else the fastest that fits.

    Only those count that were simulated.

    ``budget_s`` and ``jobs``: as of `search`. Raises `InputError` where none fits, and says what would.
    """
    base = load_workload(data)
    fix: dict[str, list[Any]] = {
        "cp": [1] if base.training.seq < _LONG else [1, 2, 4, 8],
        "schedule": ["1f1b"],
        "vpp": [1],
        "etp": [1],
    }
    per_node = max(node.gpus.count for node in base.cluster.kinds)
    limit = {"tp": (1, per_node), "micro_batch": (1, _MOST_SEQUENCES)}
    choices = {**fix, **base.software.habits.values}
    if not base.model.keeps_scores:
        choices["recompute"] = [value for value in choices["recompute"] if value != "selective"]
    if gpus == 1:  # nothing is shared
        choices["zero"] = choices["zero"][:1]
    ends_s = monotonic() + budget_s
    with TemporaryDirectory() as folder:  # the second search simulates nothing again
        look = partial(
            search, data, gpus=gpus, fix=choices, limit=limit, jobs=jobs, watch=watch, out=Path(folder) / "layouts.db"
        )
        first = look(top=_PLACES, budget_s=budget_s)
        if not first.ranking.fitting:
            raise _nothing_fits(first, base.training)
        left_s = ends_s - monotonic()
        again = not any(map(_leaves_enough, first.ranking.fitting)) and left_s > 0
        results = [first, look(top=_MORE_PLACES, budget_s=left_s)] if again else [first]
    return _proposed(results)


def _proposed(results: Sequence[SearchResult]) -> ProposedLayout:
    """Return the layout that searches of one space propose together, each of which time may have ended."""
    simulated = {one.candidate.number: one for result in results for one in result.ranking.simulated}
    in_order = sorted(simulated.values(), key=lambda one: (one.step_time_s, one.candidate.number))
    fitting = [one for one in in_order if isfinite(one.step_time_s)]
    best = next(filter(_leaves_enough, fitting), fitting[0])
    return ProposedLayout(
        changes=best.candidate.changes,
        figures=best.outcome.figures,
        n_legal=max(result.bounded.n_legal for result in results),
        n_simulated=len(simulated),
        in_time=any(best.step_time_s <= result.ranking.next_bound_s for result in results),
    )


def _leaves_enough(one: SimulatedLayout) -> bool:
    figures = one.outcome.figures
    return bool(figures["headroom_bytes"] >= SPARE * figures["capacity_bytes"])


def _nothing_fits(result: SearchResult, training: Training) -> InputError:
    """Return the error of a job of which no layout fits, or of which none was simulated in time."""
    layouts = counted(result.bounded.n_legal, "layout")
    if result.out_of_time:
        message = (
            f"none of {layouts} was found to fit in time, {counted(len(result.ranking.simulated), 'layout')} simulated"
        )
        return InputError(message, file="--budget-s", fix="a larger one")
    lost, simulated = result.lost, result.ranking.simulated
    lacking = [-one.outcome.figures["headroom_bytes"] for one in simulated if one.outcome.figures]
    lacking += [lost.least_lacking_bytes] if lost.too_large else []
    least = f"; the smallest lacks {format_gib(min(lacking))} on a GPU" if lacking else ""
    failed = result.ranking.failed
    least += f"; {counted(len(failed), 'layout')} broke the simulator" if failed else ""
    fixes = ["more GPUs", "fewer tokens per sequence", *_smaller_methods(training)]
    fix = f"{', '.join(fixes)}, or parallelism.offload by hand (docs/how-to/fit.md)"
    return InputError(f"no layout on {counted(result.gpus, 'GPU')} fits, of {layouts}{least}", fix=fix)


def _smaller_methods(training: Training) -> list[str]:
    """Return the answer that names methods which take less memory than that of a job; none where it has the least."""
    if training.adapters is None:
        return ["training lora or qlora"]
    return [] if training.base == METHODS["qlora"].base else ["training qlora"]

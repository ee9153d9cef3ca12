"""``search``: the fastest layout of a workload on so many GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import Jobs, Json, On, Quiet, Set, options_named
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.cli.shared_database import resumable, said_of_others
from simulator.cli.terminal import progress, say, show, warn

if TYPE_CHECKING:
    from simulator.planning.result import PlanResult
    from simulator.searching.branch_and_bound import SimulatedLayout
    from simulator.searching.layout_search import SearchWatch
    from simulator.searching.result import SearchResult


SearchedWorkload = Annotated[str, typer.Argument(metavar="WORKLOAD", help="A file, or a name in workloads/.")]
GpuCount = Annotated[
    int | None,
    typer.Option(
        "--gpus", metavar="N", help="GPUs that the layouts are for. [those of the workload]", show_default=False
    ),
]
FixedValues = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=V1,V2", help="The only values of a key; KEY alone: the workload's. Repeatable."),
]
NumberLimits = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=MIN..MAX", help="Bounds of a number; either may be left out. Repeatable."),
]
ProvenPlaces = Annotated[int, typer.Option(metavar="K", help="Places of the ranking that are proven.")]
SearchBudget = Annotated[
    float | None, typer.Option("--budget-s", metavar="S", help="Seconds after which no simulation begins. [no end]")
]
LayoutDatabase = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Database of simulated layouts. [WORKLOAD.search.db]", show_default=False
    ),
]
RetriedLayouts = Annotated[
    bool, typer.Option("--retry", help="Try layouts again whose process was killed, or that broke the simulator.")
]
WhyNot = Annotated[
    list[str] | None,
    typer.Option("--why", metavar="KEY=V,...", help="Why layouts with these values are not first. Repeatable."),
]
#: Parameters of `search` and `plan` of which options have the name.
SEARCHED = ("gpus", "fix", "limit", "set", "jobs", "on", "out")
LayoutsCsv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all legal layouts as a CSV table.")]


def command(
    workload: SearchedWorkload,
    gpus: GpuCount = None,
    fix: FixedValues = None,
    limit: NumberLimits = None,
    set_: Set = None,
    top: ProvenPlaces = 10,
    budget_s: SearchBudget = None,
    jobs: Jobs = None,
    on: On = None,
    out: LayoutDatabase = None,
    retry: RetriedLayouts = False,
    why: WhyNot = None,
    json: Json = None,
    csv: LayoutsCsv = None,
    quiet: Quiet = False,
) -> None:
    """Find the fastest layouts that fit, and say why others lost.

    Layouts are tp, cp, pp, dp, ep, etp, micro_batch, schedule, vpp, recompute, zero and sequence_parallel. All else is
    as the workload says. Every legal layout gets lower bounds of its memory and step time. Layouts are simulated in
    the order of their bounds, until no other layout can be among the best. Every simulated one is kept in a database
    at once. The same command again goes on, whatever ended it.

    \b
    Examples:
      llmsim search gpt22b_tp8
      llmsim search gpt175b_3d --gpus 1024 --fix cp=1 --fix tp=4,8 --top 5
      llmsim search llama3_70b --gpus 256 --limit pp=1..8 --budget-s 120
      llmsim search gpt22b_tp8 --gpus 8 --why tp=1,pp=8
    """
    from simulator.config import parse_changes
    from simulator.searching.entry import search
    from simulator.searching.space import whole_key

    out = Path(f"{Path(workload).stem}.search.db") if out is None else out
    check_outputs({"--out": out, "--json": json, "--csv": csv})
    changes = parse_changes(set_ or ())
    questions = [{whole_key(key, "--why"): value for key, value in _settings(text).items()} for text in why or ()]
    seen: list[SimulatedLayout] = []
    named = options_named(*SEARCHED, "top", budget_s="--budget-s")
    with resuming(out, seen, top if shows_summary(json, quiet) else 0), progress("looking for layouts") as far, named:
        result = search(
            workload,
            gpus=gpus,
            fix=fixed_by_key(fix or (), workload, changes),
            limit=limits_by_key(limit or ()),
            set=changes,
            top=top,
            budget_s=math.inf if budget_s is None else budget_s,
            jobs=jobs,
            on=on,
            out=out,
            retry_failed=retry,
            watch=search_watch(far, seen),
        )
    write_layouts(result, workload, out, json, csv, quiet)
    if shows_summary(json, quiet):
        _answer(result, questions)
    warn(result.warnings)


def write_layouts(
    result: SearchResult | PlanResult, workload: str, out: Path, json: Path | None, csv: Path | None, quiet: bool
) -> None:
    """Write the files of a search or a plan of ``workload``, and print its tables; ``out`` is its database."""
    write_json(json, result.to_dict())
    if csv is not None:
        result.save_csv(csv)
    if shows_summary(json, quiet):
        show(result.summary())
        kept = f", {result.kept:,} of them from before" if result.kept else ""
        say(f"Simulated layouts are in {out}{kept}.{said_of_others(out, [workload])}")


def resuming(out: Path, seen: Sequence[SimulatedLayout] = (), top: int = 0) -> AbstractContextManager[None]:
    """End an interrupted block with the ``top`` best of the layouts ``seen``, if any, and how to go on."""
    return resumable(out, lambda: "layouts that were simulated", lambda: _show_seen(seen, top))


def _show_seen(seen: Sequence[SimulatedLayout], top: int) -> None:
    """Print the table of the ``top`` best layouts that were simulated, if there are any."""
    if not seen or not top:
        return
    from simulator.output.search_table import best_so_far, changed_keys

    keys = changed_keys([one.candidate.changes for one in seen])
    least = "least_step_time_s"
    rows = [{**one.candidate.changes, **one.outcome.figures, least: one.candidate.bound.step_time_s} for one in seen]
    show(best_so_far(rows, keys, top))


def search_watch(far: Callable[[str], None], seen: list[SimulatedLayout] | None = None) -> SearchWatch:
    """Return a watch that tells ``far`` how the search goes, and appends to ``seen`` every layout simulated."""
    from simulator.searching.layout_search import SearchWatch

    layouts = [] if seen is None else seen

    def bounded(count: int) -> None:
        if count % 100 == 0:
            far(f"{count:,} layouts have bounds")

    def simulated(one: SimulatedLayout) -> None:
        layouts.append(one)
        fastest = min(one.step_time_s for one in layouts)
        progress_text = "none fits yet" if math.isinf(fastest) else f"best step {fastest:.4g} s"
        far(f"{len(layouts):,} simulated, {progress_text}")

    return SearchWatch(bounded, simulated)


def _answer(result: SearchResult, questions: Sequence[Mapping[str, Any]]) -> None:
    """Print why layouts with some values are not first."""
    from simulator.output.search_table import layout_text

    for settings in questions:
        say(f"Why not {layout_text(settings)}: {'; '.join(result.why(settings))}.")


def limits_by_key(texts: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return key -> least and most of ``--limit``. Raises `InputError`."""
    from simulator.input_files import parse_assignment

    pairs = (parse_assignment(text, "--limit", "parallelism.pp=1..8") for text in texts)
    return {key: _range(key, text) for key, text in pairs}


def _range(key: str, text: str) -> tuple[float, float]:
    """Return the bounds of ``MIN..MAX``. Raises `InputError`."""
    from simulator.errors import InputError

    least, dots, most = text.partition("..")
    try:
        if not dots:
            raise ValueError
        return float(least) if least.strip() else -math.inf, float(most) if most.strip() else math.inf
    except ValueError:
        allowed = f"{key}=MIN..MAX, such as {key}=1..8, {key}=2.. or {key}=..8"
        raise InputError("is no range of numbers", file="--limit", key=key, found=text, allowed=allowed) from None


def fixed_by_key(texts: Sequence[str], workload: str, changes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return key -> values of ``--fix``; of a key alone the workload's own value. Raises `InputError`."""
    from simulator.config import load_workload
    from simulator.config.section import Section
    from simulator.searching.space import value_at, whole_key
    from simulator.sweeping.reading import values_by_key

    values = values_by_key([text for text in texts if "=" in text], "--fix")
    for key in (whole_key(text.strip(), "--fix") for text in texts if "=" not in text):
        value = value_at(load_workload(workload, changes), key)
        values[key] = [value.model_dump(exclude_unset=True) if isinstance(value, Section) else value]
    return values


def _settings(text: str) -> dict[str, Any]:
    """Return the values of ``KEY=V,KEY=V``. Raises `InputError`."""
    from simulator.input_files import parse_assignment, parse_value
    from simulator.sweeping.reading import split_values

    pairs = (parse_assignment(part, "--why", "tp=8,pp=4") for part in split_values(text))
    return {key: parse_value(key, value, "--why") for key, value in pairs}

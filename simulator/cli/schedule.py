"""``schedule``: a pipeline schedule without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import Json, Quiet
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.cli.terminal import show, table, warn
from simulator.errors import InputError, located
from simulator.output.envelope import envelope
from simulator.output.files import writing
from simulator.units import counted

if TYPE_CHECKING:
    from simulator.schedule_alone import ScheduleResult

#: Costs of actions where none are given.
_COST = "F=1,B=2,W=1,comm=0"
_COSTS = {"F": "forward", "B": "backward", "W": "weight", "comm": "comm"}
#: Sizes of a schedule that are options of the same names.
_SIZES = ("stages", "microbatches", "chunks", "zb_memory_limit")
#: Longer orders are cut on the terminal; the JSON has them whole.
_SHOWN_ACTIONS = 40


ScheduleOrFile = Annotated[
    str, typer.Argument(metavar="NAME", help="See: llmsim list schedules. Or the path of a CSV file.")
]
PipelineRanks = Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks. [a file's own]")]
Microbatches = Annotated[int | None, typer.Option(metavar="M", help="Micro-batches per step. [a file's own]")]
Chunks = Annotated[int | None, typer.Option(metavar="V", help="Model chunks per rank. [1; 2 if several]")]
ActionCosts = Annotated[
    str,
    typer.Option(
        metavar=_COST,
        help="Costs of a micro-batch's forward on a rank, of its whole backward, of the weight gradient in that "
        "(left out beside B, half of it), of a transfer. Chunks of a rank share them equally.",
    ),
]
ComparedSchedules = Annotated[list[str] | None, typer.Option(metavar="NAME ...", help="Other schedules beside it.")]
MemoryLimit = Annotated[
    float, typer.Option(metavar="X", help="zb_auto: activations that a rank may hold, as a multiple of 1f1b's peak.")
]
ScheduleGantt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw it as a Gantt chart (.png, .svg or .pdf).")
]
OrderFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write its order as torch.distributed.pipelining does; to be read by NAME."),
]


def command(
    context: typer.Context,
    name: ScheduleOrFile,
    stages: PipelineRanks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    cost: ActionCosts = _COST,
    compare: ComparedSchedules = None,
    zb_memory_limit: MemoryLimit = 1.0,
    json: Json = None,
    gantt: ScheduleGantt = None,
    csv: OrderFile = None,
    quiet: Quiet = False,
) -> None:
    """Play a pipeline schedule without a model.

    Prints the order of its actions, its bubble and how many activations it holds.

    The claim of zb_h2, zb_auto, zb_v and async_1f1b lies across the step boundary, so that several steps are played.
    Their makespan, bubble and picture are those of the steady period between steps.

    \b
    Examples:
      llmsim schedule 1f1b --stages 4 --microbatches 8 --gantt 1f1b.png
      llmsim schedule interleaved --stages 4 --microbatches 8 --chunks 2
      llmsim schedule gpipe --stages 4 --microbatches 8 --compare 1f1b zb_h1
      llmsim schedule zb_auto --stages 4 --microbatches 12 --cost W=0.8,comm=0.05
      llmsim schedule zb_v --stages 4 --microbatches 8 --csv mine.csv
      llmsim schedule mine.csv
    """
    import simulator

    # click gives an option one value; what follows it comes here.
    if context.args and not compare:
        context.fail(f"Got unexpected extra argument ({context.args[0]})")
    names = list(dict.fromkeys([name, *(compare or ()), *context.args]))
    check_outputs(
        {"--json": json, "--gantt": gantt, "--csv": csv},
        {"--csv": (".csv",)},
        inputs=[Path(which) for which in names if which.endswith(".csv")],
    )
    costs = _costs(cost)
    limits = _limits(names, zb_memory_limit)
    with located(_option):
        results = [
            simulator.schedule(
                which, stages, microbatches, _chunks(which, names, chunks), **costs, zb_memory_limit=limits[which]
            )
            for which in names
        ]
    reports = [result.to_dict() for result in results]
    warnings = [f"{result.name}: {note}" for result in results for note in result.warnings] + _unlike_work(results)
    content = reports[0] if len(reports) == 1 else {"schedules": reports}
    if csv is not None and results[0].plan.steady:
        warnings.append(f"{results[0].name}: the file has one step, and is played as one alone when it is read again")
    write_json(json, envelope("schedule", cost=costs) | content | {"warnings": warnings})
    _write(results, csv, gantt)
    if shows_summary(json, quiet):
        _print(reports, costs if cost != _COST else {})
    warn(warnings)


def _option(key: str) -> tuple[str | None, str]:
    """Return the option that gives a parameter of `simulator.schedule`, and the key inside of it."""
    if key in _COSTS:
        return "--cost", key
    return (f"--{key.replace('_', '-')}", "") if key in _SIZES else (None, key)


def _unlike_work(results: Sequence[ScheduleResult]) -> list[str]:
    """Return a warning where schedules that are compared have other numbers of ranks or micro-batches."""
    if len({(result.stages, result.microbatches) for result in results}) == 1:
        return []
    sizes = "; ".join(f"{result.name}: {_work_in_words(result.stages, result.microbatches)}" for result in results)
    return [f"the schedules do not do the same work, so that their makespans do not compare: {sizes}"]


def _work_in_words(ranks: int, microbatches: int) -> str:
    return f"{counted(ranks, 'rank')}, {counted(microbatches, 'micro-batch', 'es')}"


def _write(results: Sequence[ScheduleResult], csv: Path | None, gantt: Path | None) -> None:
    """Write the order of the first schedule and the picture of all, where they are asked for."""
    if csv is not None:
        with writing(csv) as target:
            target.write(results[0].to_csv().encode())
    if gantt is not None:
        from simulator.output.gantt import compare_gantt, save_gantt

        save_gantt(compare_gantt({result.name: result.spans for result in results}, unit="units of cost"), gantt)


def _chunks(which: str, names: Sequence[str], chunks: int | None) -> int | None:
    """Return the chunks that ``--chunks`` gives the schedule ``which`` of ``names``; None: its own number.

    Schedules that let somebody choose take it. Where none of ``names`` does the first takes it, to refuse it.
    """
    from simulator.schedules import SCHEDULES

    fixed = [name for name in names if name in SCHEDULES and SCHEDULES[name].chunks is not None]
    refuses = which == names[0] and len(fixed) == len(names)
    return chunks if refuses or which not in fixed else None


def _limits(names: list[str], limit: float) -> dict[str, float]:
    """Return the limit of each schedule of ``names``: ``limit`` for those that search an order, 1 for others.

    Where none of them searches all have ``limit``, to refuse it.
    """
    from simulator.schedules import SCHEDULES

    searching = [which for which in names if which in SCHEDULES and SCHEDULES[which].search is not None]
    return {which: limit if which in (searching or names) else 1.0 for which in names}


def _costs(text: str) -> dict[str, float]:
    costs: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in _COSTS or not equals:
            raise InputError(
                "unknown cost", file="--cost", found=part, allowed=", ".join(f"{k}=NUMBER" for k in _COSTS)
            )
        if _COSTS[key] in costs:
            raise InputError("is given twice", file="--cost", key=key, found=text, fix="one value")
        try:
            costs[_COSTS[key]] = float(value)
        except ValueError:
            raise InputError("is not a number", file="--cost", key=key, found=value) from None
    costs = {"forward": 1.0, "backward": 2.0, "comm": 0.0} | costs
    costs.setdefault("weight", costs["backward"] / 2)
    return costs


def _print(reports: list[dict[str, Any]], costs: Mapping[str, float]) -> None:
    """Print the orders and the figures of schedules, and the ``costs`` of their actions where some are given."""
    for report in reports:
        title = f"{report['name']}: {_work_in_words(report['stages'], report['microbatches'])}"
        if report["chunks"] > 1:
            title += f", {report['chunks']} chunks per rank"
        rows = [
            {"rank": rank, "held": activations, "order": _short(actions)}
            for rank, (actions, activations) in enumerate(zip(report["order"], report["peak_activations"], strict=True))
        ]
        show(table(rows, title=title))
    rows = [
        {
            "schedule": report["name"],
            "makespan (units of cost)": f"{report['makespan']:g}" + (" (period)" if report["steady_period"] else ""),
            "bubble ratio (idle / busy)": f"{report['bubble_ratio']:.4f}",
            "claimed, free transfers": ""
            if report["bubble_ratio_claimed"] is None
            else f"{report['bubble_ratio_claimed']:.4f}",
            "bubble fraction (idle / all)": f"{report['bubble_fraction']:.4f}",
            "most micro-batches held": f"{max(report['peak_activations']) / report['chunks']:g}",
        }
        for report in reports
    ]
    show(table(rows))
    sizes = {(report["stages"], report["microbatches"]) for report in reports}
    if len(sizes) == 1 and len({report["chunks"] for report in reports}) > 1:
        show("All do the same work: a rank's v chunks cost 1/v of --cost each, a transfer its whole cost.")
    if costs:
        shown = ", ".join(f"{key} {costs[name]:g}" for key, name in _COSTS.items())
        show(f"Costs: {shown}. W is a part of B.")


def _short(actions: list[str]) -> str:
    shown = " ".join(actions[:_SHOWN_ACTIONS])
    more = len(actions) - _SHOWN_ACTIONS
    return f"{shown} ... {more} more" if more > 0 else shown

"""``sweep``: many jobs that differ in a few keys."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.cli.options import Jobs, Json, On, Quiet, Set, options_named
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.cli.shared_database import resumable, said_of_others
from simulator.cli.terminal import progress, progress_bar, say, show, warn
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.output.sweep_figures import SweepRow
    from simulator.sweeping.evaluator import EvaluatedPoint
    from simulator.sweeping.result import SweepResult
    from simulator.sweeping.space import Space

    FinishedPoints = list[EvaluatedPoint]

#: Workloads whose names are in the default name of the database.
_MOST_NAMES = 3


SweptWorkloads = Annotated[list[str], typer.Argument(metavar="WORKLOAD", help="Files, or names in workloads/.")]
GridValues = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=V1,V2", help="Values of a key; all combinations with other options. Repeatable."),
]
ZippedValues = Annotated[
    list[str] | None, typer.Option(metavar="KEY=V1,V2", help="Values of keys that walk together. Repeatable.")
]
PointList = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Points one by one: a CSV table of keys, or a YAML list.")
]
DatabaseFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Database of finished points. [WORKLOAD.sweep.db]", show_default=False),
]
RetryFailed = Annotated[
    bool, typer.Option("--retry", help="Try points again whose process was killed, or that broke the simulator.")
]
SortFigure = Annotated[
    str, typer.Option(metavar="FIGURE", help="Figure by which the table is sorted, and which the plot shows.")
]
MostShown = Annotated[int | None, typer.Option(metavar="N", min=1, help="Points in the table. [all]")]
PointsCsv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all points as a CSV table.")]
PointsParquet = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write all points as a Parquet file (extra `parquet`).")
]
SweepPlot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw --sort over the keys: line, bars or heat map (.png, .svg or .pdf)."),
]


def command(
    workloads: SweptWorkloads,
    grid: GridValues = None,
    zip: ZippedValues = None,
    list: PointList = None,
    set_: Set = None,
    jobs: Jobs = None,
    on: On = None,
    out: DatabaseFile = None,
    retry: RetryFailed = False,
    sort: SortFigure = "step_time_s",
    top: MostShown = None,
    json: Json = None,
    csv: PointsCsv = None,
    parquet: PointsParquet = None,
    plot: SweepPlot = None,
    quiet: Quiet = False,
) -> None:
    """Simulate every combination of values of some keys.

    Points run in parallel. Every finished point is kept in a database at once. The same command again runs what is
    missing, whatever ended it. A point that is not legal has its reason in place of figures. What does not fit in
    memory comes last.

    \b
    Examples:
      llmsim sweep gpt22b_tp8 --grid parallelism.tp=2,4,8 --plot tp.png
      llmsim sweep gpt22b_tp8 --grid parallelism.tp=4,8 --grid model.layers=24,48
      llmsim sweep gpt175b_3d --zip parallelism.tp=4,8 --zip parallelism.pp=24,12
      llmsim sweep gpt22b_tp8 gpt175b_3d --list layouts.csv --sort mfu --top 10
    """
    from simulator.output.sweep_figures import check_figure, check_present
    from simulator.output.sweep_files import check_parquet

    check_figure(sort, "--sort")
    space = _space(workloads, grid or (), zip or (), list, set_ or ())
    out = _database(workloads) if out is None else out
    outputs = {"--out": out, "--json": json, "--csv": csv, "--parquet": parquet, "--plot": plot}
    check_outputs(outputs)
    if parquet is not None:
        check_parquet()
    finished: FinishedPoints = []
    shows = shows_summary(json, quiet)
    late = [option for option, path in {"--json": json, "--plot": plot}.items() if path is not None]
    with options_named("jobs", "on"), _resuming(space, finished, out, sort, top, shows, (csv, parquet), late):
        result = _result(space, jobs, on, out, retry, finished)
    write_json(json, result.to_dict())
    _write_points(result, csv, parquet)
    check_present(result.rows, sort, "--sort")
    if plot is not None:
        _draw(result, sort, plot)
    if shows:
        show(result.summary(sort, top))
        kept = f", {result.kept:,} of them from before" if result.kept else ""
        say(f"All points are in {out}{kept}.{said_of_others(out, workloads)}")
    warn(result.warnings)


def _write_points(result: SweepResult, csv: Path | None, parquet: Path | None) -> None:
    if csv is not None:
        result.save_csv(csv)
    if parquet is not None:
        result.save_parquet(parquet)


def _draw(result: SweepResult, figure: str, path: Path) -> None:
    from simulator.output.gantt import save_gantt

    with progress("drawing"):
        save_gantt(result.plot(figure), path)


def _space(
    workloads: Sequence[str], grids: Sequence[str], zips: Sequence[str], file: Path | None, changes: Sequence[str]
) -> Space:
    """Return the points that options describe. Raises `InputError`."""
    from simulator.config import parse_changes
    from simulator.sweeping.reading import read_list, values_by_key
    from simulator.sweeping.space import Space, grid, listed, zipped

    dimensions = [
        *grid(values_by_key(grids, "--grid"), "--grid"),
        *zipped(values_by_key(zips, "--zip"), "--zip"),
        *([listed(read_list(file, "--list"), file)] if file is not None else []),
    ]
    if not dimensions and len(workloads) == 1:
        fix = "llmsim sweep WORKLOAD --grid parallelism.tp=1,2,4; or llmsim run for a single point"
        raise InputError("there is nothing to sweep", file="WORKLOAD", found=workloads[0], fix=fix)
    space = Space(tuple(workloads), tuple(dimensions), parse_changes(changes))
    space.check()  # which reads the files that must not be written
    return space


def _database(workloads: Sequence[str]) -> Path:
    """Return the database's name where none is given: that of the workloads, in the current directory."""
    names = [Path(name).stem for name in workloads]
    more = [f"{len(names) - _MOST_NAMES}_more"] if len(names) > _MOST_NAMES else []
    return Path("+".join([*names[:_MOST_NAMES], *more]) + ".sweep.db")


def _result(
    space: Space, jobs: int | None, on: str | None, out: Path, retry: bool, finished: FinishedPoints
) -> SweepResult:
    """Simulate what is missing, say how far it is, and list every point as soon as it is ``finished``."""
    from simulator.sweeping.entry import sweep_space
    from simulator.sweeping.runners import runner_on

    with progress_bar("simulating", len(space)) as done:

        def watch(one: EvaluatedPoint) -> None:
            finished.append(one)
            done(one.is_new)

        return sweep_space(space, runner_on(jobs, on), out, retry_failed=retry, watch=watch)


def _resuming(
    space: Space,
    finished: FinishedPoints,
    out: Path,
    sort: str,
    top: int | None,
    shows: bool,
    tables: tuple[Path | None, Path | None],
    late: Sequence[str],
) -> AbstractContextManager[None]:
    """End an interrupted block with what is ``finished``, and how to go on.

    It is written to ``tables``, a CSV and a Parquet file, and printed where a summary ``shows``. ``late``: options
    whose files are of whole sweeps alone.
    """

    def show_so_far() -> None:
        if finished:
            rows = _finished_rows(space, finished)
            _write_finished(rows, space, *tables)
            if shows:
                _show_finished(rows, space, sort, top)

    unwritten = f", and writes {' and '.join(late)} at its end" if late else ""
    return resumable(out, lambda: f"{len(finished):,} of {len(space):,} points", show_so_far, unwritten)


def _finished_rows(space: Space, finished: Sequence[EvaluatedPoint]) -> list[SweepRow]:
    """Return the rows of finished points, in the order of the points."""
    from simulator.sweeping.result import sweep_row

    in_order = sorted(finished, key=lambda one: one.point.number)
    return [sweep_row(space.keys, one.point, one.outcome) for one in in_order]


def _write_finished(rows: Sequence[SweepRow], space: Space, csv: Path | None, parquet: Path | None) -> None:
    """Write tables of finished points."""
    from simulator.output.sweep_files import write_csv, write_parquet

    if csv is not None:
        write_csv(rows, space.keys, csv)
    if parquet is not None:
        write_parquet(rows, space.keys, parquet)


def _show_finished(rows: Sequence[SweepRow], space: Space, sort: str, top: int | None) -> None:
    """Print the table of finished points, by step time where none of them has the figure ``sort``."""
    from simulator.output.sweep_table import sweep_summary

    figure = sort if any(row.get(sort) is not None for row in rows) else "step_time_s"
    show(sweep_summary(rows, space.keys, sort=figure, top=top))

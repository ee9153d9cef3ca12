"""Compare simulated with measured runs: a table, and pictures.

DIR of --measured holds what `python -m calibration train` recorded. Every workload has a row. A run that failed,
was skipped or never made has its reason there, and so has a record that cannot be used. --out gets comparison.json,
table.csv, table.txt, and pictures of step times, of all figures and of classes of kernels. For each run it also gets
the two timelines, one above the other.
Where a record says how fast its host was (`calibration.train.record`), the simulated host is as fast, against the
profile's; --set cluster.node.host_speed=1 takes the profile's. Which PyTorch it was decides on which streams its
pipelines send and receive (`calibration.compare.software`).
With --predictions the errors of the predictions are reported too, where the commits show them to be older than the
runs. The option may be given again: of several files, each with its commit, the last before a run counts.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from calibration.commits import Commit, commit_of, first_with, head
from calibration.compare import pictures, timelines
from calibration.compare.comparison import PREDICTED, STEP_TIME, ComparedRun, not_before, order, shares, suites, work_of
from calibration.compare.figures import Figures, pipelines, simulated_figures
from calibration.compare.kernels import simulated_kernels
from calibration.compare.measured import MeasuredRun, measured_figures, profiled, read_measured, unusable
from calibration.compare.meetings import meetings
from calibration.compare.record import RunRecord
from calibration.compare.software import as_it_ran
from calibration.compare.table import as_csv, as_tables, as_text
from calibration.folders import folder
from calibration.predict.command import add_set
from calibration.predict.predictions import Predictions, Simulated, read_predictions, simulate_all
from simulator.cli.outputs import write_json
from simulator.cli.terminal import show
from simulator.config import parse_changes
from simulator.errors import InputError
from simulator.output.envelope import envelope
from simulator.output.files import writing
from simulator.validation.suite import Bounds

EXAMPLE = """example:
  python -m calibration compare calibration/runs/*/*.yaml --measured runs \\
      --predictions calibration/results/predictions.json \\
      --out comparison --max-mean 4 --max-row 10

exit status: 1 where no run could be compared, or with --max-mean or --max-row where step times, or those predicted
before, are past it or more than a tenth of them could not be compared; 2 on bad input; else 0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workloads", type=Path, nargs="+", metavar="WORKLOAD", help="workload files")
    parser.add_argument("--measured", type=Path, required=True, metavar="DIR", help="records of their runs")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument(
        "--predictions",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="what `predict` wrote before the runs; may be given again",
    )
    add_set(parser)
    parser.add_argument("--no-pictures", dest="pictures", action="store_false", help="write tables only")
    parser.add_argument("--max-mean", type=_percent, metavar="PCT", help="fail when the mean absolute error is above")
    parser.add_argument("--max-row", type=_percent, metavar="PCT", help="fail when any error is above")


@dataclass(frozen=True)
class Committed:
    """A file of predictions, and the first commit in which it was as it is."""

    path: Path
    predictions: Predictions
    commit: Commit | None


def run(arguments: argparse.Namespace) -> int:
    """Exit status: see `EXAMPLE`. Raises `InputError`."""
    out: Path = arguments.out
    if not arguments.measured.is_dir():
        raise InputError("no such folder", file="--measured", found=str(arguments.measured))
    predicted = [Committed(path, read_predictions(path), first_with(path)) for path in arguments.predictions]
    changes = parse_changes(arguments.changes)
    if folder("--out", out).resolve() == arguments.measured.resolve():
        raise InputError("is the folder of the measured runs", file="--out", found=str(out), fix="another folder")
    hosted = [_hosted(arguments.measured, path, changes) for path in arguments.workloads]
    simulated = simulate_all(
        (path, run_changes) for path, (run_changes, _) in zip(arguments.workloads, hosted, strict=True)
    )
    measured = []
    for path, one, (_, problem) in zip(arguments.workloads, simulated, hosted, strict=True):
        run_of = read_measured(arguments.measured, path, one.workload, meetings(one.result))
        measured.append(replace(run_of, reason=run_of.reason or problem))
    comparison = compare(arguments, simulated, measured, predicted)
    write_json(out / "comparison.json", comparison)
    text = as_text(comparison)
    rows = [ComparedRun.from_dict(row) for row in comparison["rows"]]
    for name, content in (("table.csv", as_csv(rows)), ("table.txt", text)):
        with writing(out / name) as file:
            file.write(content.encode())
    if arguments.pictures:
        _draw(out, comparison, simulated, measured)
    show(*as_tables(comparison))
    none = not any(row.measured and row.simulated for row in rows)
    return 1 if none or any(suite["passed"] is False for suite in comparison["suites"]) else 0


def _hosted(directory: Path, workload: Path, changes: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """``changes`` with the speed of the run's host and what its PyTorch does, or as they are and why that cannot be
    told."""
    try:
        return as_it_ran(directory, workload, changes), ""
    except InputError as problem:
        return changes, unusable(problem)


def compare(
    arguments: argparse.Namespace,
    simulated: Sequence[Simulated],
    measured: Sequence[MeasuredRun],
    predicted: Sequence[Committed],
) -> dict[str, Any]:
    """The content of comparison.json."""
    rows = []
    for one, real in zip(simulated, measured, strict=True):
        base = ComparedRun(
            one.name,
            one.workload.n_ranks,
            work_of(one.workload),
            reason=one.reason or real.reason,
            host_speed=one.workload.cluster.node_at(0).host_speed,
        )
        if one.result is None:
            rows.append(base)
            continue
        ours, theirs, spread, longer = simulated_figures(one.result), None, None, None
        if isinstance(real.record, RunRecord) and not real.reason:
            report = one.result.to_dict()
            flops, peak = report["model_flops_per_step"], report["peak_flops_per_s_per_gpu"]
            theirs = measured_figures(real.record, real.kernels, flops, peak, pipelines(one.result))
            spread, longer = real.record.step_time_s.spread, profiled(real.record)
            base = replace(base, memory_reason=real.record.strange_memory)
        late, committed = _predicted(one, real, predicted)
        base = replace(base, spread=spread, profiled=longer)
        rows.append(replace(base, simulated=ours, measured=theirs, committed=committed, not_before=late))
    rows.sort(key=lambda row: bool(row.reason))  # those without figures behind all others
    bounds = Bounds(arguments.max_mean, arguments.max_row)
    commits = {"simulator": _commit_text(head()), "measured runs": _commit_text(commit_of(arguments.measured))}
    for file in predicted:
        file_words = f" of {file.path.name}" if len(predicted) > 1 else ""
        if file.predictions.changes:
            changed = " ".join(f"--set {key}={value}" for key, value in file.predictions.changes.items())
            commits[f"predictions{file_words} made with"] = changed
        commits |= {
            f"predictions{file_words} made at": file.predictions.commit[:12] or None,
            f"predictions{file_words} committed": _commit_text(file.commit),
        }
    return envelope(
        "compare",
        _warnings(simulated, predicted),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        measured_dates=sorted({f"{real.date:%Y-%m-%d}" for real in measured if real.date is not None}),
        measured_by=list(
            dict.fromkeys(r.record.command for r in measured if r.record is not None and r.record.command)
        ),
        hardware=list(dict.fromkeys(real.hardware for real in measured if real.hardware)),
        profiles=[
            {"name": name, "sha256": sha256}
            for name, sha256 in {one.profile: one.profile_sha256 for one in simulated}.items()
        ],
        commits=commits,
        suites=suites(rows, bounds, predicted=bool(predicted)),
        shares=shares(rows),
        order=order(rows),
        rows=[row.to_dict() for row in rows],
    )


def _predicted(one: Simulated, real: MeasuredRun, files: Sequence[Committed]) -> tuple[str, Figures | None]:
    """Why nothing was predicted of a run before it was made, or what was, in the file last committed before it."""
    reasons, before = ["not among the predictions"] if files else [""], []
    for file in files:
        if one.name in file.predictions.figures:
            reasons.append(not_before(file.predictions, file.commit, real, one))
            if file.commit is not None and not reasons[-1]:
                before.append((file.commit.date, file.predictions.figures[one.name]))
    return ("", max(before, key=itemgetter(0))[1]) if before else (reasons[-1], None)


def _draw(
    out: Path, comparison: dict[str, Any], simulated: Sequence[Simulated], measured: Sequence[MeasuredRun]
) -> None:
    for name, figure in pictures.draw(comparison).items():
        pictures.save(figure, out / f"{name}.png")
    (out / "timelines").mkdir(exist_ok=True)
    for one, real in zip(simulated, measured, strict=True):
        if one.result is not None and real.kernels is not None:
            figure = timelines.draw(one.name, real.kernels, simulated_kernels(one.result))
            pictures.save(figure, out / "timelines" / f"{one.name}.png")


def _warnings(simulated: Sequence[Simulated], predicted: Sequence[Committed]) -> list[str]:
    """Return a warning for each profile that has changed since the predictions were made."""
    now = {one.profile: one.profile_sha256 for one in simulated}
    changed = {
        (name, then)
        for file in predicted
        for name, then in file.predictions.profiles.items()
        if name in now and now[name] != then
    }
    return [
        f"profile {name} has changed since the predictions: {then[:16]} then, {now[name][:16]} now; "
        f"`{PREDICTED}` has the errors of then, `{STEP_TIME}` those of now"
        for name, then in sorted(changed)
    ]


def _commit_text(commit: object) -> str | None:
    return None if commit is None else str(commit)


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("a percentage is not negative")
    return value / 100

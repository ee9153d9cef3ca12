"""``run``: simulate one training step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import Json, Quiet, Set, Strict, parse_ranks
from simulator.cli.outputs import STDOUT, check_folder, check_outputs, shows_summary, write_json
from simulator.cli.play_notice import simulating
from simulator.cli.terminal import progress, say, show, warn
from simulator.errors import InputError
from simulator.output.envelope import envelope
from simulator.output.files import PERFETTO_SUFFIXES, profiler_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulator.config import Workload
    from simulator.step_result import StepResult

#: Kernels that each pass of a layer has at least: a norm, and the products of its mixer and its MLP.
_LAYER_KERNELS = 4
#: Characters of what --set was given that stand over a picture.
_TITLE_LENGTH = 80


FirstWorkload = Annotated[str, typer.Argument(metavar="WORKLOAD", help="A file, or a name in workloads/.")]
FurtherWorkloads = Annotated[
    list[str] | None,
    typer.Argument(metavar="WORKLOAD2", help="Another beside it; several with --share-fabric.", show_default=False),
]
ShareFabric = Annotated[
    bool,
    typer.Option("--share-fabric", help="Run all workloads at once on one cluster, and say what each loses by it."),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev (Chrome trace JSON; gzipped if named .gz)."),
]
TraceFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write a trace per rank into this folder, for HolisticTraceAnalysis and `trace show`."
    ),
]
ChakraFolder = Annotated[
    Path | None,
    typer.Option(
        "--chakra", metavar="DIR", help="Write the step as Chakra's execution traces, for ASTRA-sim (extra `chakra`)."
    ),
]
TraceRanks = Annotated[
    str | None, typer.Option(metavar="all|LIST", help="Ranks in the trace, such as 0-7,16. [one per pipeline stage]")
]
TimelineTable = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write a row per kernel and communication, with a dictionary (.parquet; extra `parquet`)."
    ),
]
StepGantt = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the pipeline as a Gantt chart (.png, .svg or .pdf).")
]
MemoryPlot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the fullest GPU's memory over time (.png, .svg or .pdf).")
]
Advise = Annotated[
    bool, typer.Option("--advise", help="End with what to change: the changes that help most, each simulated.")
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write one page with all results and pictures to look into (.html; extra `report`); advises.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="With --advise or --report: no change is simulated later. [30]", min=0.0),
]


def command(
    workload: FirstWorkload,
    further_workloads: FurtherWorkloads = None,
    share_fabric: ShareFabric = False,
    set_: Set = None,
    json: Json = None,
    trace: TraceFile = None,
    trace_dir: TraceFolder = None,
    trace_ranks: TraceRanks = None,
    chakra: ChakraFolder = None,
    timeline: TimelineTable = None,
    gantt: StepGantt = None,
    memory: MemoryPlot = None,
    advise: Advise = False,
    report_file: ReportFile = None,
    budget_s: Budget = None,
    quiet: Quiet = False,
    strict: Strict = False,
) -> None:
    """Simulate one training step and say how long it takes, and why.

    With two workloads, their results stand side by side and their pictures below each other; --set changes both.
    With --share-fabric two or more jobs run at once on one cluster and repeat their steps. They slow each other where
    transfers meet. placement=interleaved mixes their nodes.

    \b
    Examples:
      llmsim run gpt175b_3d --gantt step.png --trace step.json.gz
      llmsim run gpt175b_3d --set parallelism.dp=8 --json -
      llmsim run gpt22b_tp8 --advise
      llmsim run llama3_8b_dgx_h100 --report page.html
      llmsim run llama3_8b_dgx_h100 llama3_70b
      llmsim run gpt22b_tp8 gpt22b_tp8 --share-fabric --set placement=interleaved
    """
    from simulator.config import load_workload, parse_changes

    changes = parse_changes(set_ or ())
    names = [workload, *(further_workloads or ())]
    jobs = [load_workload(name, changes) for name in names]
    _check_number(len(jobs), share_fabric)
    outputs = {"--json": json, "--trace": trace, "--gantt": gantt, "--memory": memory, "--report": report_file}
    check_outputs({**outputs, "--timeline": timeline})
    advises = _advises(advise, report_file, budget_s, share_fabric)
    ranks = _trace_ranks(trace, trace_dir, trace_ranks, jobs)
    _check_tables(chakra, trace_dir, timeline, jobs)

    run = _shared(workload, jobs, changes) if share_fabric else _alone(names, jobs, changes, advises, budget_s)
    _write_traces(run.results[0], (trace, trace_dir), ranks, chakra, timeline)
    write_json(json, run.report)
    _draw(run.results, gantt, memory, set_ or ())
    if report_file is not None:
        _write_page(report_file, run, set_ or ())
    if shows_summary(json, quiet):
        show(run.summary())
    if not quiet:
        _say_written(json, trace, trace_dir, chakra, timeline, gantt, memory, report_file)
    _judge(run, strict)


@dataclass(frozen=True)
class _FinishedRun:
    """Results of one job or more, the ``reports`` of each, the ``report`` of all, and what is printed."""

    results: Sequence[StepResult]
    reports: Sequence[Mapping[str, Any]]
    report: Mapping[str, Any]
    warnings: Sequence[str]
    summary: Callable[[], Any]


def _shared(first: str, jobs: Sequence[Workload], changes: Mapping[str, Any]) -> _FinishedRun:
    """Run jobs at once on one cluster, which the job in the file ``first`` describes."""
    import simulator
    from simulator.config.loading import written_in
    from simulator.errors import located

    with simulating(f"{len(jobs)} jobs at once"), located(written_in(first, changes)):
        shared = simulator.share(jobs)
    report = shared.to_dict()
    return _FinishedRun(shared.results, report["runs"], report, shared.warnings, shared.summary)


def _alone(
    names: Sequence[str], jobs: Sequence[Workload], changes: Mapping[str, Any], advises: bool, budget_s: float | None
) -> _FinishedRun:
    """Run one job, or two of which each has its cluster alone; ``advises``: with what to change in each."""
    from simulator.output.summary import compared, summary

    results = _simulated(names, jobs, changes)
    reports = [result.to_dict() for result in results]
    if advises:
        for report, result in zip(reports, results, strict=True):
            report["what_to_change"] = _advice(result, budget_s)
    warnings = _warnings(results)
    if len(jobs) == 1:
        return _FinishedRun(results, reports, reports[0], warnings, partial(summary, reports[0]))
    both = envelope("run", warnings, runs=reports)
    return _FinishedRun(results, reports, both, warnings, partial(compared, *reports))


def _simulated(names: Sequence[str], jobs: Sequence[Workload], changes: Mapping[str, Any]) -> list[StepResult]:
    """Return the results of jobs, each alone on its cluster, that are written in the files ``names``."""
    import simulator
    from simulator.config.loading import written_in
    from simulator.errors import located

    results = []
    for name, job in zip(names, jobs, strict=True):
        with simulating(job.name), located(written_in(name, changes)):
            results.append(simulator.run(job))
    return results


def _advises(advise: bool, report_file: Path | None, budget_s: float | None, share_fabric: bool) -> bool:
    """Return whether changes are simulated. Raises `InputError` where options do not go together."""
    for option, asked in (("--advise", advise), ("--report", report_file is not None)):
        if asked and share_fabric:
            raise InputError("is of jobs that have a cluster alone", file=option, fix="a run without --share-fabric")
    advises = advise or report_file is not None
    if report_file is not None:
        from simulator.output.page.document import check_page

        check_page()
    if budget_s is not None and not advises:
        raise InputError("limits the time of advice, and none is asked for", file="--budget-s", fix="--advise")
    return advises


def _advice(result: StepResult, budget_s: float | None) -> dict[str, Any]:
    """Return the changes that help a job most, as in the JSON output."""
    from simulator.advising.advise import BUDGET_S, advise

    with progress(f"simulating changes of {result.job_name}") as far:
        return advise(
            result,
            budget_s=BUDGET_S if budget_s is None else budget_s,
            watch=lambda done, total: far(f"{done} of {total}"),
        ).to_dict()


def _check_number(jobs: int, share_fabric: bool) -> None:
    """Raise `InputError` where so many jobs do not run together."""
    if jobs > 2 and not share_fabric:
        raise InputError(
            "more than two do not stand side by side",
            file="WORKLOAD2",
            found=f"{jobs} workloads",
            fix="two of them, or --share-fabric to run all at once",
        )
    if share_fabric and jobs == 1:
        raise InputError("needs jobs that share", file="--share-fabric", found="1 workload", fix="another WORKLOAD2")


def _trace_ranks(
    trace: Path | None, trace_dir: Path | None, ranks: str | None, jobs: Sequence[Workload]
) -> list[int] | None:
    """Return the ranks in the trace, None for one per pipeline stage. Raises `InputError` where there is no trace."""
    if trace is not None and str(trace).endswith(PERFETTO_SUFFIXES):
        from simulator.output.perfetto_trace import check_perfetto

        check_perfetto()
    for option, path in (("--trace", trace), ("--trace-dir", trace_dir)):
        if path is not None and len(jobs) > 1:
            raise InputError("shows one workload", file=option, found=f"{len(jobs)} workloads", fix="a run for each")
    if trace_dir is not None:
        check_folder("--trace-dir", trace_dir)
        chosen = range(jobs[0].n_ranks) if ranks is None else parse_ranks(ranks, jobs[0].n_ranks, "--trace-ranks")
        profiler_files(trace_dir, chosen)
    if ranks is not None and trace is None and trace_dir is None:
        raise InputError("chooses the ranks of a trace, and none is written", file="--trace-ranks", fix="--trace FILE")
    return None if ranks is None else parse_ranks(ranks, jobs[0].n_ranks, "--trace-ranks")


def _check_tables(chakra: Path | None, trace_dir: Path | None, timeline: Path | None, jobs: Sequence[Workload]) -> None:
    """Raise `InputError` where execution traces, or a table of the timeline, cannot be written."""
    for option, path in (("--chakra", chakra), ("--timeline", timeline)):
        if path is not None and len(jobs) > 1:
            raise InputError("is of one workload", file=option, found=f"{len(jobs)} workloads", fix="a run for each")
    if timeline is not None:
        from simulator.output.timeline_file import check_timeline_file

        check_timeline_file()
    if chakra is not None:
        _check_chakra(chakra, trace_dir, jobs[0])


def _check_chakra(folder: Path, trace_dir: Path | None, job: Workload) -> None:
    """Raise `InputError` where a job has no execution traces, or they cannot be written into a folder."""
    from simulator.traces.execution.messages import chakra_messages
    from simulator.traces.execution.writing import check_number, rank_files

    check_folder("--chakra", folder)
    if trace_dir is not None and trace_dir.resolve() == folder.resolve():
        raise InputError("is the folder of --trace-dir too", file="--chakra", found=str(folder), fix="another folder")
    chakra_messages()
    schedule = job.parallelism.pipeline_schedule
    if schedule.steady or job.parallelism.data_parallel == "async":
        overlapping = schedule.name if schedule.steady else "parallelism.data_parallel=async"
        raise InputError("steps that overlap have no traces of one step", file="--chakra", found=overlapping)
    layout = job.parallelism
    on_drives = [f"parallelism.offload.{key}=nvme" for key, place in layout.offload if place == "nvme"]
    servers = ["parallelism.data_parallel=parameter_server"] if layout.data_parallel == "parameter_server" else []
    if unspoken := [*servers, *on_drives]:
        message = "Chakra's traces have no operations for servers and drives"
        raise InputError(message, file="--chakra", found=", ".join(unspoken))
    passes = 2 * job.microbatches * job.model.layers // job.parallelism.pp
    check_number(job.n_ranks, job.n_ranks * passes * _LAYER_KERNELS, folder)
    rank_files(folder, job.n_ranks)


def _write_traces(
    result: StepResult,
    traces: tuple[Path | None, Path | None],
    ranks: list[int] | None,
    chakra: Path | None,
    timeline: Path | None,
) -> None:
    """Write what of a step is asked for: a trace and one per rank of ``ranks``, execution traces, a table."""
    trace, trace_dir = traces
    with progress("writing the trace"):
        if chakra is not None:  # first, for a step may have work that these traces have no words for
            result.save_chakra(chakra)
        if trace is not None:
            result.save_trace(trace, ranks)
        if trace_dir is not None:
            result.save_traces(trace_dir, ranks)
        if timeline is not None:
            result.save_timeline(timeline)


def _draw(results: Sequence[StepResult], gantt: Path | None, memory: Path | None, changes: Sequence[str]) -> None:
    """Write the pictures that are asked for; of several jobs they stand below each other, numbered in their order.
    ``changes``, what --set was given, stand at the top, cut where they are long."""
    if gantt is None and memory is None:
        return
    from simulator.output.gantt import compare_gantt, save_gantt
    from simulator.output.memory_plot import compare_memory
    from simulator.results import numbered_timelines

    def save(figure: Figure, path: Path) -> None:
        changed_keys = ", ".join(changes)
        changed_keys = changed_keys if len(changed_keys) <= _TITLE_LENGTH else f"{changed_keys[:_TITLE_LENGTH]}..."
        figure.axes[0].set_title(changed_keys, loc="right", fontsize=8, parse_math=False)
        save_gantt(figure, path)

    with progress("drawing"):
        if gantt is not None and len(results) == 1:
            save(results[0].gantt(), gantt)
        elif gantt is not None:
            save(compare_gantt(numbered_timelines(results)), gantt)
        if memory is not None and len(results) == 1:
            save(results[0].memory(), memory)
        elif memory is not None:
            jobs = {f"{n}. {one.workload.name}": (one.played, one.memories) for n, one in enumerate(results, 1)}
            save(compare_memory(jobs), memory)


def _write_page(path: Path, run: _FinishedRun, changes: Sequence[str]) -> None:
    """Write the page on one job or two, whose reports say what to change."""
    from simulator.output.page.document import PageJob, save_page

    with progress("writing the page"):
        jobs = [
            PageJob(report, result.spans, result.played, result.memories)
            for result, report in zip(run.results, run.reports, strict=True)
        ]
        save_page(jobs, path, changed=", ".join(changes))


def _say_written(*outputs: Path | None) -> None:
    """Name the files and folders that were written, on standard error, as standard output may be JSON."""
    for path in outputs:
        if path not in (None, STDOUT):
            say(f"written: {path}", sys.stderr)


def _judge(run: _FinishedRun, strict: bool) -> None:
    """Print the warnings; exit with 1 where ``strict`` allows none of them, or memory does not fit."""
    warn(run.warnings)
    too_large = [report["name"] for report in run.reports if not report["memory"]["fits"]]
    if strict:
        warn(f"{name}: memory does not fit" for name in too_large)
    if strict and (run.warnings or too_large):
        raise typer.Exit(1)


def _warnings(results: Sequence[StepResult]) -> list[str]:
    if len(results) == 1:
        return list(results[0].warnings)
    return [f"{result.workload.name}: {warning}" for result in results for warning in result.warnings]

"""``trace``: what is in traces, what differs between two of them, what a step would be otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from simulator.cli.execution_trace import are_execution_traces, replay_graph_files, show_graphs
from simulator.cli.options import APP_SETTINGS, Command, Json, Quiet, Set
from simulator.cli.outputs import reading_inputs, shows_summary, tell, write_json
from simulator.cli.terminal import progress, show, warn
from simulator.cli.trace_change import (
    ChangeOptions,
    asked_change,
    naming_options,
    parse_factors,
    played_cluster,
    target_cluster,
)
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.traces.compare import Side
    from simulator.traces.trace import RunTrace

#: A step that is so much longer or shorter when it is played as recorded is not understood.
UNLIKE = 0.02
app = typer.Typer(
    help="Look at traces of profilers, and at execution traces.",
    epilog="Example: llmsim trace show rank0.json.gz rank1.json.gz",
    **APP_SETTINGS,
)

TraceFiles = Annotated[
    list[str], typer.Argument(metavar="FILES", help="Traces of one rank each, or a folder of them; gzipped or not.")
]
StepName = Annotated[
    str | None,
    typer.Option("--step", metavar="NAME", help="A marked step: ProfilerStep#5, or 5.", show_default=False),
]
Factors = Annotated[
    list[str] | None,
    typer.Option("--scale", metavar="CLASS=FACTOR", help="Times of a class, such as matmul=0.8; repeatable."),
]
RankFactors = Annotated[
    list[str] | None,
    typer.Option("--rank", metavar="RANK=FACTOR", help="Times of a rank's own kernels, such as 1=1.2; repeatable."),
]
HostFactor = Annotated[
    float | None, typer.Option("--host", metavar="FACTOR", help="Times of all hosts, such as 0.5.", show_default=False)
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", metavar="PROFILE", help="Another GPU; see `list profiles`.", show_default=False)
]
RecordedGpu = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="The trace's GPU [the one its name says].", show_default=False),
]
TargetCluster = Annotated[
    str | None,
    typer.Option("--cluster", metavar="C", help="Another cluster [the recorded one].", show_default=False),
]
SetOfTarget = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of that cluster, such as node.nics.count; repeatable."
    ),
]
RecordedCluster = Annotated[
    str | None, typer.Option(metavar="C", help="The trace's cluster, where another is asked for.", show_default=False)
]
OverlapChoice = Annotated[
    str,
    typer.Option(
        metavar="HOW", help="recorded; none: one stream; full: nothing waits for communication, which is a bound."
    ),
]
GroupsFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Of execution traces: ASTRA-sim's communicator groups [comm_group.json beside them]."
    ),
]


@app.command("show", cls=Command)
def show_command(
    files: TraceFiles,
    step: StepName = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Kernels that are listed.")] = 10,
    json: Json = None,
    gantt: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the streams (.png, .svg or .pdf).", show_default=False)
    ] = None,
    groups: GroupsFile = None,
    quiet: Quiet = False,
) -> None:
    """Say where the time of a trace goes.

    Times are of a step: the mean of the marked ones, or the one of --step. Without marks all of it is one.

    \b
    Example:
      llmsim trace show rank0.json.gz rank1.json.gz --gantt streams.png
    """
    from simulator.output import trace_tables
    from simulator.output.stream_gantt import save_stream_gantt
    from simulator.traces import report
    from simulator.traces.windows import one_step

    if are_execution_traces(files):
        show_graphs(files, groups, top, json, quiet, {"--step": step, "--gantt": gantt})
        return
    with reading_inputs({"--json": json, "--gantt": gantt}):
        trace = _opened(files, groups)
    if step is not None:
        with naming_options(name="--step"):
            trace = one_step(trace, step)
    if gantt is not None:
        save_stream_gantt(report.stream_rows(trace), ", ".join(Path(name).name for name in trace.files), gantt)
    tell(report.shown(trace, top), trace_tables.shown, json, quiet)


@app.command("compare", cls=Command)
def compare_command(
    first: Annotated[str, typer.Argument(metavar="A", help="A trace, a folder of traces, or a workload.")],
    second: Annotated[str, typer.Argument(metavar="B", help="What to compare with it.")],
    set_: Set = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Compare two traces, or a workload with a trace.

    Classes of kernels stand side by side. A workload is simulated, and shown as a profiler would have seen it. What one
    side lacks is named.

    \b
    Examples:
      llmsim trace compare before.json.gz after.json.gz
      llmsim trace compare llama2_7b_zero2 traces/
    """
    from simulator.input_files import parse_changes
    from simulator.output import trace_tables
    from simulator.traces import report
    from simulator.traces.compare import compare, missing_classes, unlike_jobs

    changes = parse_changes(set_ or ())
    if changes and not any(_is_workload(name) for name in (first, second)):
        raise InputError("changes a workload, and neither side is one", file="--set", found=next(iter(changes)))
    warnings: list[str] = []
    short = [Path(name).name or name for name in (first, second)]
    titles = short if short[0] != short[1] else [first, second]
    with reading_inputs({"--json": json}):
        sides = [_side(name, title, changes, warnings) for name, title in zip((first, second), titles, strict=True)]
    comparison = compare(*sides)
    warnings += unlike_jobs(comparison)
    result = report.compared(comparison, warnings)
    write_json(json, result)
    warn([*warnings, *missing_classes(comparison)])
    if shows_summary(json, quiet):
        show(*trace_tables.compared(result))


@app.command("replay", cls=Command)
def replay_command(
    files: TraceFiles,
    step: StepName = None,
    scale: Factors = None,
    rank: RankFactors = None,
    host: HostFactor = None,
    gpu: GpuName = None,
    recorded_gpu: RecordedGpu = None,
    cluster: TargetCluster = None,
    set_: SetOfTarget = None,
    recorded_cluster: RecordedCluster = None,
    overlap: OverlapChoice = "recorded",
    groups: GroupsFile = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Play a step of a trace, as recorded and with a change.

    Execution traces of Chakra and PyTorch are played on --cluster, or as recorded. Of a profiler's, without a step's
    name, the first that all ranks have is played. A FACTOR of 2 takes twice as long.

    \b
    Examples:
      llmsim trace replay rank0.json.gz --scale attention=0.5
      llmsim trace replay rank0.json.gz --gpu h200-sxm-141gb
      llmsim trace replay traces/ --recorded-cluster dgx_h100 --cluster gb200_nvl72
      llmsim trace replay traces/ --recorded-cluster dgx_h100 --set node.nics.bandwidth_bps=800e9
      llmsim trace replay step.0.et step.1.et --cluster dgx_h100
    """
    from simulator.output import trace_tables
    from simulator.traces import report
    from simulator.traces.replay import replay
    from simulator.traces.windows import one_step

    if are_execution_traces(files):
        refused = {
            "--step": step, "--scale": scale, "--rank": rank, "--host": host, "--gpu": gpu,
            "--recorded-gpu": recorded_gpu, "--recorded-cluster": recorded_cluster,
            "--overlap": None if overlap == "recorded" else overlap,
        }  # fmt: skip
        replay_graph_files(files, played_cluster(cluster, set_), groups, json, quiet, refused)
        return
    target, factors = target_cluster(cluster, set_, recorded_cluster), parse_factors(scale, "--scale")
    ranks = parse_factors(rank, "--rank")
    options = ChangeOptions(factors, ranks, host, gpu, recorded_gpu, target, recorded_cluster, overlap)
    with reading_inputs({"--json": json}):
        trace = _opened(files, groups)
    with naming_options(name="--step"):
        trace = one_step(trace, step)
    change, warnings = asked_change(trace, options)
    with progress("playing the step"), naming_options(ranks="--rank"):
        played = replay(trace, change)
    if abs(played.error) > UNLIKE:
        warnings.append(f"played as recorded, the step is {100 * played.error:+.1f} % off: its order is not understood")
    tell(report.replayed(trace, played, warnings), trace_tables.replayed, json, quiet)


@app.command("stragglers", cls=Command)
def stragglers_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Passes and collectives of all ranks (Parquet).")],
    by: Annotated[
        str | None, typer.Option(metavar="PART", help="Tell them to kind, stage or replica.", show_default=False)
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Say what a job's steps would be without stragglers.

    FILE has the passes and collectives of a pipeline's ranks in many steps, in the form of ByteDance's released jobs.
    Each step is played as recorded, without delays, and with all operations of a kind equally long.

    \b
    Example:
      llmsim trace stragglers trace-ST.parquet --by stage
    """
    from simulator.output import trace_tables
    from simulator.traces import report
    from simulator.traces.job_stragglers import PARTS, straggler_figures
    from simulator.traces.job_trace import read_job_trace

    if by is not None and by not in PARTS:
        raise InputError("is no part of a job", file="--by", found=by, allowed=", ".join(PARTS))
    with reading_inputs({"--json": json}):
        job = read_job_trace(file)
    with progress("playing steps") as far:
        figures = straggler_figures(job, cast(Any, by), far)
    tell(report.job_stragglers(job, figures), trace_tables.job_stragglers, json, quiet)


def _opened(files: list[str], groups: str | None = None) -> RunTrace:
    """Return a profiler's trace, for which no file of ``groups`` may be given. Raises `InputError`."""
    if groups is not None:
        raise InputError("is of execution traces, and these are a profiler's", file="--groups", found=groups)
    from simulator.traces.files import open_trace

    with progress("reading the trace"):
        return open_trace(files)


def _is_workload(name: str) -> bool:
    """Tell whether a name is a workload's: a YAML file, or one that is shipped."""
    from simulator.config import catalog
    from simulator.input_files import as_path

    return name.lower().endswith((".yaml", ".yml")) or (
        catalog.is_shipped("workload", name) and not as_path(name).exists()
    )


def _side(name: str, title: str, changes: dict[str, Any], warnings: list[str]) -> Side:
    """Return one side of a comparison, called ``title``; what its files lack is added to ``warnings``."""
    from simulator.input_files import as_path
    from simulator.traces.compare import simulated_side, traced_side
    from simulator.traces.execution.files import refuse_execution_trace

    if not _is_workload(name):
        refuse_execution_trace(as_path(name))
        trace = _opened([name])
        warnings += [f"{title}: {text}" for text in trace.missing]
        return traced_side(trace, title)

    import simulator

    with progress("simulating the workload"):
        result = simulator.run(name, set=changes)
    return simulated_side(result.spans, f"{title} (simulated)")

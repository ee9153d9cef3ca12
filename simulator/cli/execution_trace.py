"""``trace show`` and ``trace replay`` where the files are execution traces, which have no clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulator.cli.outputs import reading_inputs, tell
from simulator.cli.terminal import progress
from simulator.cli.trace_change import naming_options
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.traces.execution.graph import JobGraph


#: Option that is refused -> what to do in its place.
_INSTEAD = {
    "--gpu": "--cluster: its GPU decides where the trace has no durations",
    "--recorded-cluster": "--cluster alone, which plays the network",
}


def are_execution_traces(files: list[str]) -> bool:
    """Tell whether the first of the files is an execution trace."""
    from simulator.traces.execution.files import is_execution_trace

    return is_execution_trace(files[0])


def show_graphs(
    files: list[str], groups: str | None, top: int, json: Path | None, quiet: bool, refused: Mapping[str, object]
) -> None:
    """Say what is in execution traces. ``refused``: option -> its value, which has to be absent here."""
    from simulator.output.graph_tables import shown_graphs
    from simulator.traces.execution import report

    _refuse(refused)
    with reading_inputs({"--json": json}):
        job = _opened(files, groups)
    tell(report.shown_graphs(job, top), shown_graphs, json, quiet)


def replay_graph_files(
    files: list[str],
    cluster: Mapping[str, Any] | str | None,
    groups: str | None,
    json: Path | None,
    quiet: bool,
    refused: Mapping[str, object],
) -> None:
    """Play execution traces on a cluster, or as recorded. ``refused``: as of `show_graphs`."""
    from simulator.output.graph_tables import replayed_graphs
    from simulator.traces.execution import report
    from simulator.traces.execution.replay import replay_graphs

    _refuse(refused)
    with reading_inputs({"--json": json}):
        job = _opened(files, groups)
    with progress("playing the step"), naming_options(target="--cluster"):
        played = replay_graphs(job, cluster)
    tell(report.replayed_graphs(job, played), replayed_graphs, json, quiet)


def _refuse(options: Mapping[str, object]) -> None:
    """Raise `InputError` where an option is given that needs a clock."""
    for option, value in options.items():
        if value is not None:
            what = "is of profilers' traces, and these are execution traces"
            raise InputError(what, file=option, found=str(value), fix=_INSTEAD.get(option))


def _opened(files: list[str], groups: str | None) -> JobGraph:
    from simulator.traces.execution.files import open_graphs

    with progress("reading the trace"):
        return open_graphs(files, groups)

"""Results of simulations: the bases of a step's, a bare schedule's, shared jobs' and a sweep's results."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from simulator.config.section import is_whole
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.output.envelope import envelope
from simulator.output.files import PERFETTO_SUFFIXES, make_folder, profiler_files
from simulator.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.program import Program

#: Rows of a trace that a viewer can still open.
MAX_TRACE_ROWS = 5_000_000


class Result(ABC):
    """Result of a command: its figures under the names of the JSON output."""

    #: Command of ``llmsim`` with this result.
    command: ClassVar[str]

    @property
    @abstractmethod
    def warnings(self) -> list[str]:
        """Notes that a user should read before trusting the figures."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return the figures under the names of the JSON output, SI units."""

    @abstractmethod
    def __repr__(self) -> str:
        """Return the key figures in a few lines."""

    @cached_property
    def report(self) -> dict[str, Any]:
        """Content behind the keys that every JSON result begins with; not to be changed."""
        return envelope(self.command, self.warnings, **self.content())

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the results under the names of the JSON output, SI units."""
        return copy.deepcopy(self.report)


class PlayedResult(Result):
    """Result of what was played: figures, one Timeline or several, a picture and a trace."""

    @property
    @abstractmethod
    def timeline(self) -> pd.DataFrame:
        """Rows: one per kernel (or pass) and transfer of every simulated rank (see `Timeline.frame`)."""

    @abstractmethod
    def gantt(self) -> Figure:
        """Draw the Timeline: a row per pipeline stage."""

    @abstractmethod
    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome/Perfetto trace, gzipped if ``path`` ends in .gz."""


class TimelineResult(PlayedResult):
    """Result with one Timeline, ``spans``."""

    #: Unit of times in pictures; empty for seconds.
    time_unit: ClassVar[str] = ""

    spans: Timeline

    @property
    @abstractmethod
    def job_name(self) -> str:
        """Name in pictures and traces."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Type of every rank's GPU; empty where there are none."""
        return ()

    @property
    def whole_program(self) -> Program | None:
        """The program of the spans, which tells bytes and groups of communication; None where nothing does."""
        return None

    @property
    def title(self) -> str:
        """Title of pictures."""
        return self.job_name

    @cached_property
    def timeline(self) -> pd.DataFrame:
        """Rows: one per kernel (or pass) and transfer of every simulated rank (see `Timeline.frame`)."""
        return self.spans.frame()

    def gantt(self, ax: Axes | None = None) -> Figure:
        """Draw the Timeline, a row per pipeline stage; into ``ax`` where given."""
        from simulator.output.gantt import gantt

        return gantt(self.spans, ax, title=self.title, unit=self.time_unit)

    def save_trace(self, path: str | Path, ranks: Sequence[int] | None = None) -> None:
        """Write a Chrome/Perfetto trace, gzipped if ``path`` ends in .gz.

        It is Chrome's JSON, or Perfetto's own format where ``path`` ends in .pftrace or .pftrace.gz.
        ``ranks``: any ranks, simulated or not, each written once [one per pipeline stage]. Raises `InputError` where
        ranks do not exist or there are none, and for a trace too large to open.
        """
        from simulator.output.perfetto_trace import check_perfetto, write_perfetto_trace
        from simulator.output.trace import write_trace

        in_packets = str(path).endswith(PERFETTO_SUFFIXES)
        if in_packets:
            check_perfetto()
        spans, ranks = self._traced(ranks, path)
        if in_packets:
            write_perfetto_trace(spans, path, ranks=ranks)
        else:
            write_trace(spans, path, ranks=ranks, name=self.job_name)

    def save_traces(self, folder: str | Path, ranks: Sequence[int] | None = None) -> list[Path]:
        """Write a trace per rank into ``folder``, as PyTorch's profiler does, and return the files.

        The folder is made where its parent is there. HolisticTraceAnalysis reads such a folder. They hold what a GPU
        runs, its type, the bytes and groups of communication, and the step's mark, without the host's launches.
        ``ranks`` and errors: as of `save_trace`; and where the folder holds other traces, which would be read as ones
        of this job.
        """
        from simulator.output.comm_arguments import CommArguments
        from simulator.output.trace import drawn_ranks, write_trace

        spans, some = self._traced(ranks, folder)
        program = self.whole_program
        communication = None if program is None else CommArguments(program)
        drawn = drawn_ranks(spans, some)
        files = profiler_files(Path(folder), drawn)
        make_folder(folder)
        for rank, file in zip(drawn, files, strict=True):
            gpu = self.gpus[rank] if self.gpus else ""
            write_trace(spans, file, ranks=[rank], name=self.job_name, gpu=gpu, communication=communication)
        return files

    def save_timeline(self, path: str | Path) -> None:
        """Write the rows of `timeline` as a Parquet file, with a dictionary of its columns. Raises `InputError`."""
        from simulator.output.timeline_file import write_timeline

        write_timeline(self.spans, path, step_time_s=self.spans.step_time_s)

    def _traced(self, ranks: Sequence[int] | None, path: str | Path) -> tuple[Timeline, Sequence[int] | None]:
        """Return the spans of ``ranks`` and these, each once [all that were simulated]. Raises `InputError`."""
        if ranks is None:
            return self.spans, None
        ranks = _existing_ranks(ranks, self.spans.n_ranks)
        spans = self.spans.select_ranks(ranks)
        if spans.n_rows > MAX_TRACE_ROWS:
            raise InputError(
                f"{len(ranks)} ranks have {spans.n_rows:,} kernels and transfers",
                file=path,
                key="--trace-ranks",
                allowed=f"at most {MAX_TRACE_ROWS:,}, about a gigabyte",
                fix="fewer ranks",
            )
        return spans, ranks


class StepFigures(ABC):
    """Key figures of a training step as attributes, SI units."""

    @abstractmethod
    def key_figures(self) -> dict[str, Any]:
        """Return the figures by which jobs are compared."""

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Figures by which jobs are compared, under the names of the JSON output; not to be changed."""
        return self.key_figures()

    @property
    def step_time_s(self) -> float:
        """Seconds of a step, or between steps in a steady state."""
        return float(self.figures["step_time_s"])

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs."""
        return float(self.figures["tokens_per_s"])

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second of a GPU."""
        return float(self.figures["tokens_per_s_per_gpu"])

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the peak would do in the step."""
        return float(self.figures["mfu"])

    @property
    def hfu(self) -> float:
        """Hardware FLOPs over what the peak would do in the step."""
        return float(self.figures["hfu"])

    @property
    def bubble_fraction(self) -> float | None:
        """Idle time of pipelines over their window (see `simulator.analysis.training.bubble`); None without stages."""
        return cast("float | None", self.figures.get("bubble_fraction"))

    @property
    def exposed_communication_fraction(self) -> float:
        """Share of the step in which GPUs wait for communication."""
        return float(self.figures["exposed_communication_fraction"])

    @property
    def fits(self) -> bool:
        """True where the job fits into the memory of its GPUs and hosts."""
        return bool(self.figures["fits"])

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest GPU at its peak."""
        return float(self.figures["peak_bytes"])

    @property
    def headroom_bytes(self) -> float:
        """Least memory left on any GPU; negative where it does not fit."""
        return float(self.figures["headroom_bytes"])


def numbered_timelines(results: Iterable[TimelineResult]) -> dict[str, Timeline]:
    """Return Timelines by title, numbered so that equal titles differ."""
    return {f"{number}. {result.title}": result.spans for number, result in enumerate(results, 1)}


def _existing_ranks(ranks: object, n_ranks: int) -> list[int]:
    """Return ``ranks``, each once. Raises `InputError` unless they are some ranks of a job of ``n_ranks``."""
    if isinstance(ranks, Iterable):
        listed = list(ranks)
        if listed and all(is_whole(rank) and 0 <= rank < n_ranks for rank in listed):
            return list(dict.fromkeys(int(rank) for rank in listed))
    allowed = f"a list of one or more ranks, which are 0 to {n_ranks - 1}"
    raise InputError("no ranks of this job", key="ranks", found=brief(ranks), allowed=allowed)

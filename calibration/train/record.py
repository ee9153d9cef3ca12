"""Files that a training run leaves behind: ``DIR/NAME.json`` and, where it went well, ``DIR/NAME.timeline.csv.gz``.

NAME is the workload's. The JSON's keys; seconds, bytes, and FLOP/s throughout:

    format            1
    name              the workload's name
    status            ok | failed | skipped; of a failed or skipped run no keys but format, name, status, reason, date,
                      command, workload and, where it got so far, environment are sure to be there
    reason            why it failed or was skipped, else ""
    date, command     UTC, ISO 8601, when the run began; as typed, without paths
    workload          {text: the file as it was, resolved: the whole `Workload` as plain data, sha256: of the text}
    environment       see `calibration.measure.gpu.environment`: gpu, cuda, nccl, nvls, torch, nvidia_smi (driver), ...
    n_gpus            ranks
    tokens_per_step   of the whole job
    steps             {warm_up, settling, timed, profiled}: how many of each were done; every row of timed steps
                      begins with those that settle; records made before rows were timed do not have them
    step_time_s       {median, p10, p90, min, max, spread, each: [..]} over the timed steps, of each the slowest rank's
                      (between events on its stream); spread = (p90 - p10) / median
    wall_time_s       the same by the host's clock
    tokens_per_s      tokens_per_step / step_time_s.median
    loss              mean loss of every step, from the first of warm-up on
    memory_reason     added by hand: why the memory is not this run's alone; usually not there
    ranks             a list, one per rank in order:
      rank, place     place: {tp, dp, pp, ep}, its coordinates
      step_time_s, wall_time_s   {median, p10, p90, min, max, spread, each}, of this rank
      memory          {steady_allocated_bytes, peak_allocated_bytes, peak_reserved_bytes,
                      first_step_peak_allocated_bytes, left_allocated_bytes}:
                      torch.cuda.max_memory_allocated over the timed steps and over all steps, reserved over all,
                      and the peak of the first step (when the optimizer's state is made); left: what earlier
                      runs of the process had not given back before the run, which all of these count too (0
                      where it is not listed); empty without GPUs
      clocks          {sm_mhz: {median, min, max}, power_w: {..}, temp_c: {..}, throttle: [reasons seen]} of the timed
                      steps, read in each when the host has issued it; power is the driver's mean over a second; empty
                      without NVML
      host            {probe_s: [before the run, between its rows of timed steps, after it], probe_forward_s: [..],
                      backward_s}: seconds of passes of a small model (`calibration.narrow.PROBE`) that the host issues,
                      and of the forward ones, both empty without GPUs; the median of what a timed step's host spends
                      in backward passes
      profile         of the one profiled step kept, the last: {span_s (first start to last end on the GPU), busy_s
                      (some kernel runs), exposed_s (communication runs and no other kernel), exposed: {kind: s},
                      step_s (wall, under the profiler)}
      kernels         a list: {class, kind, op, seconds, launches} of the profiled step, where class is matmul |
                      attention | memory | optimizer | communication | copy; kind is tp | dp | pp | ep of
                      communication, else ""; op is the collective of communication (all_reduce, all_gather,
                      reduce_scatter, all_to_all, send_recv, broadcast), else "".
                      All kernels of the optimizer's step are of class optimizer, its communication excepted; copy is
                      the work of copy engines (memcpy between host and device)

The timeline is the profiled step of every rank, in columns rank, stream (compute | comm, numbered where there are
several), class, kind, name (the kernel's, cut to 80 characters), start_s, end_s: from the earliest kernel of any rank,
by the clocks of one host.
Without GPUs these are ops of the CPU.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from calibration.commits import sha256
from calibration.workloads import TIMELINE, is_of
from simulator.config.section import Section
from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.input_files import read_json, read_text

if TYPE_CHECKING:
    from calibration.train.profile import ProfiledKernel
    from simulator.config.workload import Workload

FORMAT = 1
#: What helps where a file is no record.
ANEW = "python -m calibration train with another --out writes one"
COLUMNS = ("rank", "stream", "class", "kind", "name", "start_s", "end_s")


class ExcerptSection(Section):
    """A section of which more is recorded than is read."""

    model_config = ConfigDict(extra="ignore")


class Steps(ExcerptSection):
    warm_up: int = 0


class EarlierResult(ExcerptSection):
    """The part of a record that decides whether its run is to be made again."""

    name: str
    status: str
    reason: str
    workload: dict[str, Any]
    environment: dict[str, Any]
    steps: Steps = Steps()


class RunResults:
    """The results in ``directory`` of workload files by name; ``workloads``: the content of those that can be read.

    ``gpu``: results are of GPUs; ``warm_up``: so many steps of each at least. Its functions raise `InputError` where a
    file there is no record of the run. What failed or was not done takes the place of no run that went well.
    """

    def __init__(
        self,
        directory: Path,
        paths: Mapping[str, Path],
        command: str,
        *,
        workloads: Mapping[str, Workload] = MappingProxyType({}),
        gpu: bool = True,
        warm_up: int = 0,
    ) -> None:
        self.directory, self.paths, self.workloads, self.command = directory, paths, workloads, command
        self.gpu, self.warm_up = gpu, warm_up
        self.environment: dict[str, Any] = {}
        self.kept: dict[str, str] = {}  # of runs that went well before, how it went now

    def start(self, environment: dict[str, Any]) -> None:
        self.environment = environment

    def add(self, row: dict[str, Any]) -> None:
        """Record a run as a worker reports it, or why it failed."""
        if "error" in row:
            self._write(row["op"], "failed", row["error"], {})
        else:
            self._write(row["name"], "ok", "", row)

    def skip(self, name: str, reason: str) -> None:
        """Record why a workload is not run; one that has been stays as it is."""
        if not self.stands(name, failed_too=False):
            self._write(name, "skipped", reason, {})

    def tell(self) -> int:
        """Say how all went; 1 where not all went well."""
        records = [self._read(name) for name in self.paths if self._path(name).exists()]
        bad = {one.name: f"{one.status} {one.name}: {one.reason}" for one in records if one.status != "ok"} | self.kept
        for line in bad.values():
            print(line, file=sys.stderr)
        print(f"{len(records) - len(bad)} trained, {len(bad)} failed or skipped: {self.directory}", file=sys.stderr)
        return 1 if bad or len(records) < len(self.paths) else 0

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _read(self, name: str) -> EarlierResult:
        path = self._path(name)
        return validated(EarlierResult, read_data(path, name), path)

    def stands(self, name: str, *, failed_too: bool) -> bool:
        """Return True where there is a result of the same workload, or if ``failed_too`` a failure.

        A run without GPUs does not stand for a run on them, nor a smoke run of two steps for a measurement.
        """
        if not self._path(name).exists():
            return False
        record = self._read(name)
        same = is_of(record.workload, self.paths[name], self.workloads.get(name))
        if not same or (self.gpu and "gpu" not in record.environment):
            return False
        if record.status != "ok":
            return failed_too and record.status == "failed"
        return record.steps.warm_up >= self.warm_up

    def _write(self, name: str, status: str, reason: str, row: dict[str, Any]) -> None:
        if status != "ok":
            if self._path(name).exists() and self._read(name).status == "ok":
                self.kept[name] = f"{status} {name}: {reason}\n  the record there stays, of a run that went well"
                return
            timeline_of(self.directory, name).unlink(missing_ok=True)
        text = read_text(self.paths[name])
        workload = {"text": text, **row.get("workload", {}), "sha256": sha256(text)}
        head = {"format": FORMAT, "name": name, "status": status, "reason": reason, "date": now()}
        record = {**head, "command": self.command, "environment": self.environment, **row, "workload": workload}
        partial = self._path(name).with_suffix(".part")
        partial.write_text(json.dumps(record, indent=1))
        partial.replace(self._path(name))


def read_data(path: Path, name: str) -> dict[str, Any]:
    """The record in ``path``, of which no more than this is known yet. Raises `InputError` where the file is not the
    record of run ``name``."""
    data = read_json(path)
    for key, right, problem in (("format", FORMAT, "no record of a run"), ("name", name, "is of another run")):
        if data.get(key) != right:
            raise InputError(problem, file=path, key=key, found=data.get(key), allowed=right, fix=ANEW)
    return data


def timeline_of(directory: Path, name: str) -> Path:
    """Return the path of the timeline of run ``name``."""
    return directory / f"{name}{TIMELINE}"


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def write_timeline(directory: Path, name: str, ranks: Sequence[Sequence[ProfiledKernel]]) -> None:
    """DIR/NAME.timeline.csv.gz, see above."""
    first = min((kernels[0].start_s for kernels in ranks if kernels), default=0.0)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for rank, kernels in enumerate(ranks):
        streams = {stream: number for number, stream in enumerate(dict.fromkeys(kernel.stream for kernel in kernels))}
        for s in kernels:
            stream = f"{s.stream.split()[0]}{streams[s.stream]}"
            times = (f"{s.start_s - first:.7f}", f"{s.end_s - first:.7f}")
            rows.writerow((rank, stream, s.kernel_class, s.kind, s.name, *times))
    timeline_of(directory, name).write_bytes(gzip.compress(text.getvalue().encode(), 6, mtime=0))

"""The record of a run as it is read to be compared: what `calibration.train.record` documents, checked key by key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from calibration.train.record import ExcerptSection, read_data
from simulator.bounds import Positive, Text
from simulator.config.section import AsTuple
from simulator.config.validation import validated
from simulator.errors import InputError


def _date(value: object) -> datetime.datetime:
    if not isinstance(value, str):
        raise ValueError("must be a date, ISO 8601")
    date = datetime.datetime.fromisoformat(value)
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)


#: Sections that are empty where nothing was measured.
_Empty = BeforeValidator(lambda value: value or None)


class StepTime(ExcerptSection):
    median: Positive
    spread: Annotated[float, Field(ge=0)]


class Ran(ExcerptSection):
    sha256: str
    resolved: dict[str, Any] = Field(default_factory=dict)


class RankPlace(ExcerptSection):
    pp: Annotated[int, Field(ge=0)] = 0


class RankHost(ExcerptSection):
    probe_s: Annotated[tuple[Positive, ...], AsTuple] = ()
    probe_forward_s: Annotated[tuple[Positive, ...], AsTuple] | None = None
    backward_s: Annotated[float, Field(ge=0)] | None = None
    """in backward passes of a timed step, the median"""

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        """Between two probes is a step; the forward passes are a part of all."""
        forward = self.probe_forward_s
        if len(self.probe_s) == 1:
            raise InputError("only one probe", key="ranks.host.probe_s", found=1, allowed="two at least, or none")
        if forward is not None and len(forward) != len(self.probe_s):
            lengths = f"{len(forward)} and {len(self.probe_s)}"
            raise InputError("unlike numbers of probe_forward_s and probe_s", key="ranks.host", found=lengths)
        for part, whole in zip(forward or (), self.probe_s, strict=False):
            if part >= whole:
                raise InputError("not less than probe_s", key="ranks.host.probe_forward_s", found=part, allowed=whole)
        return self


class MeasuredMemory(ExcerptSection):
    steady_allocated_bytes: Positive
    left_allocated_bytes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _leaves_some_to_the_run(self) -> MeasuredMemory:
        """Bytes that were there before the run are a part of all."""
        if self.left_allocated_bytes >= self.steady_allocated_bytes:
            raise InputError(
                "not less than steady_allocated_bytes",
                key="ranks.memory.left_allocated_bytes",
                found=self.left_allocated_bytes,
                allowed=self.steady_allocated_bytes,
            )
        return self

    @property
    def run_bytes(self) -> float:
        """Bytes that the run itself had in its timed steps."""
        return self.steady_allocated_bytes - self.left_allocated_bytes


class ProfiledStep(ExcerptSection):
    exposed_s: Annotated[float, Field(ge=0)]
    step_s: Positive | None = None


class RecordedKernels(ExcerptSection):
    name: Literal["matmul", "attention", "memory", "optimizer", "communication", "copy"] = Field(alias="class")
    kind: str
    seconds: Annotated[float, Field(ge=0)]
    launches: Annotated[int, Field(ge=1)]


class RankRecord(ExcerptSection):
    rank: int
    kernels: Annotated[tuple[RecordedKernels, ...], AsTuple]
    place: RankPlace = RankPlace()
    host: RankHost = RankHost()
    memory: Annotated[MeasuredMemory | None, _Empty] = None
    profile: Annotated[ProfiledStep | None, _Empty] = None


class Record(ExcerptSection):
    """A record as read of any run; a run that went well is a `RunRecord`."""

    name: Text
    status: Literal["ok", "failed", "skipped"]
    date: Annotated[datetime.datetime, BeforeValidator(_date)]
    workload: Ran
    reason: str = ""
    command: str = ""
    environment: dict[str, Any] = Field(default_factory=dict)


class RunRecord(Record):
    n_gpus: Annotated[int, Field(ge=1)]
    step_time_s: StepTime
    ranks: Annotated[tuple[RankRecord, ...], AsTuple]
    memory_reason: str = ""

    @property
    def strange_memory(self) -> str:
        """Why the allocated memory cannot be compared, as one line; empty where it can."""
        return " ".join(self.memory_reason.split())

    @model_validator(mode="after")
    def _whole(self) -> Self:
        """Every rank once, and of all of them as much."""
        numbers = [rank.rank for rank in self.ranks]
        if numbers != list(range(self.n_gpus)):
            raise InputError(
                "not one entry for each rank", key="ranks", found=numbers, allowed=f"0 to {self.n_gpus - 1}"
            )
        told: Mapping[str, set[object]] = {
            "host.probe_s": {len(rank.host.probe_s) for rank in self.ranks},
            "memory": {rank.memory is None for rank in self.ranks},
            "profile": {rank.profile is None for rank in self.ranks},
        }
        for key, answers in told.items():
            if len(answers) > 1:
                raise InputError("not of all ranks alike", key=f"ranks.{key}", fix="train the workload again")
        return self


def read_record(directory: Path, name: str) -> Record | None:
    """Return the record of run ``name``, a `RunRecord` where it went well; None: there is none.

    Raises `InputError` where the file is not the record of this run, or lacks something.
    """
    path = directory / f"{name}.json"
    if not path.exists():
        return None
    data = read_data(path, name)
    return validated(RunRecord if data.get("status") == "ok" else Record, data, path)

"""Predictions of runs, with what they came from: the profile's hash and the commit of the simulator."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from calibration.commits import head, sha256
from calibration.compare.figures import Figures, simulated_figures
from calibration.train.record import ExcerptSection
from calibration.workloads import check_name, name_clash
from simulator.api import run
from simulator.bounds import NotNegative, Positive
from simulator.config import Workload, load_workload
from simulator.config.catalog import find
from simulator.config.section import AsTuple
from simulator.config.validation import validated
from simulator.errors import DeadlockError, InputError
from simulator.input_files import read_json, read_text
from simulator.step_result import StepResult

FORMAT = 1


@dataclass(frozen=True)
class Simulated:
    """One workload file, simulated: its ``result``, or the ``reason`` why there is none. ``sha256``: of the file."""

    workload: Workload
    sha256: str
    profile_sha256: str
    result: StepResult | None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def profile(self) -> str:
        return next(iter(self.workload.calibrations.values()))

    def to_dict(self) -> dict[str, Any]:
        """A row of the predictions' file."""
        row: dict[str, Any] = {
            "name": self.name,
            "workload_sha256": self.sha256,
            "profile": self.profile,
            "reason": self.reason,
        }
        if self.result is not None:
            report = self.result.to_dict()
            row |= {"figures": simulated_figures(self.result).to_dict(), "time_breakdown_s": report["time_breakdown_s"]}
        return row


def simulate(path: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> Simulated:
    """Simulate a workload file with ``changes``. Raises `InputError` where the file itself cannot be used."""
    workload = load_workload(path, changes)
    check_name(workload.name, path)
    if len(workload.calibrations) > 1:
        types = ", ".join(workload.calibrations)
        raise InputError("runs on GPUs of several types", file=path, key="cluster", found=types, allowed="one type")
    profile = find("profile", next(iter(workload.calibrations.values())), base=path.parent)
    loaded = (workload, sha256(read_text(path)), sha256(read_text(profile)))
    try:
        return Simulated(*loaded, run(workload))
    except (InputError, DeadlockError) as problem:
        return Simulated(*loaded, None, " ".join(str(problem).split()))


def simulate_all(jobs: Iterable[tuple[Path, Mapping[str, Any]]]) -> list[Simulated]:
    """Every file with its changes, in order. Raises `InputError` where two have one name, by which runs are found."""
    simulated: dict[str, tuple[Path, Simulated]] = {}
    for path, changes in jobs:
        one = simulate(path, changes)
        if one.name in simulated:
            raise name_clash(one.name, simulated[one.name][0], path)
        simulated[one.name] = path, one
    return [one for _, one in simulated.values()]


@dataclass(frozen=True)
class Predictions:
    """A file of predictions. ``profiles``: name -> hash; ``figures``: run -> what was predicted; ``workloads``: run ->
    hash of its file; ``on``: run -> name of the profile. ``commit``: that the simulator was at, empty where it was not
    known; ``changes``: of every workload, as with --set."""

    date: str
    commit: str
    changes: Mapping[str, Any]
    profiles: Mapping[str, str]
    workloads: Mapping[str, str]
    on: Mapping[str, str]
    figures: Mapping[str, Figures]


def predictions(simulated: Sequence[Simulated], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the file. ``changes``: with which all were simulated."""
    commit = head()
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": "" if commit is None else commit.id,
        "uncommitted_changes": commit is not None and commit.changed,
        "changes": dict(changes),
        "profiles": {one.profile: one.profile_sha256 for one in simulated},
        "predictions": [one.to_dict() for one in simulated],
    }


class _Figures(ExcerptSection):
    step_time_s: Positive
    mfu: float | None = None
    peak_allocated_bytes: Annotated[tuple[NotNegative, ...], AsTuple]
    class_s: dict[str, NotNegative | Annotated[tuple[NotNegative, ...], AsTuple] | None]
    exposed_s: NotNegative | None = None
    bubble: float | None = None


class _PredictedRow(ExcerptSection):
    name: str
    workload_sha256: str
    profile: str
    figures: _Figures | None = None


class _File(ExcerptSection):
    date: str
    commit: str
    changes: dict[str, Any]
    profiles: dict[str, str]
    predictions: Annotated[tuple[_PredictedRow, ...], AsTuple]


def read_predictions(path: Path) -> Predictions:
    """Raises `InputError` where it is no file of predictions."""
    data = read_json(path)
    if data.get("format") != FORMAT:
        fix, version = "python -m calibration predict writes one", data.get("format")
        raise InputError("no file of predictions", file=path, key="format", found=version, allowed=FORMAT, fix=fix)
    file = validated(_File, data, path)
    return Predictions(
        date=file.date,
        commit=file.commit,
        changes=file.changes,
        profiles=file.profiles,
        workloads={row.name: row.workload_sha256 for row in file.predictions},
        on={row.name: row.profile for row in file.predictions},
        figures={row.name: Figures.from_dict(row.figures.model_dump()) for row in file.predictions if row.figures},
    )

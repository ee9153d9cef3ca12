"""``python -m calibration.compare.suite``: write suites of our own runs anew from the records in calibration/results.

``own-h200`` has those of plain PyTorch, ``own-frameworks`` those of the code of others, ``own-fp8`` those of torchtitan
with torchao's recipes. Their errors, and those of ``own-h200-memory`` and the like, are then recorded by `python -m
simulator.validation.record`.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibration.compare.measured import MeasuredRun, unlike
from calibration.compare.record import RunRecord, read_record
from calibration.compare.software import BATCHED, SHARP, as_it_ran
from calibration.workloads import by_name
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.validation.suites import SUITES

ROOT = Path(__file__).resolve().parent.parent
RUNS, RESULTS = ROOT / "runs", ROOT / "results"


class OwnRuns(NamedTuple):
    """A suite of our own runs: folders of its workload files in calibration/runs, and that of their records."""

    suite: str
    workloads: tuple[str, ...]
    records: str


TABLES = (
    OwnRuns("own-h200", ("fit", "predicted", "eight"), "runs"),
    OwnRuns("own-frameworks", ("frameworks",), "frameworks"),
    OwnRuns("own-fp8", ("fp8",), "fp8"),
)
#: What the runs were made on: a node whose NVSwitches serve every GPU at full speed, of which they took the first.
CLUSTER = {"cluster.name": "hgx_h200_8gpu"}
GPU = "H200"
#: A workload's keys that a row sets: its cluster, the speed of its hosts, what its PyTorch and NCCL do.
KEYS = ("cluster.name", "cluster.node.host_speed", "cluster.node.autograd_speed", "cluster.overrides", BATCHED, SHARP)
COLUMNS = ("id", "source", "gpu", "workload", "measured_step_s", "mem_gb")


def rows_of(workloads: Sequence[Path], records: Path, folder: Path) -> list[dict[str, str]]:
    """A row of ``validate --rows`` for each of the workload files that has a record; ``folder``: of the table, from
    which files are named. Raises `InputError` on a record that cannot be used, or of another workload or GPU."""
    rows = []
    for name, (path, entry) in by_name(workloads).items():
        if isinstance(entry, InputError):
            raise entry
        record = read_record(records, name)
        if record is None:
            continue
        if reason := unlike(record, path, load_workload(path, CLUSTER)):
            raise InputError(reason, file=records / f"{name}.json")
        changes: Mapping[str, Any] = as_it_ran(records, path, CLUSTER)
        row = {
            "id": name,
            "source": f"python -m calibration train, {record.date:%Y-%m-%d}, {MeasuredRun(record, '').hardware}",
            "gpu": GPU,
            "workload": Path(os.path.relpath(path, folder)).as_posix(),
            "notes": " ".join(record.reason.split()),
        }
        if isinstance(record, RunRecord):
            peaks = [rank.memory.run_bytes for rank in record.ranks if rank.memory is not None]
            row["measured_step_s"] = f"{record.step_time_s.median:.6g}"
            if record.strange_memory:
                row["notes"] = f"memory left out: {record.strange_memory}"
            elif peaks:
                row["mem_gb"] = f"{max(peaks) / 1e9:.6g}"
        rows.append(row | {key: _cell(changes[key]) for key in KEYS if key in changes})
    return rows


def as_csv(rows: Sequence[Mapping[str, str]]) -> str:
    """The table's text; a key that no row sets has no column."""
    text = io.StringIO()
    columns = (*COLUMNS, *(key for key in KEYS if any(key in row for row in rows)), "notes")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def shipped(table: OwnRuns) -> str:
    """Return the text of the suite's table."""
    files = sorted(path for folder in table.workloads for path in (RUNS / folder).glob("*.yaml"))
    return as_csv(rows_of(files, RESULTS / table.records, SUITES[table.suite].table.parent))


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    for table in TABLES:
        SUITES[table.suite].table.write_text(shipped(table), encoding="utf-8")

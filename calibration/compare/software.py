"""What the hosts and the PyTorch of a real run did that its workload does not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.compare.hosts import of_runs, with_host
from calibration.compare.record import Record, Run, read_record
from simulator.config import load_workload
from simulator.errors import InputError

KEY = "parallelism.batch_p2p"
#: From here on `torch.distributed.pipelining` sends and receives one by one (pull request 175712 of pytorch/pytorch);
#: 2.11 makes a batch of each, and all of them run on one stream of a GPU.
ONE_BY_ONE = (2, 12)


def as_it_ran(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """``changes``, and unless they say so the speeds of the run's hosts and what its PyTorch does. Raises `InputError`
    on a record that cannot be used."""
    return with_torch(directory, workload, with_host(directory, workload, changes))


def with_torch(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """``changes``, and unless they say so how pipelines of the run's PyTorch send and receive, where that is known and
    matters. Raises `InputError` on a record that cannot be used."""
    if KEY in changes:
        return changes
    known = load_workload(workload, changes)
    if not (known.pipelined_by_torch and known.parallelism.posts_ahead):
        return changes
    record = read_record(directory, known.name)
    return {**changes, KEY: True} if record is not None and _in_batches(record) else changes


def like(directory: Path, workload: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What predictions for the machine and the PyTorch of the runs recorded in ``directory`` need beside ``changes``;
    see `calibration.compare.hosts.of_runs`. Raises `InputError` where none was probed, and on what is no record."""
    records = [read_record(directory, path.stem) for path in sorted(directory.glob("*.json"))]
    found = of_runs((record for record in records if isinstance(record, Run)), workload, changes)
    if not found:
        fix = "python -m calibration train, on GPUs, probes hosts beside every run"
        raise InputError("no run there was probed", key="--like", found=str(directory), fix=fix)
    return {**found, KEY: True} if any(record is not None and _in_batches(record) for record in records) else found


def _in_batches(record: Record) -> bool:
    """Whether the run's PyTorch makes a batch of every send and receive."""
    release = re.match(r"(\d+)\.(\d+)", str(record.environment.get("torch", "")))
    return release is not None and (int(release[1]), int(release[2])) < ONE_BY_ONE

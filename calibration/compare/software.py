"""What the hosts and the PyTorch of a real run did that its workload does not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.compare.hosts import with_host
from calibration.compare.record import read_record
from simulator.config import load_workload

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
    release = re.match(r"(\d+)\.(\d+)", str(record.environment.get("torch", ""))) if record else None
    if release is None or (int(release[1]), int(release[2])) >= ONE_BY_ONE:
        return changes
    return {**changes, KEY: True}

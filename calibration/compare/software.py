"""Settings of the hosts, the PyTorch and the NCCL of a real run that its workload does not say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calibration.compare.hosts import median_speeds, with_host
from calibration.compare.record import Record, RunRecord, read_record
from simulator.config import Workload, load_workload
from simulator.errors import InputError

BATCHED, SHARP = "parallelism.batch_p2p", "cluster.node.nvlink.sharp"
#: From here on `torch.distributed.pipelining` sends and receives one by one (pull request 175712 of pytorch/pytorch);
#: 2.11 makes a batch of each, and all of them run on one stream of a GPU.
ONE_BY_ONE = (2, 12)


def as_it_ran(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """``changes``, and unless they say so the speeds of the run's hosts and what its PyTorch and NCCL do. Raises
    `InputError` on a record that cannot be used."""
    return with_software(directory, workload, with_host(directory, workload, changes))


def with_software(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``changes`` with the settings of the run's PyTorch and NCCL, where they are known and matter.

    The settings are how pipelines send and receive, and whether switches sum up. Settings that ``changes`` have stay.
    Raises `InputError` on a record that cannot be used.
    """
    loaded = load_workload(workload, changes)
    record = read_record(directory, loaded.name)
    if record is None:
        return changes
    settings = _sharp([record], loaded)
    if loaded.stage_runtime.buffers_each_microbatch and loaded.parallelism.posts_ahead and _in_batches(record):
        settings[BATCHED] = True
    return {**settings, **changes}


def like(directory: Path, workload: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the machine and the PyTorch of the runs recorded in ``directory``, beside ``changes``.

    See `calibration.compare.hosts.median_speeds`. Raises `InputError` where none was probed, and on
    a file that is no record.
    """
    records = [read_record(directory, path.stem) for path in sorted(directory.glob("*.json"))]
    settings = median_speeds((record for record in records if isinstance(record, RunRecord)), workload, changes)
    if not settings:
        fix = "python -m calibration train, on GPUs, probes hosts beside every run"
        raise InputError("no run there was probed", key="--like", found=str(directory), fix=fix)
    existing = [record for record in records if record is not None]
    settings |= _sharp(existing, load_workload(workload, changes))
    return {**settings, BATCHED: True} if any(map(_in_batches, existing)) else settings


def _sharp(records: Iterable[Record], workload: Workload) -> dict[str, Any]:
    """Return the setting of NVSwitches that sum up, or nothing where it need not change.

    It changes where all records agree, ``workload`` says something else of its NVSwitches, and it has several ranks.
    """
    nvls = {record.environment.get("nvls") for record in records}
    node = workload.cluster.node
    if node is None or node.nvlink.kind != "nvswitch" or workload.n_ranks == 1:
        return {}
    told = nvls.pop() if len(nvls) == 1 else None
    return {SHARP: told} if isinstance(told, bool) and told != node.nvlink.sharp else {}


def _in_batches(record: Record) -> bool:
    """Return True where the run's PyTorch makes a batch of every send and receive."""
    release = re.match(r"(\d+)\.(\d+)", str(record.environment.get("torch", "")))
    return release is not None and (int(release[1]), int(release[2])) < ONE_BY_ONE

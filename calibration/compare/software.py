"""What the hosts, the PyTorch and the NCCL of a real run did that its workload does not say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from calibration.compare.hosts import of_runs, with_host
from calibration.compare.record import Record, Run, read_record
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
    """``changes``, and unless they say so how pipelines of the run's PyTorch send and receive, and whether its NCCL had
    the switches sum up, where that is known and matters. Raises `InputError` on a record that cannot be used."""
    known = load_workload(workload, changes)
    record = read_record(directory, known.name)
    if record is None:
        return changes
    found = _sharp([record], known)
    if known.stage_runtime.buffers_each_microbatch and known.parallelism.posts_ahead and _in_batches(record):
        found[BATCHED] = True
    return {**found, **changes}


def like(directory: Path, workload: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What predictions for the machine and the PyTorch of the runs recorded in ``directory`` need beside ``changes``;
    see `calibration.compare.hosts.of_runs`. Raises `InputError` where none was probed, and on what is no record."""
    records = [read_record(directory, path.stem) for path in sorted(directory.glob("*.json"))]
    found = of_runs((record for record in records if isinstance(record, Run)), workload, changes)
    if not found:
        fix = "python -m calibration train, on GPUs, probes hosts beside every run"
        raise InputError("no run there was probed", key="--like", found=str(directory), fix=fix)
    made = [record for record in records if record is not None]
    found |= _sharp(made, load_workload(workload, changes))
    return {**found, BATCHED: True} if any(map(_in_batches, made)) else found


def _sharp(records: Iterable[Record], workload: Workload) -> dict[str, Any]:
    """Whether NVSwitches summed up in runs, where their records agree on that, ``workload`` says something else of its
    own and several of its GPUs share a node."""
    nvls = {record.environment.get("nvls") for record in records}
    node = workload.cluster.node
    if node is None or node.nvlink.kind != "nvswitch" or workload.n_ranks == 1:
        return {}
    told = nvls.pop() if len(nvls) == 1 else None
    return {SHARP: told} if isinstance(told, bool) and told != node.nvlink.sharp else {}


def _in_batches(record: Record) -> bool:
    """Whether the run's PyTorch makes a batch of every send and receive."""
    release = re.match(r"(\d+)\.(\d+)", str(record.environment.get("torch", "")))
    return release is not None and (int(release[1]), int(release[2])) < ONE_BY_ONE

"""Speeds of the hosts of real runs, against the calibrated host.

A probe is the seconds that a host takes to issue the passes of a small model. Hosts are probed before, between and
after the steps of each run; the calibrated host was probed beside its measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from calibration.compare.record import RankHost, RunRecord, read_record
from calibration.fit.hosts import Pace, probe_of
from calibration.workloads import is_of
from simulator.config import Workload, load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.hardware.profile import Profile

KEY, BACKWARD_KEY, GPUS = "cluster.node.host_speed", "cluster.node.autograd_speed", "cluster.overrides"


def with_host(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``changes`` with the speeds of the hosts that ran the workload, where their record tells them.

    Speeds that ``changes`` say already stay, forward and backward. A stage's speed is the mean over the steps, in each
    of which its slowest host counts. Ranks of a stage meet in every step, whose length the slowest decides. Stages have
    different work. Raises `InputError` on a record that cannot be used.
    """
    if KEY in changes:
        return changes
    loaded = load_workload(workload, changes)
    run = read_record(directory, loaded.name)
    if not isinstance(run, RunRecord) or not is_of(run.workload.model_dump(), workload, load_workload(workload)):
        return changes
    profile = load_profile(next(iter(loaded.calibrations.values())))
    usual = _usual(profile, loaded)
    paces = _by_stage(run, usual)
    if not paces:
        return changes
    slowest = max(paces.values(), key=sum)
    speeds: dict[str, Any] = dict(zip((KEY, BACKWARD_KEY), _speeds(usual, slowest), strict=True))
    if len(paces) > 1 and not loaded.cluster.overrides:
        count = loaded.cluster.node_at(0).gpus.count
        speeds[GPUS] = [
            {"gpu": f"node{number // count}.gpu{number % count}", "host_speed": host}
            | ({} if BACKWARD_KEY in changes else {"autograd_speed": autograd})
            for number, rank in enumerate(run.ranks)
            for host, autograd in (_speeds(slowest, paces[rank.place.pp]),)
        ]
    merged = {**changes, **{key: value for key, value in speeds.items() if key not in changes}}
    try:
        load_workload(workload, merged)
    except InputError as problem:
        where = directory / f"{loaded.name}.json"
        problem_text = f"its probes give no speed of a host: {problem}"
        raise InputError(
            problem_text, file=where, key="ranks.host", fix=f"--set {KEY}=1 for the profile's host"
        ) from None
    return merged


def median_speeds(runs: Iterable[RunRecord], workload: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the median speeds of the hosts of ``runs``, of each run its slowest stage's; nothing without probes.

    Speeds are against the profile that ``workload`` has with ``changes``. Raises `InputError` on a bad workload.
    """
    loaded = load_workload(workload, changes)
    usual = _usual(load_profile(next(iter(loaded.calibrations.values()))), loaded)
    paces = [_by_stage(run, usual).values() for run in runs]
    speeds = [_speeds(usual, max(stages, key=sum)) for stages in paces if stages]
    return dict(zip((KEY, BACKWARD_KEY), map(median, zip(*speeds, strict=True)), strict=True)) if speeds else {}


def _by_stage(run: RunRecord, usual: Pace) -> dict[int, Pace]:
    """Return the pace of the slowest host of each pipeline stage; nothing of a run without probes."""
    stages: dict[int, list[list[Pace]]] = {}
    for rank in run.ranks:
        if rank.host.probe_s:
            stages.setdefault(rank.place.pp, []).append(_around(rank.host, usual))
    return {stage: _slowest(paces) for stage, paces in stages.items()}


def _speeds(usual: Pace, pace: Pace) -> tuple[float, float]:
    """Return how much faster than ``usual`` a host of ``pace`` is, and its autograd beside that."""
    host, backward = usual.forward / pace.forward, usual.backward / pace.backward
    return float(f"{host:.4g}"), float(f"{backward / host:.4g}")


def _slowest(ranks: Sequence[Sequence[Pace]]) -> Pace:
    """The mean over what lies between two probes of the slowest of ``ranks`` there."""
    return Pace(*map(fmean, zip(*(max(at_once, key=sum) for at_once in zip(*ranks, strict=True)), strict=True)))


def _usual(profile: Profile, workload: Workload) -> Pace:
    """Seconds of the calibrated host: what it took when it was measured, else what its costs say."""
    told = profile.provenance
    if told is not None and told.host_forward_s is not None and told.host_backward_s is not None:
        return Pace(told.host_forward_s, told.host_backward_s)
    return probe_of(Costs.from_profile(profile, workload.software))


def _around(host: RankHost, usual: Pace) -> list[Pace]:
    """Return the means of a rank's neighbouring probes, one for each step between two.

    In records that do not tell forward from backward both are as slow.
    """
    share, whole = usual.forward / sum(usual), host.probe_s
    forward = host.probe_forward_s or [share * seconds for seconds in whole]
    told = [Pace(part, seconds - part) for part, seconds in zip(forward, whole, strict=True)]
    return [Pace(*map(fmean, zip(*two, strict=True))) for two in pairwise(told)]

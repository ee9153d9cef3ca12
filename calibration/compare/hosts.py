"""How fast the hosts of real runs were, against the calibrated one: what they took to issue the passes of a small model
before, between and after the steps of each run, against what the calibrated one took beside what was measured on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from calibration.compare.record import Host, Run, read_record
from calibration.fit.hosts import Pace, probe_of
from calibration.workloads import is_of
from simulator.config import Workload, load_workload
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError
from simulator.hardware.profile import Profile

KEY, BACKWARD_KEY, GPUS = "cluster.node.host_speed", "cluster.node.autograd_speed", "cluster.overrides"


def with_host(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """``changes``, and unless they say how fast the host is the speeds of the hosts that ran the workload, where known,
    forward and, unless they say that, backward: means over the steps, of each that of the host of a pipeline stage that
    was slowest around it.

    Ranks that do the same meet in every step, which the slowest makes as long as it is; stages have different work.
    Raises `InputError` on a record that cannot be used.
    """
    if KEY in changes:
        return changes
    known = load_workload(workload, changes)
    run = read_record(directory, known.name)
    if not isinstance(run, Run) or not is_of(run.workload.model_dump(), workload, load_workload(workload)):
        return changes
    profile = load_profile(next(iter(known.calibrations.values())))
    usual = _usual(profile, known)
    paces = _by_stage(run, usual)
    if not paces:
        return changes
    slowest = max(paces.values(), key=sum)
    found: dict[str, Any] = dict(zip((KEY, BACKWARD_KEY), _speeds(usual, slowest), strict=True))
    if len(paces) > 1 and not known.cluster.overrides:
        count = known.cluster.node_at(0).gpus.count
        found[GPUS] = [
            {"gpu": f"node{number // count}.gpu{number % count}", "host_speed": host}
            | ({} if BACKWARD_KEY in changes else {"autograd_speed": autograd})
            for number, rank in enumerate(run.ranks)
            for host, autograd in (_speeds(slowest, paces[rank.place.pp]),)
        ]
    merged = {**changes, **{key: value for key, value in found.items() if key not in changes}}
    try:
        load_workload(workload, merged)
    except InputError as problem:
        where = directory / f"{known.name}.json"
        said = f"its probes give no speed of a host: {problem}"
        raise InputError(said, file=where, key="ranks.host", fix=f"--set {KEY}=1 for the profile's host") from None
    return merged


def of_runs(runs: Iterable[Run], workload: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Speeds of hosts in the middle of those of ``runs``, of each run its slowest stage's: against the profile that
    ``workload`` has with ``changes``; nothing where none was probed. Raises `InputError` on a bad workload."""
    known = load_workload(workload, changes)
    usual = _usual(load_profile(next(iter(known.calibrations.values()))), known)
    paces = [_by_stage(run, usual).values() for run in runs]
    speeds = [_speeds(usual, max(stages, key=sum)) for stages in paces if stages]
    return dict(zip((KEY, BACKWARD_KEY), map(median, zip(*speeds, strict=True)), strict=True)) if speeds else {}


def _by_stage(run: Run, usual: Pace) -> dict[int, Pace]:
    """Of each pipeline stage, the slowest of its hosts; of a run that was not probed, none."""
    stages: dict[int, list[list[Pace]]] = {}
    for rank in run.ranks:
        if rank.host.probe_s:
            stages.setdefault(rank.place.pp, []).append(_around(rank.host, usual))
    return {stage: _slowest(of_ranks) for stage, of_ranks in stages.items()}


def _speeds(of: Pace, pace: Pace) -> tuple[float, float]:
    """How much faster than ``of`` a host of ``pace`` is, and its autograd beside that."""
    host, backward = of.forward / pace.forward, of.backward / pace.backward
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


def _around(host: Host, usual: Pace) -> list[Pace]:
    """From one of a rank's probes to the next, the means of both; of records that do not tell forward from backward
    both are as slow."""
    share, whole = usual.forward / sum(usual), host.probe_s
    forward = host.probe_forward_s or [share * seconds for seconds in whole]
    told = [Pace(part, seconds - part) for part, seconds in zip(forward, whole, strict=True)]
    return [Pace(*map(fmean, zip(*two, strict=True))) for two in pairwise(told)]

"""How fast the hosts of real runs were, against the calibrated one: what they took to issue the passes of a small model
before, between and after the steps of each run, against what the calibrated one took beside what was measured on it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calibration.fit.hosts import probe_s
from simulator.config import load_workload
from simulator.config.files import read_text
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError

KEY = "cluster.node.host_speed"


def with_host(directory: Path, workload: Path, changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """``changes``, and where they do not say it the speed of the hosts that ran the workload, where known: the mean
    of what the slowest took at each time.

    Ranks meet in every step, which lasts as long as the one whose host is slowest then. Raises `InputError` on a record
    that cannot be read.
    """
    if KEY in changes:
        return changes
    known = load_workload(workload, changes)
    record = directory / f"{known.name}.json"
    if not record.exists():
        return changes
    try:
        ranks = json.loads(read_text(record)).get("ranks", [])
        probed = [said for rank in ranks if (said := rank.get("host", {}).get("probe_s"))]
        slowest = [max(at_once) for at_once in zip(*probed, strict=True)]
    except (ValueError, TypeError, AttributeError) as problem:
        raise InputError(f"no record of a run: {problem!r}", file=record) from None
    if not slowest:
        return changes
    profile = load_profile(next(iter(known.calibrations.values())))
    calibrated_s = None if profile.provenance is None else profile.provenance.host_probe_s
    if calibrated_s is None:  # not probed when it was measured
        calibrated_s = probe_s(Costs.from_profile(profile, known.training.implementation))
    return {**changes, KEY: float(f"{calibrated_s / statistics.fmean(slowest):.4g}")}  # after the cluster that it is in

"""Keys of points: hashes of all that their figures follow from.

A point that is written in other words, and comes to the same job, has the same key. A file that has changed, be it the
workload's, a cluster's, a profile's, or the simulator's own, gives another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from simulator.config import Workload
from simulator.config.pipelines import is_file
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.stack import load_stack
from simulator.input_files import read_content
from simulator.sweeping.point import Point

#: Fields of a workload that name something, and do not describe it.
_NAMES = {"name", "note", "calibration", "stack"}
#: Keys of lists whose order says nothing: what is in one is, and is once.
_SETS = (
    "model.biases",
    "model.encoder.global_layers",
    "training.recompute.modules",
    "training.adapters.targets",
    "training.unfused",
    "training.freeze",
    "framework.cuda_graphs",
)
#: Packages on whose sources no figure depends: no step needs them, but for pictures and what keeps its figures.
FIGURELESS = (
    "advising",
    "capturing",
    "cli",
    "commands",
    "drafting",
    "launch_scripts",
    "output",
    "planning",
    "searching",
    "sweeping",
    "traces",
)
#: Most descriptions whose digests are remembered.
_MOST_DIGESTS = 64

#: Number of an object -> the object, and its digest.
_digests: dict[int, tuple[object, str]] = {}


def job_key(workload: Workload) -> str:
    """Return the key of a loaded workload: of its sections, cluster, profiles and stack, and of the simulator."""
    data = workload.model_dump(mode="json", exclude=_NAMES)
    for key in _SETS:
        *above, name = key.split(".")
        section: Any = data
        for part in above:
            section = section and section.get(part)
        if section and section.get(name):
            section[name] = sorted(set(section[name]))
    data["profiles"] = {gpu: _digest(load_profile(name)) for gpu, name in workload.calibrations.items()}
    data["stack"] = _digest(load_stack(workload.stack)) if workload.stack else None
    schedule = workload.parallelism.schedule
    if is_file(schedule):
        data["parallelism"]["schedule"] = hashlib.sha256(read_content(Path(schedule))).hexdigest()
    if workload.model.captured:
        data["model"]["captured"] = hashlib.sha256(read_content(Path(workload.model.captured))).hexdigest()
    return _hash({"job": data, "simulator": simulator_version()})


def written_key(point: Point) -> str:
    """Return the key of a point that cannot be loaded: of its words alone."""
    source = dict(point.workload) if isinstance(point.workload, Mapping) else str(point.workload)
    return _hash({"written": [source, dict(point.changes)], "simulator": simulator_version()})


@cache
def simulator_version() -> str:
    """Return a digest of the simulator's sources, its version among them; commands and pictures do not count."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.yaml"), *package.rglob("*.[ch]")]):
        place = path.relative_to(package)
        if place.parts[0] not in (*FIGURELESS, "shipped"):
            digest.update(place.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _digest(description: object) -> str:
    """Return the hash of a profile or stack, worked out once for the object that `simulator.config` hands out again."""
    kept = _digests.get(id(description))
    if kept is None or kept[0] is not description:
        if len(_digests) >= _MOST_DIGESTS:
            del _digests[next(iter(_digests))]
        kept = _digests[id(description)] = description, _hash(as_data(description))
    return kept[1]


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()

"""Fit the NVLink transport of a profile to measured collectives inside a node.

    python -m calibration.fit_transports nccl.csv --profile a100-sxm-80gb --cluster dgx_a100 [--skip all_reduce:8]

The CSV has columns op_name, nccl_dtype, num_gpus, message_size (elements) and latency (ms), as aiconfigurator publishes
them; half-precision rows are used, the median where a point was measured more than once. ``--skip`` leaves out what the
model does not describe, such as NVLink SHARP. Starts from the profile's constants, changes one at a time while the mean
absolute logarithm of predicted / measured falls, and prints them as YAML with the residuals. The efficiency is kept: it
is what far larger messages than those in the table show.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from simulator.cluster import build_cluster
from simulator.config.cluster import load_cluster
from simulator.config.profile import load_profile
from simulator.config.transport import Transport
from simulator.network.collectives import patterns
from simulator.network.pattern import Pattern, timed

OPS = {"alltoall": "all_to_all"}
FITTED = (
    "copy_Bps",
    "p2p_latency_s",
    "peer_latency_s",
    "ll.base_latency_s",
    "ll.hop_latency_s",
    "ll.bandwidth_fraction",
    "ll128.base_latency_s",
    "ll128.hop_latency_s",
    "ll128.bandwidth_fraction",
    "simple.base_latency_s",
    "simple.hop_latency_s",
    "simple.half_bytes",
)
LARGE_BYTES = 64 * 2**20


class Point(NamedTuple):
    op: str
    n: int
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class OneTransport:
    """Costs where every link is of one transport."""

    model: Transport

    def transport(self, kind: str) -> Transport:
        return self.model

    def link_efficiency(self, kind: str) -> float:
        return self.model.efficiency


def read_points(path: Path, skip: Iterable[str] = ()) -> list[Point]:
    """The points of a table, ordered by operation, number of GPUs and size."""
    seen: dict[tuple[str, int, float], list[float]] = {}
    with path.open() as stream:
        for row in csv.DictReader(stream):
            op = OPS.get(row["op_name"], row["op_name"])
            if row["nccl_dtype"] == "half" and f"{op}:{row['num_gpus']}" not in skip:
                key = op, int(row["num_gpus"]), 2.0 * float(row["message_size"])
                seen.setdefault(key, []).append(float(row["latency"]) * 1e-3)
    return [Point(*key, statistics.median(times)) for key, times in sorted(seen.items())]


def residuals(
    model: Transport, points: Iterable[Point], candidates: Mapping[tuple[str, int], Sequence[Pattern]]
) -> list[float]:
    """log(predicted / measured) of each point."""
    costs = OneTransport(model)
    return [
        math.log(min(timed(pattern, p.nbytes, costs)[0] for pattern in candidates[p.op, p.n]) / p.seconds)
        for p in points
    ]


def changed(model: Transport, name: str, factor: float) -> Transport:
    """The transport with one constant multiplied."""
    data = model.model_dump()
    section, _, key = name.rpartition(".")
    inner = data["protocols"][section] if section else data
    inner[key] *= factor
    if key == "bandwidth_fraction":
        inner[key] = min(inner[key], 1.0)
    return Transport.model_validate(data)


def fit(model: Transport, points: list[Point], candidates: Mapping[tuple[str, int], Sequence[Pattern]]) -> Transport:
    """Coordinate search with shrinking steps."""

    def loss(candidate: Transport) -> float:
        return statistics.fmean(map(abs, residuals(candidate, points, candidates)))

    best, step = loss(model), 0.3
    while step > 0.005:
        before = best
        for name in FITTED:
            for factor in (1 + step, 1 / (1 + step)):
                candidate = changed(model, name, factor)
                error = loss(candidate)
                if error < best:
                    model, best = candidate, error
        if before - best < 1e-5:
            step /= 2
    return model


def report(points: list[Point], errors: list[float]) -> str:
    """Geometric-mean errors by operation and number of GPUs: all sizes, and large ones."""
    lines = []
    for op, n in sorted({(p.op, p.n) for p in points}):
        mine = [(p, e) for p, e in zip(points, errors, strict=True) if (p.op, p.n) == (op, n)]
        large = [e for p, e in mine if p.nbytes >= LARGE_BYTES]
        lines.append(
            f"{op:15} n={n}  all {_mean_error(e for _, e in mine):6.1%}  from 64 MiB {_mean_error(large):6.1%}"
        )
    large = [e for p, e in zip(points, errors, strict=True) if p.nbytes >= LARGE_BYTES]
    return "\n".join(
        [*lines, f"{'together':19}  all {_mean_error(errors):6.1%}  from 64 MiB {_mean_error(large):6.1%}"]
    )


def _mean_error(errors: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(abs, errors))) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--profile", default="a100-sxm-80gb")
    parser.add_argument("--cluster", default="dgx_a100")
    parser.add_argument("--skip", action="append", default=[], metavar="OP:N")
    arguments = parser.parse_args()
    cluster = build_cluster(load_cluster(arguments.cluster))
    points = read_points(arguments.csv, arguments.skip)
    candidates = {(op, n): patterns(op, range(n), cluster) for op, n in {(p.op, p.n) for p in points}}
    model = fit(load_profile(arguments.profile).transports["nvlink"], points, candidates)
    print(yaml.safe_dump(model.model_dump(), sort_keys=False))
    print(report(points, residuals(model, points, candidates)))


if __name__ == "__main__":
    main()

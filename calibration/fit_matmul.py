"""Fit the matrix-product constants of a profile to measured products.

    python -m calibration.fit_matmul gemm.csv [--profile a100-sxm-80gb]

The CSV has columns m, n, k and latency (ms), possibly gzipped: one row per product of bf16 matrices, the second
operand transposed as in a forward pass. Every second size (by the sum of the ranks of m, n and k) is fitted, the others
are held out. Starts from the profile's constants, changes one at a time while the error falls, and prints them as YAML
with the residuals. The power limit plays no part: such a series of short runs hardly meets it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from simulator.config.profile import MatmulModel, load_profile
from simulator.costs.matmul import MatmulCost
from simulator.program import Matmul

SHORTEST_S = 10e-6  # shorter products are mostly start-up, and training has few of them
LARGE_FLOPS = 5e10
FITTED = (
    "large_tile_preference",
    "wave_start_s",
    "store_Bps_per_sm",
    "memory_fraction",
    "overlap_exponent",
    "start_s",
    "min_k_per_split",
    "split_start_s",
    "split_sum_Bps",
)
Point = tuple[Matmul, float]


def read_points(path: Path) -> tuple[list[Point], list[Point]]:
    """(fitted, held-out) products with their seconds."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        rows = [tuple(float(row[name]) for name in ("m", "n", "k", "latency")) for row in csv.DictReader(stream)]
    ranks = [{size: rank for rank, size in enumerate(sorted({row[axis] for row in rows}))} for axis in range(3)]
    halves: tuple[list[Point], list[Point]] = ([], [])
    for m, n, k, latency_ms in rows:
        parity = sum(rank[size] for rank, size in zip(ranks, (m, n, k), strict=True)) % 2
        halves[parity].append((Matmul(int(m), int(n), int(k)), latency_ms * 1e-3))
    return halves


def relative_errors(cost: MatmulCost, points: Iterable[Point]) -> list[float]:
    """predicted / measured - 1 of each point."""
    return [cost.burst_seconds(kernel) / seconds - 1 for kernel, seconds in points]


def mean_abs(values: Iterable[float]) -> float:
    return statistics.fmean(abs(value) for value in values)


def selected(points: Iterable[Point], least_flops: float = 0.0) -> list[Point]:
    """The points that count: longer than `SHORTEST_S` and at least ``least_flops``."""
    return [(kernel, s) for kernel, s in points if s > SHORTEST_S and kernel.flops > least_flops]


Change = Callable[[MatmulModel, float], MatmulModel]


def _scaled(name: str) -> Change:
    return lambda model, factor: model.model_copy(update={name: getattr(model, name) * factor})


def _scaled_tile(tile: str) -> Change:
    def change(model: MatmulModel, factor: float) -> MatmulModel:
        efficiency = min(1.0, model.tile_efficiency[tile] * factor)
        return model.model_copy(update={"tile_efficiency": model.tile_efficiency | {tile: efficiency}})

    return change


def fit(cost: MatmulCost, points: list[Point], sweeps: int = 8) -> MatmulCost:
    """Pattern search over the constants, in factors, on mean |log error| of all points plus that of the large ones."""
    everything, large = selected(points), selected(points, LARGE_FLOPS)

    def loss(candidate: MatmulCost) -> float:
        errors = {kernel: abs(math.log(candidate.burst_seconds(kernel) / s)) for kernel, s in everything}
        return statistics.fmean(errors.values()) + statistics.fmean(errors[kernel] for kernel, _ in large)

    changes = [_scaled(name) for name in FITTED] + [_scaled_tile(tile) for tile in cost.model.tile_efficiency]
    steps = [0.2] * len(changes)
    best = loss(cost)
    for sweep in range(sweeps):
        for index, change in enumerate(changes):
            for factor in (math.exp(steps[index]), math.exp(-steps[index])):
                candidate = MatmulCost(cost.spec, change(cost.model, factor))
                error = loss(candidate)
                if error < best - 1e-6:
                    cost, best = candidate, error
                    break
            else:
                steps[index] /= 2
        print(f"# sweep {sweep + 1}: {best:.4f}")
    return cost


def report(cost: MatmulCost, points: list[Point]) -> str:
    """Residuals of ``points`` by size, as text."""
    lines = []
    edges = (0, 1e9, 1e10, LARGE_FLOPS, 1e12, math.inf)
    for low, high in itertools.pairwise(edges):
        errors = relative_errors(cost, [point for point in selected(points, low) if point[0].flops <= high])
        if errors:
            mean, bias = mean_abs(errors), statistics.fmean(errors)
            lines.append(
                f"{low:.0e} to {high:.0e} FLOPs: {len(errors):5d} products, |error| {mean:.1%}, bias {bias:+.1%}"
            )
    for name, least in (("all", 0.0), ("large", LARGE_FLOPS)):
        errors = relative_errors(cost, selected(points, least))
        median = statistics.median(abs(e) for e in errors)
        lines.append(f"{name}: mean |error| {mean_abs(errors):.2%}, median {median:.2%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="measured products: m, n, k, latency (ms)")
    parser.add_argument("--profile", default="a100-sxm-80gb", help="start from this profile's constants")
    parser.add_argument("--sweeps", type=int, default=8, help="0: only print the residuals of the profile as it is")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    fitted, held_out = read_points(arguments.csv)
    cost = fit(MatmulCost(profile.gpu_spec, profile.kernels.matmul), fitted, arguments.sweeps)
    print("tile_efficiency:")
    for tile, efficiency in cost.model.tile_efficiency.items():
        print(f"  {tile}: {efficiency:.3f}")
    for name in FITTED:
        print(f"{name}: {getattr(cost.model, name):.3g}")
    print(f"\nHeld-out products longer than {SHORTEST_S * 1e6:.0f} us:\n{report(cost, held_out)}")


if __name__ == "__main__":
    main()

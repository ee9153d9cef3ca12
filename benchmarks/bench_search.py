"""How long the search for the best layout takes, and where the time goes.

    python -m benchmarks.bench_search [--gpus 4096] [--top 10] [--jobs 2] [--bounds] [--points N]

The job is the 175B model on DGX A100s with a global batch of 1,536 and every layout that a search tries. ``--bounds``
stops when all layouts have bounds. ``--points`` simulates the first so many layouts, in the order of their bounds, in
this process: all once, and once more with what the first time has left in caches. Seconds of bounds and points are of
the processor, those of the search of the clock; beside both stands what they are when scaled as in
`benchmarks.bench_engines`. Counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import simulator
from benchmarks.bench_engines import REFERENCE_s, bare_loop_s, timed
from simulator.config import load_workload
from simulator.config.variants import Variants
from simulator.searching.bounds import LayoutBounds
from simulator.searching.candidates import BoundedSpace, bounded_space
from simulator.searching.space import LayoutSpace
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.point import Point

WORKLOAD = "gpt175b_3d"


def bounded_layouts(gpus: int) -> BoundedSpace:
    """Return all layouts on so many GPUs with their bounds."""
    base = load_workload(WORKLOAD)
    cluster = replace(base.cluster, nodes=base.cluster.nodes_for(gpus))
    whole = base.parallelism.model_copy(update={"tp": 1, "cp": 1, "pp": 1, "dp": gpus})
    bounds = LayoutBounds.for_workload(base.model_copy(update={"cluster": cluster, "parallelism": whole}))
    return bounded_space(LayoutSpace(Variants(base, cluster), gpus, {}), bounds, lambda count: None, lambda: False)


def print_points(space: BoundedSpace, gpus: int, n_points: int, scale: float) -> None:
    """Print the seconds of the processor that the first layouts take, one after another, and then once more."""
    nodes = load_workload(WORKLOAD).cluster.nodes_for(gpus)
    points = [
        Point(one.number, WORKLOAD, {"cluster.nodes": nodes, **one.changes})
        for one in space.fitting[: max(n_points, 1)]
    ]
    for name in ("first time", "once more"):
        _, seconds = timed(lambda: [evaluate(point) for point in points])
        each = scale * seconds / len(points)
        print(f"  {len(points)} points, {name}: {1e3 * each:.0f} ms each scaled, {1 / each:.1f} a second")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print how many layouts there are, what became of them, and seconds."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4096)
    parser.add_argument("--top", type=int, default=10, help="places that are proven")
    parser.add_argument("--jobs", type=int, default=None, help="processes [one per core]")
    parser.add_argument("--bounds", action="store_true", help="without simulations")
    parser.add_argument("--points", type=int, default=0, help="layouts to simulate in this process, without a search")
    options = parser.parse_args(arguments)

    scale = REFERENCE_s / bare_loop_s()
    space, seconds = timed(lambda: bounded_layouts(options.gpus))
    print(f"{WORKLOAD} on {options.gpus:,} GPUs: {space.n_legal:,} legal layouts, {len(space.fitting):,} may fit")
    print(f"  bounds {seconds:8.2f} s, {scale * seconds:.2f} s scaled; {1e3 * seconds / space.n_legal:.2f} ms each")
    if options.points:
        print_points(space, options.gpus, options.points, scale)
    if options.bounds or options.points:
        return
    began = time.perf_counter()
    result = simulator.search(WORKLOAD, gpus=options.gpus, top=options.top, jobs=options.jobs)
    seconds = time.perf_counter() - began
    simulated = result.ranking.simulated
    each = sum(one.outcome.wall_s for one in simulated) / max(len(simulated), 1)
    print(f"  search {seconds:8.2f} s, {scale * seconds:.2f} s scaled; {len(simulated)} simulated, {each:.2f} s each")
    print(f"  best step {result.ranking.fitting[0].step_time_s:.3f} s, {result.ranking.n_proven} places proven")


if __name__ == "__main__":
    main()

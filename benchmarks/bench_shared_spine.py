"""How long it takes to simulate the data-parallel all-reduces of all rails at once, on a spine that they share.

    python -m benchmarks.bench_shared_spine [--nodes 1024] [--plain]

Nodes of eight GPUs and NICs under a fat tree of 64-port switches at 4:1; per rail 16 rings of every 16th node, so that
every hop leaves its leaf. Says what a ring takes alone and beside all others (13 uplinks for 48 rings), and what that
costs: processor seconds and GiB of this process, and SimPy events. ``--plain``: every GPU played, none standing for
another. 8,192 GPUs have to stay below 10 s and 4 GiB either way; the exit status says whether they do.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence

from simulator.cluster import build_cluster
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.engine import Placed, simulate_together
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.program import Axis, Collective, CollectiveKind, Program, Purpose, Role, Step

MOST_S, MOST_BYTES = 10.0, 4 * 2**30
RINGS = 16


def spec(nodes: int) -> ClusterSpec:
    """The cluster file."""
    return validated(
        ClusterSpec,
        {
            "name": "many",
            "nodes": nodes,
            "node": {
                "gpus": {"type": "ideal", "count": 8},
                "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9},
                "pcie": {"generation": 5},
                "nics": {"count": 8, "bandwidth_bps": 400e9, "latency_s": 2e-6},
            },
            "fabric": {"kind": "fat_tree", "radix": 64, "oversubscription": 4, "tiers": 3},
        },
    )


def reductions(nodes: int, rails: int) -> Program:
    """A gigabyte reduced by all rings of the first ``rails`` rails; ranks are numbered node by node."""
    grads = Collective("grads", CollectiveKind.ALL_REDUCE, 1e9, Axis.DP, Purpose.DATA, algorithm="ring")
    groups = [
        tuple(range(first * rails + rail, rails * nodes, RINGS * rails))
        for rail in range(rails)
        for first in range(RINGS)
    ]
    role = Role("all", {"dp": (Step("grads", grads),)})
    return Program((role,), (0,) * (rails * nodes), {"dp": tuple(groups)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 1 where they are over the limits."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--plain", action="store_true", help="without folding and coalescing")
    options = parser.parse_args(arguments)
    nodes, shortcuts = options.nodes, not options.plain
    began = time.process_time()
    cluster = build_cluster(spec(nodes))
    built_s = time.process_time() - began
    steps = {}
    for rails in (8, 1):
        gpus = tuple(8 * node + rail for node in range(nodes) for rail in range(rails))
        placed = Placed(reductions(nodes, rails), Costs.ideal(), gpus, ())
        started = time.process_time()
        (timeline,) = simulate_together([placed], cluster, fold=shortcuts, coalesce=shortcuts)
        steps[rails] = timeline.step_time_s
        if rails == 8:
            played_s = time.process_time() - started
            print(f"{timeline.n_ranks:,} GPUs, {len(timeline.ranks):,} played, {timeline.events:,} events")
    nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"one rail {steps[1] * 1e3:.2f} ms, all rails at once {steps[8] * 1e3:.2f} ms")
    print(f"cluster {built_s:.2f} s, simulation {played_s:.2f} s, {nbytes / 2**30:.2f} GiB")
    return int(built_s + played_s > MOST_S or nbytes > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())

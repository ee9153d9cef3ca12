"""How long it takes to work out what is simulated, for the same job on ever more GPUs.

    python -m benchmarks.bench_growth [--most 65536] [--repeat 3]

The job is the 175B model in 16 stages of eight GPUs on DGX A100s with switches of 64 ports; its data-parallel degree is
doubled. Seconds are of the processor, the best of the repeats, and are scaled as in `benchmarks.bench_engines`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.bench_engines import REFERENCE_s, bare_loop_s, timed
from simulator.cluster import build_cluster
from simulator.config import load_workload
from simulator.config.profile import load_profiles
from simulator.costs import Costs
from simulator.engine import Placed
from simulator.engine.representatives import fold_cluster
from simulator.lowering import build_program

#: GPUs of a replica.
REPLICA = 128


def growth_s(dp: int) -> tuple[float, float, float]:
    """Return the seconds of the cluster, of the program and of folding with so many replicas."""
    micro_batches = 32
    changes = {"parallelism.pp": 16, "parallelism.dp": dp, "training.global_batch": micro_batches * dp}
    workload = load_workload("gpt175b_3d", {**changes, "cluster.fabric.radix": 64})
    costs = Costs.from_profiles(load_profiles(workload.calibrations, workload.training.attention_kernel))
    cluster, cluster_s = timed(lambda: build_cluster(workload.cluster))
    placed, program_s = timed(lambda: Placed.on(build_program(workload), costs, cluster))
    return cluster_s, program_s, timed(lambda: fold_cluster([placed], cluster))[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of GPUs."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=65_536, help="GPUs at most [65536]")
    parser.add_argument("--repeat", type=int, default=1, help="how often; the best counts [1]")
    options = parser.parse_args(arguments)
    print(f"{'GPUs':>8} {'cluster':>8} {'program':>8} {'folding':>8} {'all':>8}")
    dp = 8
    while dp * REPLICA <= options.most:
        scale = REFERENCE_s / min(bare_loop_s() for _ in range(2))
        cluster_s, program_s, fold_s = min((growth_s(dp) for _ in range(options.repeat)), key=sum)
        parts = [scale * seconds for seconds in (cluster_s, program_s, fold_s)]
        print(f"{dp * REPLICA:8,} {parts[0]:8.3f} {parts[1]:8.3f} {parts[2]:8.3f} {sum(parts):8.3f}", flush=True)
        dp *= 2


if __name__ == "__main__":
    main()

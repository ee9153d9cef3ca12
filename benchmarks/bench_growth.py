"""How long it takes to work out what is simulated, for the same job on ever more GPUs, and for long steps.

    python -m benchmarks.bench_growth [--most 65536] [--longest 1120] [--repeat 3]

The job is the 175B model in 16 stages of eight GPUs on DGX A100s with switches of 64 ports; its data-parallel degree is
doubled. Seconds are of the processor, the best of the repeats, and are scaled as in `benchmarks.bench_engines`.

Long steps are those of GPT-530B, whose micro-batches are doubled, those of a model of 1,536 layers, and a schedule that
is searched for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, takewhile

from benchmarks.bench_engines import JOBS, REFERENCE_s, bare_loop_s, job_seconds, timed
from simulator.cluster import build_cluster
from simulator.config import altered, load_workload
from simulator.config.profile import load_profiles
from simulator.costs import Costs
from simulator.engine import Placed
from simulator.engine.representatives import fold_cluster
from simulator.lowering import build_program
from simulator.schedule_alone import schedule

#: GPUs of a replica.
REPLICA = 128


def growth_s(dp: int) -> tuple[float, float, float]:
    """Return the seconds of the cluster, of the program and of folding with so many replicas."""
    micro_batches = 32
    changes = {"parallelism.pp": 16, "parallelism.dp": dp, "training.global_batch": micro_batches * dp}
    workload = load_workload("gpt175b_3d", {**changes, "cluster.fabric.radix": 64})
    costs = Costs.from_profiles(load_profiles(workload.calibrations, workload.training))
    cluster, cluster_s = timed(lambda: build_cluster(workload.cluster))
    placed, program_s = timed(lambda: Placed.on(build_program(workload), costs, cluster))
    return cluster_s, program_s, timed(lambda: fold_cluster([placed], cluster))[1]


def long_step_s(name: str, microbatches: int | None = None) -> float:
    """Return the seconds of a job of `JOBS`, played to its timeline; with another number of ``microbatches``."""
    workload = load_workload(*JOBS[name])
    if microbatches is not None:
        workload = altered(workload, {"training.global_batch": microbatches * workload.parallelism.dp})
    return sum(job_seconds(workload, "compiled")[:3])


def print_long_steps(longest: int, repeat: int) -> None:
    """Print a line for each long step."""
    works: list[tuple[str, Callable[[], float]]] = []
    for name in ("530B, 35 stages x 3, 280 micro-batches", "530B, 2,520 GPUs, dp 9"):
        for microbatches in takewhile(lambda one: one <= longest, (280 * 2**doubled for doubled in count())):
            line = f"{name.removesuffix(', 280 micro-batches')}: {microbatches} micro-batches"
            works.append((line, partial(long_step_s, name, microbatches)))
    works.append(("175B of 1,536 layers", partial(long_step_s, "175B of 1,536 layers")))
    searched = partial(schedule, "zb_auto", stages=64, microbatches=512)
    works.append(("schedule zb_auto, 64 stages, 512 micro-batches", lambda: timed(searched)[1]))
    print(f"\n{'long step':50} {'scaled':>7}")
    for line, work in works:
        scale = REFERENCE_s / min(bare_loop_s() for _ in range(2))
        print(f"{line:50} {scale * min(work() for _ in range(repeat)):7.2f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of GPUs."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=65_536, help="GPUs at most [65536]")
    parser.add_argument("--longest", type=int, default=1_120, help="micro-batches of a step at most; 0 is none [1120]")
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
    if options.longest:
        print_long_steps(options.longest, options.repeat)


if __name__ == "__main__":
    main()

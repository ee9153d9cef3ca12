"""How long jobs take with the compiled engine and with the one in Python, over a bare loop of SimPy in the same run.

    python -m benchmarks.bench_engines [--jobs DeepSeek-V3 Qwen3-235B] [--repeat 3] [--batches 1 2 4] [--python]

Seconds are of the processor, and the best of the repeats; machines and other load on them differ. So each is also
divided by the seconds of a bare SimPy loop (10^6 timeouts of 1,000 processes) and multiplied by `REFERENCE_s`, the
seconds of that loop on the machine whose times are compared. ``--batches`` are multiples of the global batch: how
seconds grow with micro-batches. ``--python`` plays with the engine in Python too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

import simpy

from simulator.api import cluster_of
from simulator.config import Workload, altered, load_workload
from simulator.config.profile import load_profiles
from simulator.config.stack import load_stack
from simulator.costs import Costs
from simulator.engine import UnsteadyError, simulate
from simulator.lowering import build_program, shortened
from simulator.program import Program, Repetition
from simulator.timeline import Timeline

T = TypeVar("T")

#: Seconds of the bare loop on the machine whose times are compared.
REFERENCE_s = 1.1
ENGINES = ("compiled", "python")
PROCESSES, TIMEOUTS = 1_000, 1_000

LARGE = {
    "name": "gpt530b",
    "model": {"preset": "gpt-530b"},
    "training": {"seq": 2048, "micro_batch": 1, "global_batch": 280, "precision": "fp16"},
    "parallelism": {"tp": 8, "pp": 35, "dp": 1, "vpp": 3, "schedule": "interleaved"},
    "cluster": "dgx_a100",
}
ODD = [{"gpu": "node3.gpu1", "speed_scale": 0.9}, {"link": "node5.nic2", "bandwidth_scale": 0.5}]
#: Name -> a shipped workload or a mapping, and changes of its keys.
JOBS: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "175B, 1,536 GPUs": ("gpt175b_3d", {}),
    "530B, 35 stages x 3, 280 micro-batches": (LARGE, {}),
    "Llama 3 405B": ("llama3_405b", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V3, DualPipe": ("deepseek_v3_dualpipe", {}),
    "Qwen3-235B": ("qwen3_235b", {}),
    "Mixtral, skew 0.5": ("mixtral_8x7b", {"model.moe.token_distribution": {"skew": 0.5}}),
    "175B, 8,064 GPUs, a slow GPU and a slow card": (
        "gpt175b_3d",
        {"parallelism.dp": 84, "training.global_batch": 4032, "cluster.overrides": ODD},
    ),
    "175B, dp 2, zb_h2 without recompute": (
        "gpt175b_3d",
        {
            **{"parallelism.dp": 2, "parallelism.schedule": "zb_h2", "training.recompute": "none"},
            **{"parallelism.overlap.p2p": True},
        },
    ),
    "175B of 1,536 layers": ("gpt175b_3d", {"model.layers": 1536}),
    "530B, 2,520 GPUs, dp 9": (
        LARGE,
        {"parallelism.dp": 9, "training.global_batch": 2520, "parallelism.vpp": 1, "parallelism.schedule": "1f1b"},
    ),
}


class JobSeconds(NamedTuple):
    """Seconds of a job: its cluster, its program, its simulation with folding, and that without playing."""

    cluster: float
    program: float
    simulation: float
    events: int


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Run ``work``; return its result and its processor seconds."""
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def bare_loop_s() -> float:
    """Return the seconds of a bare SimPy loop."""
    env = simpy.Environment()

    def process() -> Iterator[simpy.Event]:
        for _ in range(TIMEOUTS):
            yield env.timeout(1)

    for _ in range(PROCESSES):
        env.process(process())
    return timed(env.run)[1]


def job_seconds(workload: Workload, engine: str) -> JobSeconds:
    """Return the seconds of a workload, step by step.

    Those of a shortened step that turned out not to be steady count too.
    """
    profiles = load_profiles(workload.calibrations, workload.training)
    stack = load_stack(workload.stack) if workload.stack else None
    costs = Costs.from_profiles(profiles, workload.software, stack)
    cluster, cluster_s = timed(lambda: cluster_of(workload))
    short, program_s = timed(lambda: shortened(workload))

    def play(program: Program, repetition: Repetition | None) -> Timeline | None:
        options: dict[str, Any] = {"nodes": workload.nodes, "engine": engine, "repetition": repetition}
        with suppress(UnsteadyError):
            return simulate(program, cluster, costs, **options)
        return None

    whole, simulation_s = (None, None), 0.0
    for passes, repetition in (whole,) if short is None else ((short.order, short.repetition), whole):
        program, more_s = timed(partial(build_program, workload, passes=passes))
        program_s += more_s
        timeline, more_s = timed(partial(play, program, repetition))
        simulation_s += more_s
        if timeline is not None:
            break
    return JobSeconds(cluster_s, program_s, simulation_s, timeline.events)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each job and engine."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="which [all]")
    parser.add_argument("--repeat", type=int, default=1, help="how often; the best counts [1]")
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="multiples of the global batch [1]")
    parser.add_argument("--python", action="store_true", help="with the engine in Python too")
    options = parser.parse_args(arguments)
    print(
        f"{'job':44} {'batches':>7} {'engine':9} {'events':>9} {'bare':>6} "
        f"{'cluster':>8} {'program':>8} {'simulate':>9} {'scaled':>7}"
    )
    for name in options.jobs:
        reference, changes = JOBS[name]
        first = load_workload(reference, changes)
        for times, engine in product(options.batches, ENGINES if options.python else ENGINES[:1]):
            workload = altered(first, {"training.global_batch": times * first.training.global_batch})
            bare_s = min(bare_loop_s() for _ in range(3))
            best = min((job_seconds(workload, engine) for _ in range(options.repeat)), key=lambda one: one.simulation)
            total_s = best.cluster + best.program + best.simulation
            print(
                f"{name:44} {workload.microbatches:7,} {engine:9} {best.events:9,} {bare_s:6.2f} "
                f"{best.cluster:8.2f} {best.program:8.2f} {best.simulation:9.2f} {total_s / bare_s * REFERENCE_s:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

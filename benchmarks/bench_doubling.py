"""How the time of a step grows where layers, micro-batches, stages, experts or GPUs are doubled, with a chart of it.

    python -m benchmarks.bench_doubling [--times 8] [--repeat 3] [--chart docs/growth.svg]

Each line doubles one thing and leaves the rest. Seconds are of the processor, from the loaded workload to the whole
timeline, in one process after a first run that does not count. They are the best of the repeats, and scaled as in
`benchmarks.bench_engines`. ``goal``: the most that a doubling is to cost. One that misses
it says so; the exit status is 0 all the same, as other work on the machine may be the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench_engines import REFERENCE_s, bare_loop_s, timed
from simulator.api import run_step
from simulator.config import load_workload


class Doubling(NamedTuple):
    """A thing to double: its name, a shipped workload, the first number, and the changes that make it another.

    ``most``: the most that a doubling is to cost, in times.
    """

    name: str
    workload: str
    first: int
    changes: Callable[[int], dict[str, Any]]
    most: float


def _replicas(gpus: int) -> dict[str, Any]:
    return {"parallelism.pp": 16, "parallelism.dp": gpus // 128, "training.global_batch": gpus // 4}


def _stages(stages: int) -> dict[str, Any]:
    return {"parallelism.pp": stages, "parallelism.dp": 1, "training.global_batch": 64}


def _micro_batches(number: int) -> dict[str, Any]:
    return {"parallelism.dp": 1, "training.global_batch": number}


DOUBLINGS = (
    Doubling("layers", "gpt175b_3d", 96, lambda layers: {"model.layers": layers}, 2.0),
    Doubling("micro-batches", "gpt175b_3d", 512, _micro_batches, 1.1),
    Doubling("stages", "gpt175b_3d", 4, _stages, 2.0),
    Doubling("experts", "mixtral_8x7b", 8, lambda experts: {"model.moe.experts": experts}, 2.0),
    Doubling("GPUs", "gpt175b_3d", 1_024, _replicas, 2.0),
)


class DoublingSeconds(NamedTuple):
    """Seconds of a step for each number of what is doubled."""

    doubling: Doubling
    numbers: list[int]
    seconds: list[float]

    @property
    def ratios(self) -> list[float]:
        """Cost of each doubling, in times."""
        return [later / sooner for sooner, later in pairwise(self.seconds)]


def growth(doubling: Doubling, times: int, repeat: int) -> DoublingSeconds:
    """Return the seconds of a step with the first number of what is doubled, up to ``times`` as many."""
    numbers = [doubling.first * 2**power for power in range(times.bit_length())]
    jobs = [load_workload(doubling.workload, doubling.changes(number)) for number in numbers]
    run_step(jobs[0])
    scale = REFERENCE_s / min(bare_loop_s() for _ in range(2))
    seconds = [scale * min(timed(partial(run_step, job))[1] for _ in range(repeat)) for job in jobs]
    return DoublingSeconds(doubling, numbers, seconds)


def draw(growths: Sequence[DoublingSeconds], path: Path) -> None:
    """Draw the seconds of each line over those of its first number, by how many times that is."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for one in growths:
        times = [number / one.numbers[0] for number in one.numbers]
        axes.plot(times, [seconds / one.seconds[0] for seconds in one.seconds], marker="o", label=one.doubling.name)
    axes.plot(times, times, color="0.7", linestyle="--", label="in proportion")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("times as many")
    axes.set_ylabel("times as long")
    ticks = [f"{one:g}" for one in times]
    axes.set_xticks(times, ticks)
    axes.set_yticks(times, ticks)
    axes.legend()
    plt.rcParams["svg.hashsalt"] = "growth"
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=8, help="times as many at most [8]")
    parser.add_argument("--repeat", type=int, default=3, help="how often; the best counts [3]")
    parser.add_argument("--chart", type=Path, default=None, metavar="FILE", help="draw it (.svg or .png)")
    options = parser.parse_args(arguments)
    growths = []
    print(f"{'doubled':14} {'number':>7} {'scaled':>9} {'a doubling':>11} {'goal':>6}")
    for doubling in DOUBLINGS:
        growths.append(growth(doubling, options.times, options.repeat))
        one = growths[-1]
        for number, seconds, ratio in zip(one.numbers, one.seconds, [None, *one.ratios], strict=True):
            text = "" if ratio is None else f"{ratio:.2f} x"
            missed = "  missed" if ratio is not None and ratio > doubling.most else ""
            print(f"{doubling.name:14} {number:7,} {seconds:7.3f} s {text:>11} {doubling.most:6g}{missed}", flush=True)
    if options.chart is not None:
        draw(growths, options.chart)


if __name__ == "__main__":
    main()

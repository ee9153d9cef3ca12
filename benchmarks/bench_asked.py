"""How long the work takes that a planner asks for, with peak memory, beside goals for both.

    python -m benchmarks.bench_asked [--rows dense-1k dense-64k] [--repeat 3] [--profile 20]

Each row runs in a process of its own, and the fastest of the repeats counts. Seconds are of the processor, without
imports and without reading the workload file; those of commands are with them. They are scaled as in
`benchmarks.bench_engines`. Memory is the most that the process ever had, or its commands. ``goal``: the most that a
row is to take, maybe in times the seconds of another, which is then run too. A row that misses it says so; the exit
status is 0 all the same, as other work on the machine may be the reason. `benchmarks.bench_search` has the search of a
whole space.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import resource
import time
from collections.abc import Collection, Sequence

from benchmarks.asked_rows import ROWS, SizeFigures
from benchmarks.bench_engines import REFERENCE_s, bare_loop_s


def row_figures(name: str, scale: float, profile: int = 0) -> SizeFigures:
    """Run a row, and return its figures; print the ``profile`` functions that take longest.

    ``scale``: seconds of the machine whose times are compared, per second of this one.
    """
    work = ROWS[name].prepared()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    began_s = processor_s()
    work()
    seconds = processor_s() - began_s
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(profile)
    most_kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return SizeFigures(scale * seconds, 1024 * most_kib)


def processor_s() -> float:
    """Return the processor's seconds for this process, and for those that it ran and that have ended.

    `os.times` has both in ticks of 10 ms, as long as the shortest row.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def with_compared(names: Collection[str]) -> list[str]:
    """Return rows in their order, with those that their seconds are compared with."""
    compared = {ROWS[name].most.row for name in names}
    return [name for name in ROWS if name in names or name in compared]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each row."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which [all]")
    parser.add_argument("--repeat", type=int, default=1, help="how often; the fastest counts [1]")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N slowest functions of a row")
    options = parser.parse_args(arguments)
    processes = multiprocessing.get_context("spawn")
    figures: dict[str, SizeFigures] = {}
    print(f"{'row':46} {'scaled':>8} {'memory':>10} {'goal':>14}")
    for name in with_compared(options.rows):
        scale = REFERENCE_s / min(bare_loop_s() for _ in range(2))
        repeats = []
        for _ in range(options.repeat):
            with processes.Pool(1) as pool:
                repeats.append(pool.apply(row_figures, (name, scale, options.profile)))
        figures[name] = seconds, peak_bytes = min(repeats)
        title, _, most = ROWS[name]
        missed = "" if most.is_kept(name, figures) else "  missed"
        print(
            f"{title:46} {seconds:6.3f} s {peak_bytes / 2**20:6.0f} MiB {most!s:>14}{missed}",
            flush=True,
        )


if __name__ == "__main__":
    main()

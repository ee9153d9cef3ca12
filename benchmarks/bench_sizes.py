"""How long the large rows take: clusters of up to 100,000 GPUs, odd parts, files of other tools; with peak memory.

    python -m benchmarks.bench_sizes [--rows dense-1k dense-64k] [--repeat 3] [--profile 20]

Each row runs in a process of its own, and the best of the repeats counts. Seconds are of the processor, without imports
and without reading the workload file, and are scaled as in `benchmarks.bench_engines`. Memory is the most that the
process ever had. ``asked``: seconds, or times the row before.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.bench_engines import ODD, REFERENCE_s, bare_loop_s, seconds_of
from simulator.api import run_step
from simulator.cluster import build_cluster
from simulator.commands.collective import collective
from simulator.config import load_workload
from simulator.config.cluster import load_cluster
from simulator.errors import InputError
from simulator.importers import read_topology

#: 1,024 H100s on three tiers of Ethernet, 3:1 below each leaf.
ROCE = {
    "cluster": "dgx_h100",
    "cluster.fabric": {"kind": "fat_tree", "transport": "roce", "tiers": 3, "radix": 64, "oversubscription": 3},
    "calibration": "h100-sxm-80gb",
}
A_REPLICA = {"parallelism.pp": 16, "cluster.fabric.radix": 64}


def _step(workload: str, changes: dict[str, Any]) -> Callable[[], Any]:
    job = load_workload(workload, changes)
    return lambda: run_step(job)


def _replicas(dp: int) -> Callable[[], Any]:
    """175B in replicas of 128 GPUs, each with 32 micro-batches."""
    return _step("gpt175b_3d", {**A_REPLICA, "parallelism.dp": dp, "training.global_batch": 32 * dp})


def _data_parallel() -> Callable[[], Any]:
    changes = {
        "parallelism.dp": 100_000,
        "parallelism.zero": 0,
        "training.global_batch": 100_000,
        "cluster": {"name": "dgx_h100", "nodes": 12_500},
        "cluster.fabric.radix": 128,
    }
    return _step("llama3_8b_dgx_h100", changes)


def _roce() -> Callable[[], Any]:
    return _step("gpt175b_3d", {**ROCE, "parallelism.pp": 8, "parallelism.dp": 16, "training.global_batch": 512})


def _odd() -> Callable[[], Any]:
    changes = {"parallelism.pp": 16, "parallelism.dp": 64, "training.global_batch": 2048, "cluster.overrides": ODD}
    return _step("gpt175b_3d", changes)


def _file(name: str, text: str) -> Callable[[], Any]:
    """Return what reads a file of another tool, and builds its cluster or refuses it in a sentence."""

    def read() -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(text)
            read_topology(path)
            with suppress(InputError):
                build_cluster(load_cluster(str(path)))

    return read


def _nccl_xml() -> Callable[[], Any]:
    gpu = '<pci busid="{:04x}:{:02x}:00.0" class="0x030200" vendor="0x10de" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16"/>'  # noqa: E501
    lines = [gpu.format(number // 256, number % 256) for number in range(19_990)]
    return _file("topo.xml", "\n".join(['<system version="1"><cpu numaid="0">', *lines, "</cpu></system>"]))


def _slurm() -> Callable[[], Any]:
    leaves = [f"SwitchName=leaf{number} Nodes=n[{8 * number}-{8 * number + 7}]" for number in range(4_899)]
    spines = [f"SwitchName=spine{s} Switches=leaf[{49 * s}-{min(49 * s + 48, 4_898)}]" for s in range(100)]
    return _file("topology.conf", "\n".join([*leaves, *spines, "SwitchName=core Switches=spine[0-99]"]))


def _all_to_all(nodes: int) -> Callable[[], Any]:
    return lambda: collective(cluster="dgx_h100", nodes=nodes, op="all_to_all")


class SizeRow(NamedTuple):
    """A row of the table: its title, a function that prepares its work, and the seconds asked."""

    title: str
    prepared: Callable[[], Callable[[], Any]]
    asked: str


ROWS: dict[str, SizeRow] = {
    "dense-1k": SizeRow("175B, 1,024 GPUs", lambda: _replicas(8), "-"),
    "dense-64k": SizeRow("175B, 65,536 GPUs", lambda: _replicas(512), "1.2 x"),
    "data-100k": SizeRow("8B, 100,000 GPUs, data parallel alone", _data_parallel, "1.5 s"),
    "roce-1k": SizeRow("175B, 1,024 H100s, three tiers of RoCE, 3:1", _roce, "2 s"),
    "odd-8k": SizeRow("175B, 8,192 GPUs, a slow GPU and a slow card", _odd, "3 s, 1 GiB"),
    "xml-20k": SizeRow("NCCL XML of 20,000 GPUs", _nccl_xml, "2 s"),
    "slurm-5k": SizeRow("Slurm tree of 5,000 switches", _slurm, "2 s"),
    "a2a-256": SizeRow("all-to-all on 256 nodes", lambda: _all_to_all(256), "1 s"),
    "a2a-1000": SizeRow("all-to-all on 1,000 nodes", lambda: _all_to_all(1_000), "2 s"),
}


class SizeFigures(NamedTuple):
    """Figures of a row: seconds of the processor, and the most memory of its process."""

    seconds: float
    peak_bytes: int


def measured(name: str, profile: int = 0) -> SizeFigures:
    """Run a row, and return its figures; print the ``profile`` functions that take longest."""
    work = ROWS[name].prepared()
    before = cProfile.Profile()
    if profile:
        before.enable()
    seconds = seconds_of(work)
    if profile:
        before.disable()
        pstats.Stats(before).sort_stats("tottime").print_stats(profile)
    return SizeFigures(seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each row."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which [all]")
    parser.add_argument("--repeat", type=int, default=1, help="how often; the best counts [1]")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N slowest functions of a row")
    options = parser.parse_args(arguments)
    processes = multiprocessing.get_context("spawn")
    print(f"{'row':46} {'seconds':>8} {'scaled':>8} {'asked':>11} {'memory':>9}")
    for name in options.rows:
        scale = REFERENCE_s / min(bare_loop_s() for _ in range(2))
        figures = []
        for _ in range(options.repeat):
            with processes.Pool(1) as pool:
                figures.append(pool.apply(measured, (name, options.profile)))
        seconds, peak = min(one.seconds for one in figures), min(one.peak_bytes for one in figures)
        row = ROWS[name]
        print(
            f"{row.title:46} {seconds:8.3f} {scale * seconds:8.3f} {row.asked:>11} {peak / 2**20:5.0f} MiB", flush=True
        )


if __name__ == "__main__":
    main()

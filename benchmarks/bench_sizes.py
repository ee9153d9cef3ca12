"""How long the large rows take: clusters of up to 100,000 GPUs, odd parts, files of other tools; with peak memory.

    python -m benchmarks.bench_sizes [--rows dense-1k dense-64k] [--repeat 3] [--profile 20]

Each row runs in a process of its own, and the fastest of the repeats counts. Seconds are of the processor, without
imports and without reading the workload file, and are scaled as in `benchmarks.bench_engines`. Memory is the most that
the process ever had. ``asked``: the most that a row is to take, maybe in times the seconds of another, which is then
run too. The exit status is 1 where a row is over that.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import multiprocessing
import pstats
import resource
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.bench_engines import ODD, REFERENCE_s, bare_loop_s, timed
from simulator.api import run_step
from simulator.cluster import Cluster, build_cluster
from simulator.commands.collective import collective
from simulator.config import load_workload
from simulator.config.cluster import load_cluster
from simulator.config.section import as_data

#: 1,024 H100s on three tiers of Ethernet; a leaf has three times as much below it as above.
ROCE = {
    "cluster": "dgx_h100",
    "cluster.fabric": {"kind": "fat_tree", "transport": "roce", "tiers": 3, "radix": 64, "oversubscription": 3},
    "calibration": "h100-sxm-80gb",
}
GiB = 2**30
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


def _cluster_of_file(name: str, text: str, keys: dict[str, Any], n_gpus: int) -> Callable[[], Cluster]:
    """Return what reads a file of another tool, with ``keys`` beside it, and builds the cluster.

    Raises `ValueError` where that has other than ``n_gpus``.
    """

    def read() -> Cluster:
        with TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_text(text)
            cluster = build_cluster(load_cluster({"name": str(path), **keys}))
        if len(cluster.gpus) != n_gpus:
            raise ValueError(f"{name} should be a cluster of {n_gpus:,} GPUs, and has {len(cluster.gpus):,}")
        return cluster

    return read


def _nccl_xml(gpus: int, nodes: int) -> Callable[[], Cluster]:
    """Return a reader of a cluster of equal nodes, each as one XML of NCCL describes it; it writes a file per node."""
    slot = 'link_speed="32.0 GT/s PCIe" link_width="16"'
    lines = []
    for number in range(gpus):
        bus = f"{number // 256:02x}:{number % 256:02x}:00.0"
        lines += [
            f'<pci busid="00{bus}" class="0x030200" vendor="0x10de" device="0x2330" {slot}>',
            f'<gpu dev="{number}" sm="90" rank="{number}" gdr="1">',
            '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu></pci>',
            f'<pci busid="10{bus}" class="0x020700" {slot}>',
            f'<nic><net name="mlx5_{number}" dev="{number}" speed="400000"/></nic></pci>',
        ]
    text = "\n".join(['<system version="1"><cpu numaid="0">', *lines, "</cpu></system>"])
    return _cluster_of_file("topo.xml", text, {"nodes": nodes, "fabric": {"tiers": 3, "radix": 128}}, gpus * nodes)


def _slurm() -> Callable[[], Cluster]:
    """4,899 leaves with eight nodes each, 100 switches above them, and one above these."""
    leaves = [f"SwitchName=leaf{number} Nodes=n[{8 * number}-{8 * number + 7}]" for number in range(4_899)]
    spines = [f"SwitchName=spine{s} Switches=leaf[{49 * s}-{min(49 * s + 48, 4_898)}]" for s in range(100)]
    text = "\n".join([*leaves, *spines, "SwitchName=core Switches=spine[0-99]"])
    node = as_data(load_cluster("dgx_h100").node, defaults=False)
    return _cluster_of_file("topology.conf", text, {"node": node}, 8 * 4_899 * 8)


def _all_to_all(nodes: int) -> Callable[[], Any]:
    return lambda: collective(cluster="dgx_h100", nodes=nodes, op="all_to_all")


class SizeFigures(NamedTuple):
    """Figures of a row: scaled seconds of the processor, and the most memory of its process."""

    seconds: float
    peak_bytes: float


class Most(NamedTuple):
    """The most that a row is to take: scaled seconds, bytes of memory, and ``times`` the seconds of another row."""

    seconds: float = math.inf
    peak_bytes: float = math.inf
    times: float = math.inf
    row: str = ""

    def __str__(self) -> str:
        texts = [f"{self.seconds:g} s"] if self.seconds < math.inf else []
        texts += [f"{self.peak_bytes / GiB:g} GiB"] if self.peak_bytes < math.inf else []
        texts += [f"{self.times:g} x {self.row}"] if self.row else []
        return ", ".join(texts) or "-"

    def is_kept(self, name: str, figures: Mapping[str, SizeFigures]) -> bool:
        """Return whether row ``name`` takes no more, of the figures of all rows by name."""
        seconds, peak_bytes = figures[name]
        most_s = min(self.seconds, self.times * figures[self.row].seconds if self.row else math.inf)
        return seconds <= most_s and peak_bytes <= self.peak_bytes


class SizeRow(NamedTuple):
    """A row of the table: its title, the function that prepares its work, and the limits of seconds and memory."""

    title: str
    prepared: Callable[[], Callable[[], Any]]
    most: Most = Most()


ROWS: dict[str, SizeRow] = {
    "dense-1k": SizeRow("175B, 1,024 GPUs", lambda: _replicas(8)),
    "dense-64k": SizeRow("175B, 65,536 GPUs", lambda: _replicas(512), Most(times=1.2, row="dense-1k")),
    "data-100k": SizeRow("8B, 100,000 GPUs, data parallel alone", _data_parallel, Most(1.5)),
    "roce-1k": SizeRow("175B, 1,024 H100s, three tiers of RoCE, 3:1", _roce, Most(2)),
    "odd-8k": SizeRow("175B, 8,192 GPUs, a slow GPU and a slow card", _odd, Most(3, GiB)),
    "xml-20k": SizeRow("NCCL XML of 8 GPUs, 2,500 such nodes", lambda: _nccl_xml(8, 2_500), Most(2)),
    "xml-576": SizeRow("NCCL XML of 576 GPUs, 35 such nodes", lambda: _nccl_xml(576, 35), Most(2)),
    "slurm-5k": SizeRow("Slurm tree of 5,000 switches, 39,192 nodes", _slurm, Most(2)),
    "a2a-256": SizeRow("all-to-all on 256 nodes", lambda: _all_to_all(256), Most(1)),
    "a2a-1000": SizeRow("all-to-all on 1,000 nodes", lambda: _all_to_all(1_000), Most(2)),
}


def row_figures(name: str, scale: float, profile: int = 0) -> SizeFigures:
    """Run a row, and return its figures; print the ``profile`` functions that take longest.

    ``scale``: seconds of the machine whose times are compared, per second of this one.
    """
    work = ROWS[name].prepared()
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    _, seconds = timed(work)
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(profile)
    return SizeFigures(scale * seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def with_compared(names: Collection[str]) -> list[str]:
    """Return rows in their order, with those that their seconds are compared with."""
    compared = {ROWS[name].most.row for name in names}
    return [name for name in ROWS if name in names or name in compared]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each row; 1 where one takes more than is asked."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which [all]")
    parser.add_argument("--repeat", type=int, default=1, help="how often; the fastest counts [1]")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N slowest functions of a row")
    options = parser.parse_args(arguments)
    processes = multiprocessing.get_context("spawn")
    figures: dict[str, SizeFigures] = {}
    over = 0
    print(f"{'row':46} {'scaled':>8} {'memory':>10} {'asked':>14}")
    for name in with_compared(options.rows):
        scale = REFERENCE_s / min(bare_loop_s() for _ in range(2))
        repeats = []
        for _ in range(options.repeat):
            with processes.Pool(1) as pool:
                repeats.append(pool.apply(row_figures, (name, scale, options.profile)))
        figures[name] = seconds, peak_bytes = min(repeats)
        title, _, most = ROWS[name]
        is_kept = most.is_kept(name, figures)
        over += not is_kept
        print(
            f"{title:46} {seconds:6.3f} s {peak_bytes / 2**20:6.0f} MiB {most!s:>14}{'' if is_kept else '  over'}",
            flush=True,
        )
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())

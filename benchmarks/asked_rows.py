"""Rows of the table of `benchmarks.bench_asked`: the work of each, and the most time and memory for it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from compileall import compile_dir
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import simulator
from benchmarks.bench_engines import JOBS, LARGE, ODD
from simulator.api import run_step
from simulator.cluster import Cluster, build_cluster
from simulator.commands.collective import collective
from simulator.config import load_workload
from simulator.config.cluster import load_cluster
from simulator.config.section import as_data
from simulator.schedule_alone import schedule
from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.point import Point

#: 1,024 H100s on three tiers of Ethernet; a leaf has three times as much below it as above.
ROCE = {
    "cluster": "dgx_h100",
    "cluster.fabric": {"kind": "fat_tree", "transport": "roce", "tiers": 3, "radix": 64, "oversubscription": 3},
    "calibration": "h100-sxm-80gb",
}
GiB = 2**30
A_REPLICA = {"parallelism.pp": 16, "cluster.fabric.radix": 64}
#: Changes to `A_REPLICA` that make the point before it in a search.
OTHER_PASSES = {"training.micro_batch": 2, "training.recompute": "selective"}
OTHER_GROUPS = {"parallelism.tp": 4, "parallelism.dp": 16}
OTHER_STAGES = {"parallelism.pp": 8, "parallelism.dp": 16}


def _step(workload: str | dict[str, Any], changes: dict[str, Any]) -> Callable[[], Any]:
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


def _unequal_stages() -> Callable[[], Any]:
    """530B on 2,520 GPUs: 105 layers in 35 stages, one more in the last and one less in the first."""
    layers = [2, *[3] * 33, 4]
    changes = {"parallelism.dp": 9, "training.global_batch": 2520, "parallelism.vpp": 1}
    return _step(LARGE, {**changes, "parallelism.schedule": "1f1b", "parallelism.layers_per_stage": layers})


def _in_search(**before: Any) -> Callable[[], Any]:
    """The first job as a point of a search, after another point: the same job, but for the keys ``before``."""
    layout = {**A_REPLICA, "parallelism.dp": 8, "training.global_batch": 256, "cluster.nodes": 128}
    evaluate(Point(0, "gpt175b_3d", {**layout, **before}))
    return lambda: evaluate(Point(1, "gpt175b_3d", layout))


def _frame() -> Callable[[], Any]:
    """The rows of the 175B model on 1,536 GPUs, 12 of which are played, as a DataFrame; pandas is loaded before."""
    import_module("pandas")
    spans = run_step(load_workload("gpt175b_3d")).spans
    return spans.frame


def _command(*arguments: str) -> Callable[[], Any]:
    """Return what runs ``llmsim`` with these arguments, in an empty folder; its modules are compiled, as installed."""
    compile_dir(Path(simulator.__file__).parent, quiet=2)

    def ran() -> None:
        with TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "simulator", *arguments], cwd=folder, check=True, capture_output=True)

    return ran


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


def _job_row(title: str, most: Most) -> SizeRow:
    """Return the row of a job of `benchmarks.bench_engines`, which has the same title there."""
    return SizeRow(title, lambda: _step(*JOBS[title]), most)


ROWS: dict[str, SizeRow] = {
    "dense-1k": SizeRow("175B, 1,024 GPUs", lambda: _replicas(8), Most(0.15)),
    "search-1k": SizeRow("175B, 1,024 GPUs, once more in a search", _in_search, Most(0.008)),
    "search-work": SizeRow("the same behind other passes", lambda: _in_search(**OTHER_PASSES), Most(0.008)),
    "search-tp": SizeRow("the same behind another tp and dp", lambda: _in_search(**OTHER_GROUPS), Most(0.008)),
    "search-pp": SizeRow("the same behind another pp and dp", lambda: _in_search(**OTHER_STAGES), Most(0.008)),
    "530b": _job_row("530B, 35 stages x 3, 280 micro-batches", Most(0.5)),
    "405b": _job_row("Llama 3 405B", Most(0.6)),
    "deepseek": _job_row("DeepSeek-V3", Most(0.6)),
    "dualpipe": _job_row("DeepSeek-V3, DualPipe", Most(0.6)),
    "qwen3": _job_row("Qwen3-235B", Most(0.6)),
    "mixtral": _job_row("Mixtral, skew 0.5", Most(0.6)),
    "unequal": SizeRow("530B, 2,520 GPUs, 35 unequal stages", _unequal_stages, Most(3)),
    "dense-64k": SizeRow("175B, 65,536 GPUs", lambda: _replicas(512), Most(times=1.2, row="dense-1k")),
    "data-100k": SizeRow("8B, 100,000 GPUs, data parallel alone", _data_parallel, Most(1.5)),
    "roce-1k": SizeRow("175B, 1,024 H100s, three tiers of RoCE, 3:1", _roce, Most(2)),
    "odd-8k": SizeRow("175B, 8,192 GPUs, a slow GPU and a slow card", _odd, Most(3, GiB)),
    "xml-20k": SizeRow("NCCL XML of 8 GPUs, 2,500 such nodes", lambda: _nccl_xml(8, 2_500), Most(2)),
    "xml-576": SizeRow("NCCL XML of 576 GPUs, 35 such nodes", lambda: _nccl_xml(576, 35), Most(2)),
    "slurm-5k": SizeRow("Slurm tree of 5,000 switches, 39,192 nodes", _slurm, Most(2)),
    "a2a-256": SizeRow("all-to-all on 256 nodes", lambda: _all_to_all(256), Most(1)),
    "a2a-1000": SizeRow("all-to-all on 1,000 nodes", lambda: _all_to_all(1_000), Most(2)),
    "zb_h2": _job_row("175B, dp 2, zb_h2 without recompute", Most(1)),
    "deep": _job_row("175B of 1,536 layers", Most(2)),
    "zb_auto": SizeRow(
        "schedule zb_auto, 64 stages, 512 micro-batches",
        lambda: lambda: schedule("zb_auto", stages=64, microbatches=512),
        Most(2),
    ),
    "frame": SizeRow("2.7 M rows as a DataFrame", _frame, Most(0.4)),
    "run": SizeRow("llmsim run gpt175b_3d", lambda: _command("run", "gpt175b_3d"), Most(0.8)),
    "pictures": SizeRow(
        "llmsim run gpt175b_3d, with picture and trace",
        lambda: _command("run", "gpt175b_3d", "--gantt", "step.png", "--trace", "step.json.gz"),
        Most(2),
    ),
    "help": SizeRow("llmsim --help", lambda: _command("--help"), Most(0.2)),
}

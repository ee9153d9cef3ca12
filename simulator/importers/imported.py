"""The result of reading another tool's file, and the figures that stand in where a file has none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Bytes/s of one NVLink per direction (data sheets): V100, A100 and H100, 25 GB/s each.
NVLINK_Bps = 25e9
#: Seconds from GPU to GPU: NCCL's figure for one low-latency NVLink hop (src/graph/tuning.cc, hwLat, LL).
NVLINK_LATENCY_s = 0.6e-6
#: A remote load less a local one: 139 and 81 ns (Intel Memory Latency Checker, Xeon 8280).
SOCKET_LATENCY_s = 0.13e-6
#: Seconds from NIC to NIC under one switch: 64 bytes over InfiniBand and RoCE (arXiv 2505.09343, table 5); TCP: half of
#: a round trip of about 30 us through the kernel.
NIC_LATENCY_s = {"infiniband": 2.8e-6, "roce": 3.6e-6, "tcp": 15e-6}
#: GPU type where the file names none: `cluster.node.gpus.type` says which profile is meant.
NO_TYPE = "unnamed-gpu"

#: What NCCL counts for a PCIe 3 x16 link, whose line rate is 15.75 GB/s (src/graph/topo.h, PCI_BW). Its figures between
#: sockets are of the same kind: what is reached, not the line rate.
_NCCL_PCIE = 12.0 / 15.754


def line_rate_Bps(nccl_GBps: float) -> float:
    """Return the line rate that goes with a bandwidth in NCCL's tables of PCIe and sockets, GB/s.

    >>> round(line_rate_Bps(12.0) / 1e9, 2)
    15.75
    """
    return nccl_GBps * 1e9 / _NCCL_PCIE


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or NIC: its name in the cluster file, in the other tool's, the socket that it hangs under, and its CPUs."""

    name: str
    label: str
    socket: int
    cpus: str = ""


@dataclass(frozen=True)
class Imported:
    """A cluster read from another tool's file.

    ``cluster``: the data of a cluster file; of one node, or of a fabric (then without ``node``) whose nodes are
    ``hosts``. ``assumed``: figures that the file lacks, each with the key that it went into. ``left_out``: what the
    file says and a cluster file has no place for."""

    format: str
    cluster: dict[str, Any]
    devices: tuple[Device, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


def links_section(links: Mapping[tuple[int, int], int], n_gpus: int, each_Bps: float) -> dict[str, Any]:
    """Return the section ``nvlink`` of ``n_gpus`` GPUs joined by numbers of links, each of ``each_Bps`` a direction.

    Every two of three or more GPUs joined by equally many are a mesh, whose bandwidth is that of all links of a GPU.

    >>> links_section({(0, 1): 2, (0, 2): 2, (1, 2): 2}, 3, 25e9)
    {'kind': 'mesh', 'bandwidth_Bps': 100000000000.0, 'latency_s': 6e-07}
    """
    section: dict[str, Any] = {"kind": "mesh", "bandwidth_Bps": each_Bps, "latency_s": NVLINK_LATENCY_s}
    if n_gpus > 2 and 2 * len(links) == n_gpus * (n_gpus - 1) and len(set(links.values())) == 1:
        return section | {"bandwidth_Bps": (n_gpus - 1) * next(iter(links.values())) * each_Bps}
    bundles = [{"gpus": list(pair), "count": count} for pair, count in sorted(links.items())]
    return section | {"kind": "links", "links": bundles}


def unanswered(assumed: Sequence[str], answers: Collection[str]) -> list[str]:
    """Return the texts of ``assumed``, each as "key: figure and why", whose keys are still without an answer.

    The dotted keys ``answers`` answer a key that they name, are inside of, or lie inside.

    >>> unanswered(["node.nics.bandwidth_bps: 200 Gb/s", "fabric: a fat tree"], ["node.nics"])
    ['fabric: a fat tree']
    >>> unanswered(["node.nics.bandwidth_bps: 200 Gb/s", "fabric: a fat tree"], ["fabric.kind", "node.nics.count"])
    ['node.nics.bandwidth_bps: 200 Gb/s']
    """

    def meets(answer: str, key: str) -> bool:
        return f"{answer}.".startswith(f"{key}.") or f"{key}.".startswith(f"{answer}.")

    return [text for text in assumed if not any(meets(answer, text.split(":")[0]) for answer in answers)]


def numbers(values: Iterable[int]) -> str:
    """Return whole numbers as ranges.

    >>> numbers([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    return ",".join("-".join(map(str, run)) for run in runs)

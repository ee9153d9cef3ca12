"""The matrix of ``nvidia-smi topo -m``: how any two devices of a machine are joined.

Between two GPUs NV# hides how PCIe joins them, which then follows from NICs that both are close to, or from their NUMA
nodes. NODE and PHB are alike here: by way of one socket.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from simulator.errors import InputError
from simulator.importers import imported
from simulator.importers.imported import Device, Imported, line_rate_Bps
from simulator.input_files import brief

#: From the nearest to the farthest. SOC is what old versions call SYS.
_RELATIONS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_PIX, _PXB, _NODE, _SYS = 0, 1, 3, 4
#: The most NVLinks that any GPU has (H100, B200). Where one seems to have more, all pairs share those to NVSwitches.
_MOST_NVLINKS = 18
_GENERATION = 4
_NIC_bps = 200e9
#: NCCL's figure between Xeons up to Ice Lake (src/graph/topo.h, SKL_QPI_BW).
_SOCKETS_GBps = 10.0
_MAX_DEVICES = 512


@dataclass(frozen=True)
class _Matrix:
    """``names`` of devices, GPUs first; ``near[i, j]``: a position in `_RELATIONS`; ``nvlinks``: by pair."""

    path: Path
    names: tuple[str, ...]
    n_gpus: int
    near: dict[tuple[int, int], int]
    nvlinks: dict[tuple[int, int], int]
    cpus: dict[int, str]
    numa: dict[int, int]
    lines: dict[int, int]


def is_matrix(text: str) -> bool:
    return any(re.match(r"\s*GPU0(\s|$)", line) for line in _plain(text).splitlines())


def read(text: str, path: Path) -> Imported:
    """Raises `InputError` with the line of a cell that is not known, or of relations that no tree has."""
    matrix = _parse(_plain(text), path)
    n, count = matrix.n_gpus, len(matrix.names)
    nics = count - n
    socket_of, sockets = _sockets(matrix, matrix.numa)
    tree = _tree(matrix, socket_of)
    if _mismatch(matrix, tree):  # virtual machines may show one NUMA node, and GPUs that are far apart
        socket_of, sockets = _sockets(matrix, {})
        tree = _tree(matrix, socket_of)
    if mismatch := _mismatch(matrix, tree):
        raise mismatch
    name = [f"gpu{i}" if i < n else f"nic{i - n}" for i in range(count)]
    assumed = [f"node.gpus.type: {imported.NO_TYPE}, as the matrix does not say what GPU it is"]
    node: dict[str, Any] = {"gpus": {"type": imported.NO_TYPE, "count": n}}
    if sockets > 1:
        between_Bps = round(line_rate_Bps(_SOCKETS_GBps), -8)
        node["sockets"] = {
            "count": sockets,
            "bandwidth_Bps": between_Bps,
            "latency_s": imported.SOCKET_LATENCY_s,
        }
        assumed.append(
            f"node.sockets.bandwidth_Bps: {between_Bps / 1e9:.1f} GB/s, for the {_SOCKETS_GBps:g} GB/s that NCCL "
            "counts between Xeons up to Ice Lake (src/graph/topo.h)"
        )
        assumed.append(f"node.sockets.latency_s: {imported.SOCKET_LATENCY_s:g} s, Intel MLC on a Xeon 8280")
    if matrix.nvlinks:
        node["nvlink"] = _nvlink(matrix)
        assumed.append(
            f"node.nvlink.bandwidth_Bps: {imported.NVLINK_Bps / 1e9:g} GB/s per link (V100, A100, H100 data sheets)"
        )
        assumed.append(f"node.nvlink.latency_s: {imported.NVLINK_LATENCY_s:g} s, NCCL's figure for an NVLink hop")
    places = {vertex: place for vertex, place in tree.items() if isinstance(vertex, str)}
    places |= {name[vertex]: place for vertex, place in tree.items() if isinstance(vertex, int)}
    node["pcie"] = {"generation": _GENERATION, "tree": places}
    assumed.append(f"node.pcie.generation: {_GENERATION}, with 16 lanes everywhere")
    cluster: dict[str, Any] = {"name": path.stem, "nodes": 1, "node": node}
    if nics:
        node["nics"] = {
            "count": nics,
            "bandwidth_bps": _NIC_bps,
            "latency_s": imported.NIC_LATENCY_s["infiniband"],
        }
        cluster["fabric"] = {"kind": "rail_fat_tree", "transport": "infiniband"}
        assumed.append(f"node.nics.bandwidth_bps: {_NIC_bps / 1e9:g} Gb/s each, as the matrix gives no speed")
        latency_s = imported.NIC_LATENCY_s["infiniband"]
        assumed.append(f"node.nics.latency_s: {latency_s:g} s, usual of InfiniBand under one switch")
        assumed.append("fabric: a rail-optimised fat tree of InfiniBand, as the matrix is of one node")
    devices = [
        Device(name[i], matrix.names[i], socket_of[i], matrix.cpus.get(i, "") or _cpus_of(matrix, socket_of, i))
        for i in range(count)
    ]
    return Imported("nvidia-smi topo -m", cluster, tuple(devices), tuple(assumed))


def _plain(text: str) -> str:
    """Without the escapes that underline the header on a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _parse(text: str, path: Path) -> _Matrix:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r"\s*GPU0(\s|$)", line))

    def fail(line: int, message: str, **parts: Any) -> NoReturn:
        raise InputError(f"line {line + 1}: {message}", file=path, **parts)

    header = re.sub(r"\b(CPU|NUMA) Affinity\b|\bGPU NUMA ID\b", "", lines[start]).split()
    n = sum(re.fullmatch(r"GPU\d+", word) is not None for word in header)
    if header[:n] != [f"GPU{i}" for i in range(n)]:
        fail(start, "columns of GPUs are not numbered from 0", found=" ".join(header[:8]), allowed="GPU0 GPU1 ...")
    if len(set(header)) < len(header):
        fail(start, "has a column twice", found=" ".join(header))
    if len(header) > _MAX_DEVICES:
        fail(start, "has too many columns", found=len(header), allowed=f"at most {_MAX_DEVICES}")
    cells: dict[tuple[int, int], str] = {}
    at: dict[int, int] = {}
    cpus: dict[int, str] = {}
    numa: dict[int, int] = {}
    for number, line in enumerate(lines[start + 1 :], start + 1):
        words = line.split()
        if not words or words[0] not in header:
            if words and not (len(at) >= n and words[0].endswith(("Legend:", "Legend"))) and words[0] != "NIC":
                fail(number, "is no row of this matrix", found=brief(words[0]), allowed=", ".join(header))
            if words:
                break
            continue
        i = header.index(words[0])
        if i in at:
            fail(number, f"{words[0]} has a row already, line {at[i] + 1}")
        at[i] = number
        row = words[1 : len(header) + 1]
        if len(row) < len(header):
            fail(number, f"{words[0]} has {len(row)} cells", found=brief(line.strip()), allowed=f"{len(header)} cells")
        for j, cell in enumerate(row):
            pair = f"{header[i]} to {header[j]}"
            if (cell == "X") != (i == j):
                fail(number, f"{pair}: X is a device with itself", found=cell, allowed="X there, and nowhere else")
            if cell not in ("X", "SOC", *_RELATIONS) and not (re.fullmatch(r"NV\d{1,3}", cell) and max(i, j) < n):
                allowed = f"X, {', '.join(_RELATIONS)}, and NV# between GPUs"
                fail(number, f"{pair}: is no way to be joined", found=brief(cell), allowed=allowed)
            if cells.get((j, i), cell) != cell:
                fail(
                    number,
                    f"{pair} is {cell}, but {cells[j, i]} the other way",
                    fix="what nvidia-smi prints: symmetric",
                )
            cells[i, j] = cell
        if i < n:
            rest = [part for part in re.split(r"\t+|\s{2,}", line.strip()) if part][len(header) + 1 :]
            cpus[i] = rest[0] if rest else ""
            if len(rest) > 1 and re.fullmatch(r"\d{1,4}", rest[1]):
                numa[i] = int(rest[1])
    missing = [name for i, name in enumerate(header) if i < n and i not in at]
    if missing:
        fail(len(lines) - 1, "ends before all GPUs had their rows", found=f"no row of {', '.join(missing)}")
    cells |= {(j, i): cell for (i, j), cell in cells.items()}  # rows of NICs may be left out
    legend = dict(re.findall(r"^\s*(NIC\d+)\s*:\s*(\S+)", text, flags=re.MULTILINE))
    return _Matrix(
        path=path,
        names=tuple([legend.get(name, name) for name in header]),
        n_gpus=n,
        near={pair: _RELATIONS.index(cell.replace("SOC", "SYS")) for pair, cell in cells.items() if not _special(cell)},
        nvlinks={pair: int(cell[2:]) for pair, cell in cells.items() if cell.startswith("NV")},
        cpus=cpus,
        numa=numa,
        lines=at,
    )


def _special(cell: str) -> bool:
    return cell == "X" or cell.startswith("NV")


def _groups(matrix: _Matrix, most: int, together: dict[int, int]) -> list[int]:
    """The number of each device's group, of those joined by relations up to ``most``; also of GPUs whose ``together``
    is equal."""
    count = len(matrix.names)
    group = list(range(count))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i

    pairs = [pair for pair, relation in matrix.near.items() if relation <= most]
    pairs += [(i, j) for i in together for j in together if together[i] == together[j]]
    for i, j in pairs:
        low, high = sorted((root(i), root(j)))
        group[high] = low
    return [root(i) for i in range(count)]


def _sockets(matrix: _Matrix, together: dict[int, int]) -> tuple[list[int], int]:
    """The socket of each device: NUMA nodes as the file numbers them, then those without a number. GPUs whose number in
    ``together`` is equal are at one."""
    groups = _groups(matrix, _NODE, together)
    known = {groups[i]: number for i, number in sorted(matrix.numa.items(), reverse=True)}
    order = sorted(dict.fromkeys(groups), key=lambda group: (group not in known, known.get(group, group), group))
    return [order.index(group) for group in groups], len(order)


def _tree(matrix: _Matrix, socket_of: list[int]) -> dict[int | str, str]:
    """Where each device and switch is plugged in: a switch for those that are PIX, one above those that are PXB, each
    of which then has a switch of its own, be it alone there."""
    tree: dict[int | str, str] = {}
    switches = itertools.count()

    def switch(above: str) -> str:
        name = f"pcie{next(switches)}"
        tree[name] = above
        return name

    far, near = _groups(matrix, _PXB, {}), _groups(matrix, _PIX, {})
    devices = range(len(matrix.names))
    for group in sorted(set(far), key=lambda group: (socket_of[group], group)):
        inside = [[i for i in devices if near[i] == pix] for pix in dict.fromkeys(near) if far[pix] == group]
        root = f"cpu{socket_of[group]}"
        if len(inside) > 1:
            root = switch(root)
        for members in inside:
            at = switch(root) if len(inside) > 1 or len(members) > 1 else root
            tree.update(dict.fromkeys(members, at))
    return tree


def _mismatch(matrix: _Matrix, tree: dict[int | str, str]) -> InputError | None:
    """What is to be said where the tree joins two devices otherwise than the matrix does."""

    def ways(i: int) -> list[str]:
        way: list[str] = []
        vertex: int | str = i
        while vertex in tree:
            vertex = tree[vertex]
            way.append(vertex)
        return way

    paths = [ways(i) for i in range(len(matrix.names))]
    for (i, j), said in matrix.near.items():
        common = next((vertex for vertex in paths[i] if vertex in paths[j]), None)
        if common is None:
            built = _SYS
        elif common.startswith("cpu"):
            built = _NODE
        else:
            built = _PIX if paths[i][0] == paths[j][0] else _PXB
        if built != (_NODE if said == _NODE - 1 else said):
            return InputError(
                f"line {matrix.lines.get(i, matrix.lines.get(j, 0)) + 1}: {matrix.names[i]} to {matrix.names[j]} "
                f"is {_RELATIONS[said]}, but others join them more closely",
                file=matrix.path,
                found=_RELATIONS[said],
                allowed=f"{_RELATIONS[built]}, by the other cells",
            )
    return None


def _nvlink(matrix: _Matrix) -> dict[str, Any]:
    counts = {pair: count for pair, count in matrix.nvlinks.items() if pair[0] < pair[1]}
    total = [sum(count for pair, count in counts.items() if gpu in pair) for gpu in range(matrix.n_gpus)]
    if max(total) > _MOST_NVLINKS:
        width = max(counts.values())
        complete = len(counts) == matrix.n_gpus * (matrix.n_gpus - 1) // 2
        if not complete or len(set(counts.values())) > 1:
            raise InputError(
                f"line {matrix.lines[total.index(max(total))] + 1}: GPU{total.index(max(total))} has more NVLinks than "
                "a GPU can have, and not the same number to each other one, as through NVSwitches",
                file=matrix.path,
                found=max(total),
                allowed=f"at most {_MOST_NVLINKS}",
            )
        return {
            "kind": "nvswitch",
            "bandwidth_Bps": width * imported.NVLINK_Bps,
            "latency_s": imported.NVLINK_LATENCY_s,
        }
    links = [{"gpus": list(pair), "count": count} for pair, count in sorted(counts.items())]
    return {
        "kind": "links",
        "bandwidth_Bps": imported.NVLINK_Bps,
        "latency_s": imported.NVLINK_LATENCY_s,
        "links": links,
    }


def _cpus_of(matrix: _Matrix, socket_of: list[int], device: int) -> str:
    """Of a NIC, for which the matrix has no column: those of a GPU at the same socket."""
    beside = (i for i in range(matrix.n_gpus) if socket_of[i] == socket_of[device])
    return next((matrix.cpus[i] for i in beside if matrix.cpus.get(i)), "")

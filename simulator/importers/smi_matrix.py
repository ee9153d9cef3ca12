"""The matrix of ``nvidia-smi topo -m``: how any two devices of a machine are joined.

Between two GPUs NV# hides how PCIe joins them. That then follows from NICs that both are close to, or from their NUMA
nodes. NODE and PHB are alike here: by way of one socket.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
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
    """A matrix that has been read. ``names``: of devices, GPUs first; ``near[i, j]``: a position in `_RELATIONS`;
    ``nvlinks``: numbers of links by pair."""

    path: Path
    names: tuple[str, ...]
    n_gpus: int
    near: dict[tuple[int, int], int]
    nvlinks: dict[tuple[int, int], int]
    cpus: dict[int, str]
    numa: dict[int, int]
    lines: dict[int, int]


def is_matrix(text: str) -> bool:
    """Return whether a text is of this format, by its header."""
    return any(re.match(r"\s*GPU0(\s|$)", line) for line in _plain(text).splitlines())


def read(text: str, path: Path, without: Collection[str] = ()) -> Imported:
    """Return the node of a matrix, but for network cards whose names are in ``without``.

    Raises `InputError` with the line of a cell that is not known, or of relations that no tree has.
    """
    matrix = _without(_parse(_plain(text), path), without)
    joined = {i for pair in matrix.near for i in pair}
    unplaced = dict.fromkeys([i for i in range(matrix.n_gpus) if i not in joined and i not in matrix.numa], -1)
    socket_of, sockets = _sockets(matrix, matrix.numa | unplaced)
    tree = _tree(matrix, socket_of)
    if _mismatch(matrix, tree):  # virtual machines may show one NUMA node, and GPUs that are far apart
        socket_of, sockets = _sockets(matrix, unplaced)
        tree = _tree(matrix, socket_of)
    if mismatch := _mismatch(matrix, tree):
        raise mismatch
    n, count = matrix.n_gpus, len(matrix.names)
    names = [f"gpu{i}" if i < n else f"nic{i - n}" for i in range(count)]
    assumed: list[str] = []
    if len(unplaced) > 1:
        assumed.append(
            f"node.sockets: one of {len(unplaced)} GPUs, as the matrix shows neither their PCIe nor NUMA nodes"
        )
    node = _node_section(matrix, sockets, tree, names, assumed)
    cluster: dict[str, Any] = {"name": path.stem, "nodes": 1, "node": node}
    if count > n:
        _add_network(cluster, count - n, assumed)
    devices = [
        Device(name, matrix.names[i], socket_of[i], matrix.cpus.get(i, "") or _cpus_of_socket(matrix, socket_of, i))
        for i, name in enumerate(names)
    ]
    return Imported("nvidia-smi topo -m", cluster, tuple(devices), tuple(assumed))


def _node_section(
    matrix: _Matrix, sockets: int, tree: dict[int | str, str], names: list[str], assumed: list[str]
) -> dict[str, Any]:
    """Return the section ``node`` without network cards, and add to ``assumed`` the figures that the matrix lacks."""
    assumed.append(f"node.gpus.type: {imported.NO_TYPE}, as the matrix does not say what GPU it is")
    node: dict[str, Any] = {"gpus": {"type": imported.NO_TYPE, "count": matrix.n_gpus}}
    if sockets > 1:
        between_Bps = round(line_rate_Bps(_SOCKETS_GBps), -8)
        node["sockets"] = {"count": sockets, "bandwidth_Bps": between_Bps, "latency_s": imported.SOCKET_LATENCY_s}
        assumed.append(
            f"node.sockets.bandwidth_Bps: {between_Bps / 1e9:.1f} GB/s, for the {_SOCKETS_GBps:g} GB/s that NCCL "
            "counts between Xeons up to Ice Lake (src/graph/topo.h)"
        )
        assumed.append(f"node.sockets.latency_s: {imported.SOCKET_LATENCY_s:g} s, Intel MLC on a Xeon 8280")
    if matrix.nvlinks:
        node["nvlink"] = _nvlink(matrix)
        link_GBps = imported.NVLINK_Bps / 1e9
        assumed.append(f"node.nvlink.bandwidth_Bps: {link_GBps:g} GB/s per link (V100, A100, H100 data sheets)")
        assumed.append(f"node.nvlink.latency_s: {imported.NVLINK_LATENCY_s:g} s, NCCL's figure for an NVLink hop")
    places = {vertex: place for vertex, place in tree.items() if isinstance(vertex, str)}
    places |= {names[vertex]: place for vertex, place in tree.items() if isinstance(vertex, int)}
    node["pcie"] = {"generation": _GENERATION, "tree": places}
    assumed.append(f"node.pcie.generation: {_GENERATION}, with 16 lanes everywhere")
    return node


def _add_network(cluster: dict[str, Any], nics: int, assumed: list[str]) -> None:
    """Add so many network cards and a fabric, of which the matrix gives no figure."""
    latency_s = imported.NIC_LATENCY_s["infiniband"]
    cluster["node"]["nics"] = {"count": nics, "bandwidth_bps": _NIC_bps, "latency_s": latency_s}
    cluster["fabric"] = {"kind": "rail_fat_tree", "transport": "infiniband"}
    assumed.append(f"node.nics.bandwidth_bps: {_NIC_bps / 1e9:g} Gb/s each, as the matrix gives no speed")
    assumed.append(f"node.nics.latency_s: {latency_s:g} s, usual of InfiniBand under one switch")
    assumed.append("fabric.kind: a rail-optimised fat tree, as the matrix is of one node")
    assumed.append("fabric.transport: infiniband, as the matrix does not name it")


def _plain(text: str) -> str:
    """Return a text without the escapes that underline the header on a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@dataclass
class _Rows:
    """Rows of a matrix as they are read. ``cells[i, j]``: relation of device i to j; ``lines``, ``cpus``, ``numa``: by
    device."""

    path: Path
    header: list[str]
    n_gpus: int
    cells: dict[tuple[int, int], str] = field(default_factory=dict)
    lines: dict[int, int] = field(default_factory=dict)
    cpus: dict[int, str] = field(default_factory=dict)
    numa: dict[int, int] = field(default_factory=dict)

    def fail(self, line: int, message: str, **parts: Any) -> NoReturn:
        """Raise `InputError` of a line, counted from 0."""
        raise InputError(f"line {line + 1}: {message}", file=self.path, **parts)

    def add(self, number: int, line: str) -> None:
        """Read the row of one device."""
        words = line.split()
        i = self.header.index(words[0])
        if i in self.lines:
            self.fail(number, f"{words[0]} has a row already, line {self.lines[i] + 1}")
        self.lines[i] = number
        width = len(self.header)
        row = words[1 : width + 1]
        if len(row) < width:
            message, allowed = f"{words[0]} has {len(row)} cells", f"{width} cells"
            self.fail(number, message, found=brief(line.strip()), allowed=allowed)
        for j, cell in enumerate(row):
            self._check(number, i, j, cell)
            self.cells[i, j] = cell
        if i < self.n_gpus:
            rest = [part for part in re.split(r"\t+|\s{2,}", line.strip()) if part][width + 1 :]
            self.cpus[i] = rest[0] if rest else ""
            if len(rest) > 1 and re.fullmatch(r"\d{1,4}", rest[1]):
                self.numa[i] = int(rest[1])

    def _check(self, number: int, i: int, j: int, cell: str) -> None:
        pair = f"{self.header[i]} to {self.header[j]}"
        if (cell == "X") != (i == j):
            allowed = "X there, and nowhere else"
            self.fail(number, f"{pair}: X is a device with itself", found=cell, allowed=allowed)
        nvlinks = re.fullmatch(r"NV\d{1,3}", cell) and max(i, j) < self.n_gpus
        if cell not in ("X", "SOC", *_RELATIONS) and not nvlinks:
            allowed = f"X, {', '.join(_RELATIONS)}, and NV# between GPUs"
            self.fail(number, f"{pair}: is no way to be joined", found=brief(cell), allowed=allowed)
        if self.cells.get((j, i), cell) != cell:
            message = f"{pair} is {cell}, but {self.cells[j, i]} the other way"
            self.fail(number, message, fix="what nvidia-smi prints: symmetric")


def _parse(text: str, path: Path) -> _Matrix:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r"\s*GPU0(\s|$)", line))
    rows = _header(lines[start], start, path)
    for number, line in enumerate(lines[start + 1 :], start + 1):
        words = line.split()
        if words and words[0] in rows.header:
            rows.add(number, line)
        elif words:
            ended = len(rows.lines) >= rows.n_gpus and words[0].endswith(("Legend:", "Legend"))
            if not ended and words[0] != "NIC":
                allowed = ", ".join(rows.header)
                rows.fail(number, "is no row of this matrix", found=brief(words[0]), allowed=allowed)
            break
    missing = [name for i, name in enumerate(rows.header) if i < rows.n_gpus and i not in rows.lines]
    if missing:
        names = f"no row of {', '.join(missing)}"
        rows.fail(len(lines) - 1, "ends before all GPUs had their rows", found=names)
    cells = rows.cells | {(j, i): cell for (i, j), cell in rows.cells.items()}  # rows of NICs may be left out
    legend = dict(re.findall(r"^\s*(NIC\d+)\s*:\s*(\S+)", text, flags=re.MULTILINE))
    return _Matrix(
        path=path,
        names=tuple([legend.get(name, name) for name in rows.header]),
        n_gpus=rows.n_gpus,
        near={pair: _RELATIONS.index(cell.replace("SOC", "SYS")) for pair, cell in cells.items() if not _special(cell)},
        nvlinks={pair: int(cell[2:]) for pair, cell in cells.items() if cell.startswith("NV")},
        cpus=rows.cpus,
        numa=rows.numa,
        lines=rows.lines,
    )


def _without(matrix: _Matrix, names: Collection[str]) -> _Matrix:
    """Return a matrix without the network cards of these names."""
    kept = [i for i, name in enumerate(matrix.names) if i < matrix.n_gpus or name not in names]
    place = {old: new for new, old in enumerate(kept)}

    def renumbered(cells: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        return {(place[i], place[j]): cell for (i, j), cell in cells.items() if i in place and j in place}

    lines = {place[i]: line for i, line in matrix.lines.items() if i in place}
    shown = tuple([matrix.names[i] for i in kept])
    return replace(matrix, names=shown, near=renumbered(matrix.near), nvlinks=renumbered(matrix.nvlinks), lines=lines)


def _header(line: str, number: int, path: Path) -> _Rows:
    """Return a matrix without rows from its header, which names the devices."""
    header = re.sub(r"\b(CPU|NUMA) Affinity\b|\bGPU NUMA ID\b", "", line).split()
    n = sum(re.fullmatch(r"GPU\d+", word) is not None for word in header)
    rows = _Rows(path, header, n)
    if header[:n] != [f"GPU{i}" for i in range(n)]:
        message = "columns of GPUs are not numbered from 0"
        rows.fail(number, message, found=" ".join(header[:8]), allowed="GPU0 GPU1 ...")
    if len(set(header)) < len(header):
        rows.fail(number, "has a column twice", found=" ".join(header))
    if len(header) > _MAX_DEVICES:
        rows.fail(number, "has too many columns", found=len(header), allowed=f"at most {_MAX_DEVICES}")
    return rows


def _special(cell: str) -> bool:
    return cell == "X" or cell.startswith("NV")


def _groups(matrix: _Matrix, most: int, together: dict[int, int]) -> list[int]:
    """Return the number of each device's group.

    Relations up to ``most`` join devices, and so do equal numbers of GPUs in ``together``."""
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
    """Return the socket of each device, and the number of sockets.

    NUMA nodes come as the file numbers them, then those without a number. GPUs whose number in ``together`` is equal
    are at one socket."""
    groups = _groups(matrix, _NODE, together)
    numbers = {groups[i]: number for i, number in sorted(matrix.numa.items(), reverse=True)}
    order = sorted(dict.fromkeys(groups), key=lambda group: (group not in numbers, numbers.get(group, group), group))
    return [order.index(group) for group in groups], len(order)


def _tree(matrix: _Matrix, socket_of: list[int]) -> dict[int | str, str]:
    """Return where each device and switch is plugged in.

    Devices that are PIX share a switch. Groups that are PXB hang under one more switch, and each of them has a switch
    of its own, be it of one device."""
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
    """Return the error of a tree that joins two devices otherwise than the matrix does."""

    def ways(i: int) -> list[str]:
        way: list[str] = []
        vertex: int | str = i
        while vertex in tree:
            vertex = tree[vertex]
            way.append(vertex)
        return way

    paths = [ways(i) for i in range(len(matrix.names))]
    for (i, j), relation in matrix.near.items():
        common = next((vertex for vertex in paths[i] if vertex in paths[j]), None)
        if common is None:
            joined = _SYS
        elif common.startswith("cpu"):
            joined = _NODE
        else:
            joined = _PIX if paths[i][0] == paths[j][0] else _PXB
        if joined != (_NODE if relation == _NODE - 1 else relation):
            return InputError(
                f"line {matrix.lines.get(i, matrix.lines.get(j, 0)) + 1}: {matrix.names[i]} to {matrix.names[j]} "
                f"is {_RELATIONS[relation]}, but others join them more closely",
                file=matrix.path,
                found=_RELATIONS[relation],
                allowed=f"{_RELATIONS[joined]}, by the other cells",
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
    return imported.links_section(counts, matrix.n_gpus, imported.NVLINK_Bps)


def _cpus_of_socket(matrix: _Matrix, socket_of: list[int], device: int) -> str:
    """Return the CPUs of a NIC, for which the matrix has no column: those of a GPU at the same socket."""
    beside = (i for i in range(matrix.n_gpus) if socket_of[i] == socket_of[device])
    return next((matrix.cpus[i] for i in beside if matrix.cpus.get(i)), "")

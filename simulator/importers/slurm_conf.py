"""Slurm's ``topology.conf`` of the plugin topology/tree: which nodes hang under which switch, and these under which.

It says nothing of the nodes themselves, nor of bandwidths: Slurm has no use for them (``LinkSpeed`` is for people).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from simulator.errors import InputError
from simulator.importers.imported import Imported
from simulator.input_files import brief, closest

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed")
_MOST_NAMES = 100_000


@dataclass(frozen=True, slots=True)
class _Switch:
    name: str
    line: int
    nodes: tuple[str, ...]
    switches: tuple[str, ...]


def is_conf(text: str) -> bool:
    return re.search(r"^\s*(SwitchName|BlockName)\s*=", text, flags=re.MULTILINE | re.IGNORECASE) is not None


def read(text: str, path: Path) -> Imported:
    """Raises `InputError` with the line of what is no line of such a file, or joins no tree."""
    switches = _parse(text, path)

    def fail(line: int, message: str, **parts: Any) -> NoReturn:
        raise InputError(f"line {line}: {message}", file=path, **parts)

    above: dict[str, str] = {}
    under: dict[str, str] = {}
    for switch in switches.values():
        for name in switch.switches:
            if name not in switches:
                near = closest(name, switches)
                fail(
                    switch.line, f"{switch.name}: no line has this switch", found=name, fix=near and f"Switches={near}"
                )
            if name in above:
                fail(switch.line, f"{name} is under {above[name]} too", found=switch.name, allowed="one switch above")
            above[name] = switch.name
        for name in switch.nodes:
            if name in under:
                fail(
                    switch.line, f"{name} is under {under[name]} too", found=switch.name, allowed="one switch per node"
                )
            under[name] = switch.name
    for switch in switches.values():
        way = [switch.name]
        while way[-1] in above and above[way[-1]] not in way:
            way.append(above[way[-1]])
        if way[-1] in above:
            fail(switch.line, f"{switch.name} hangs under itself", found=" in ".join([*way, above[way[-1]]]))
    roots = [name for name in switches if name not in above]
    if len(roots) > 1:
        fail(
            switches[roots[1]].line,
            "is not joined to the other switches",
            found=", ".join(roots[:8]),
            allowed="one root",
        )
    if not under:
        fail(switches[roots[0]].line, "no switch has nodes")
    order = _depth_first(switches, roots[0])
    tree: dict[str, Any] = {}
    hosts: list[str] = []
    for switch in order:
        hosts += switch.nodes
        tree[switch.name] = {"at": above[switch.name]} if switch.name in above else {}
        if switch.nodes:
            tree[switch.name]["nodes"] = len(switch.nodes)
    cluster = {
        "name": path.stem,
        "nodes": len(hosts),
        "fabric": {"kind": "switch_tree", "transport": "infiniband", "switches": tree},
    }
    assumed = (
        "fabric.transport: infiniband",
        "fabric.oversubscription: none, a switch's link upwards carries what all links below it do",
    )
    return Imported("Slurm topology.conf", cluster, (), assumed, hosts=tuple(hosts))


def _depth_first(switches: dict[str, _Switch], root: str) -> list[_Switch]:
    order, waiting = [], [root]
    while waiting:
        switch = switches[waiting.pop()]
        order.append(switch)
        waiting += reversed(switch.switches)
    return order


def _parse(text: str, path: Path) -> dict[str, _Switch]:
    switches: dict[str, _Switch] = {}
    held = ""
    known = {key.lower(): key for key in _KEYS}
    for number, raw in enumerate(text.splitlines(), 1):
        line = held + raw.split("#", 1)[0].rstrip()
        held = line[:-1] if line.endswith("\\") else ""
        if held or not line.strip():
            continue

        def fail(message: str, number: int = number, **parts: Any) -> NoReturn:
            raise InputError(f"line {number}: {message}", file=path, **parts)

        values: dict[str, str] = {}
        for word in line.split():
            key, equals, value = word.partition("=")
            if key.lower() in ("blockname", "blocksizes"):
                fail("is of topology/block, whose blocks are no tree of switches", found=key, allowed="topology/tree")
            if not equals or key.lower() not in known or not value:
                near = closest(key, _KEYS)
                fail("is no KEY=VALUE of this file", found=brief(word), allowed=", ".join(_KEYS), fix=near)
            if known[key.lower()] in values:
                fail(f"has {key} twice")
            values[known[key.lower()]] = value
        if "SwitchName" not in values:
            fail("lacks SwitchName", found=brief(line.strip()))
        names = {key: _expanded(values.get(key, ""), path, number) for key in ("SwitchName", "Nodes", "Switches")}
        if bool(names["Nodes"]) is bool(names["Switches"]):
            fail("has either Nodes or Switches", found=brief(line.strip()))
        for name in names["SwitchName"]:
            if name in switches:
                fail(f"{name} has a line already, line {switches[name].line}")
            switches[name] = _Switch(name, number, names["Nodes"], names["Switches"])
    if not switches:
        raise InputError("holds no switch", file=path)
    return switches


def _expanded(text: str, path: Path, line: int) -> tuple[str, ...]:
    """The names that a hostlist stands for, such as ``tux[0-3,12],login``."""
    names: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    for part in parts:
        pieces: list[list[str]] = []
        for piece in re.split(r"(\[[^\]]*\])", part):
            pieces.append(_range(piece[1:-1], path, line) if piece.startswith("[") else [piece])
        count = 1
        for choices in pieces:
            count *= len(choices)
        if count + len(names) > _MOST_NAMES:
            raise InputError(
                f"line {line}: stands for too many names",
                file=path,
                found=brief(text),
                allowed=f"at most {_MOST_NAMES:,}",
            )
        names += ["".join(chosen) for chosen in itertools.product(*pieces)]
    if ",".join(parts) != text:
        raise InputError(
            f"line {line}: is no list of names", file=path, found=brief(text), allowed="such as tux[0-3,12],a"
        )
    return tuple(names)


def _range(text: str, path: Path, line: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not bounds or not first <= last < first + _MOST_NAMES:
            raise InputError(
                f"line {line}: is no range of numbers", file=path, found=brief(text), allowed="such as 0-3,12"
            )
        numbers += [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    return numbers

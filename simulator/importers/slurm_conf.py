"""Slurm's ``topology.conf`` of the plugin topology/tree: switches, and the nodes and switches under each.

It says nothing of the nodes themselves, nor of bandwidths: Slurm has no use for them (``LinkSpeed`` is for people).
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from simulator.errors import InputError
from simulator.importers.imported import Imported
from simulator.input_files import brief, closest

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed")
_MOST_NAMES = 100_000
#: Tiers of switches.
_MOST_TIERS = 16


@dataclass(frozen=True, slots=True)
class _Switch:
    """One line of the file: a switch, and the ``nodes`` or ``switches`` under it."""

    name: str
    line: int
    nodes: tuple[str, ...]
    switches: tuple[str, ...]


def is_conf(text: str) -> bool:
    """Return whether a text is of this format, by its keys."""
    return re.search(r"^\s*(SwitchName|BlockName)\s*=", text, flags=re.MULTILINE | re.IGNORECASE) is not None


def read(text: str, path: Path) -> Imported:
    """Return the fabric of a file, without nodes. Raises `InputError` with the line of what is no line of such a file,
    or joins no tree."""
    switches = _parse(text, path)
    above = _switches_above(switches, path)
    hosts: list[str] = []
    tree: dict[str, Any] = {}
    for switch in _depth_first(switches, _root(switches, above, path)):
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


def _fail(path: Path, line: int, message: str, **parts: Any) -> NoReturn:
    raise InputError(f"line {line}: {message}", file=path, **parts)


def _switches_above(switches: dict[str, _Switch], path: Path) -> dict[str, str]:
    """Return the switch above each switch. Raises `InputError` where a switch or node has several, or a switch itself
    above it."""
    above: dict[str, str] = {}
    node_switch: dict[str, str] = {}
    for switch in switches.values():
        for name in switch.switches:
            if name not in switches:
                near = closest(name, switches)
                fix = near and f"Switches={near}"
                _fail(path, switch.line, f"{switch.name}: no line has this switch", found=name, fix=fix)
            if name in above:
                message = f"{name} is under {above[name]} too"
                _fail(path, switch.line, message, found=switch.name, allowed="one switch above")
            above[name] = switch.name
        for name in switch.nodes:
            if name in node_switch:
                message = f"{name} is under {node_switch[name]} too"
                _fail(path, switch.line, message, found=switch.name, allowed="one switch per node")
            node_switch[name] = switch.name
    for switch in switches.values():
        way = [switch.name]
        while way[-1] in above and above[way[-1]] not in way:
            way.append(above[way[-1]])
            if len(way) > _MOST_TIERS:
                message = f"{switch.name} is under more than {_MOST_TIERS - 1} switches, one under the other"
                _fail(path, switch.line, message, allowed=f"at most {_MOST_TIERS} tiers")
        if way[-1] in above:
            circle = " in ".join([*way, above[way[-1]]])
            _fail(path, switch.line, f"{switch.name} hangs under itself", found=circle)
    return above


def _root(switches: dict[str, _Switch], above: dict[str, str], path: Path) -> str:
    """Return the one switch that has none above it. Raises `InputError` where there are several, or no nodes."""
    roots = [name for name in switches if name not in above]
    if len(roots) > 1:
        line, names = switches[roots[1]].line, ", ".join(roots[:8])
        _fail(path, line, "is not joined to the other switches", found=names, allowed="one root")
    if not any(switch.nodes for switch in switches.values()):
        _fail(path, switches[roots[0]].line, "no switch has nodes")
    return roots[0]


def _depth_first(switches: dict[str, _Switch], root: str) -> list[_Switch]:
    order, waiting = [], [root]
    while waiting:
        switch = switches[waiting.pop()]
        order.append(switch)
        waiting += reversed(switch.switches)
    return order


def _parse(text: str, path: Path) -> dict[str, _Switch]:
    switches: dict[str, _Switch] = {}
    begun = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = begun + raw.split("#", 1)[0].rstrip()
        begun = line[:-1] if line.endswith("\\") else ""
        if begun or not line.strip():
            continue
        values = _values(line, path, number)
        names = {key: _expanded(values.get(key, ""), path, number) for key in ("SwitchName", "Nodes", "Switches")}
        if bool(names["Nodes"]) is bool(names["Switches"]):
            _fail(path, number, "has either Nodes or Switches", found=brief(line.strip()))
        for name in names["SwitchName"]:
            if name in switches:
                _fail(path, number, f"{name} has a line already, line {switches[name].line}")
            switches[name] = _Switch(name, number, names["Nodes"], names["Switches"])
    if not switches:
        raise InputError("holds no switch", file=path)
    return switches


def _values(line: str, path: Path, number: int) -> dict[str, str]:
    """Return the values of a line by their keys, as `_KEYS` writes them."""
    keys = {key.lower(): key for key in _KEYS}
    values: dict[str, str] = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if key.lower() in ("blockname", "blocksizes"):
            message = "is of topology/block, whose blocks are no tree of switches"
            _fail(path, number, message, found=key, allowed="topology/tree")
        if not equals or key.lower() not in keys or not value:
            message, near = "is no KEY=VALUE of this file", closest(key, _KEYS)
            _fail(path, number, message, found=brief(word), allowed=", ".join(_KEYS), fix=near)
        if keys[key.lower()] in values:
            _fail(path, number, f"has {key} twice")
        values[keys[key.lower()]] = value
    if "SwitchName" not in values:
        _fail(path, number, "lacks SwitchName", found=brief(line.strip()))
    return values


def _expanded(text: str, path: Path, line: int) -> tuple[str, ...]:
    """Return the names that a hostlist stands for, such as ``tux[0-3,12],login``."""
    names: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    for part in parts:
        pieces = [
            _numbers(piece[1:-1], path, line) if piece.startswith("[") else [piece]
            for piece in re.split(r"(\[[^\]]*\])", part)
        ]
        if math.prod(map(len, pieces)) + len(names) > _MOST_NAMES:
            _fail(path, line, "stands for too many names", found=brief(text), allowed=f"at most {_MOST_NAMES:,}")
        names += ["".join(choice) for choice in itertools.product(*pieces)]
    if ",".join(parts) != text:
        _fail(path, line, "is no list of names", found=brief(text), allowed="such as tux[0-3,12],a")
    return tuple(names)


def _numbers(text: str, path: Path, line: int) -> list[str]:
    """Return the numbers of a range such as ``0-3,12``, with as many digits as its bounds."""
    numbers: list[str] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if not bounds or not first <= last < first + _MOST_NAMES:
            _fail(path, line, "is no range of numbers", found=brief(text), allowed="such as 0-3,12")
        numbers += [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    return numbers

"""Layers of a module, and the part of a model that an operation of the tape belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulator.capturing.recorder import Entry, ModuleCall, Tape
from simulator.errors import InputError


@dataclass(frozen=True)
class Sections:
    """Forward passes of the layers, in order. Part 0 lies before them, part ``len(layers) + 1`` behind."""

    layers: tuple[ModuleCall, ...]

    @property
    def layer_list(self) -> str:
        """Dotted name of the list that the layers are of; empty where the module is one layer, or the list."""
        return self.layers[0].path.rpartition(".")[0] if self.layers else ""

    @property
    def behind(self) -> int:
        """Number of the part behind all layers."""
        return len(self.layers) + 1

    def part_of_entry(self, number: int) -> int:
        """Return the part of a forward entry of the tape; what runs between two layers belongs to the first."""
        return self._place([call.entries for call in self.layers], number)

    def part_of_node(self, node: int) -> int:
        """Return the part of a node of autograd."""
        return self._place([call.nodes for call in self.layers], node)

    def path(self, part: int) -> str:
        """Return the dotted name of the module of a part; the ends have none."""
        return self.layers[part - 1].path if 0 < part < self.behind else ""

    def _place(self, ranges: Sequence[tuple[int, int]], number: int) -> int:
        place = bisect_right([first for first, _ in ranges], number)
        return self.behind if place == len(ranges) and number >= ranges[-1][1] else place


def sections(module: Any, tape: Tape, layers: str | None) -> Sections:
    """Return the sections of a module: its layers are the children of the list ``layers`` of modules.

    Without it these are the children of the list (``ModuleList``, ``Sequential``, ``ModuleDict``) with most weights.
    A module without lists is one layer. Raises `InputError` where ``layers`` names none.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for call in (one for one in tape.calls if one.path):
        parent, _, _ = call.path.rpartition(".")
        calls.setdefault(parent, []).append(call)
    lists = {path: one for path, one in module.named_modules() if (path and path in calls) or _is_list(one)}
    if layers is not None:
        if layers not in lists or not calls.get(layers):
            named = [path for path, one in module.named_modules() if _is_list(one) and calls.get(path)]
            raise InputError(
                "has no list of this name whose modules run",
                file=type(module).__name__,
                key="layers",
                found=layers,
                allowed=", ".join(repr(path) for path in named) or "null, as it has no lists",
            )
        return Sections(_in_order(calls[layers]))
    sizes = {path: _elements(one) for path, one in lists.items() if _is_list(one) and len(calls.get(path, ())) > 1}
    if sizes:
        return Sections(_in_order(calls[max(sizes, key=lambda path: (sizes[path], -path.count(".")))]))
    return Sections(tuple(call for call in tape.calls if call.path == "")[:1])


def _in_order(calls: Sequence[ModuleCall]) -> tuple[ModuleCall, ...]:
    return tuple(sorted(calls, key=lambda call: call.entries))


def _is_list(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _elements(module: Any) -> int:
    return sum(weight.numel() for weight in module.parameters())


@dataclass(frozen=True)
class Chain:
    """Bytes that pass from a layer to the next, and elements of a token among them; ``broken``: why it is no chain."""

    nbytes: float
    width: int
    broken: str


def chain_of_layers(tape: Tape, layers: Sections) -> Chain:
    """Return what passes between layers.

    A layer may read tensors with gradients of the one before it alone, and all layers must pass on as much. What has no
    gradient, such as positions, each stage of a pipeline makes for itself.
    """
    writer: dict[int, tuple[int, Entry]] = {}
    passed: dict[int, dict[int, tuple[int, ...]]] = {}
    broken = ""
    for number, entry in enumerate(tape.entries):
        if entry.backward:
            break
        part = layers.part_of_entry(number)
        for use in entry.inputs:
            if use.storage not in writer or not use.has_gradient:
                continue
            maker, source = writer[use.storage]
            if maker < part:
                passed.setdefault(part, {})[use.storage] = use.shape
            if maker < part - 1 and not broken:
                broken = f"{_place(entry)} reads what {_place(source)} has made, which is not the layer before it"
        for written in entry.outputs:
            if written is not None and not (entry.is_view and written.storage in writer):
                writer[written.storage] = part, entry
    entering = [passed.get(part, {}) for part in range(1, layers.behind)]
    sizes = [sum(tape.storages[storage] for storage in storages) for storages in entering[1:]]
    if not broken and len(set(sizes)) > 1:
        broken = "its layers pass on tensors of different sizes"
    shapes = [shape for storages in (entering[1:] or entering) for shape in storages.values()]
    nbytes, width = max(sizes, default=0.0), shapes[0][-1] if shapes and shapes[0] else 1
    return Chain(nbytes, width if nbytes % width == 0 else 1, broken)


def _place(entry: Entry) -> str:
    return entry.module or "the model itself"

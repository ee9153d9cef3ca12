"""Parts of a captured model from a tape: nodes with kernels, weights and kept tensors; equal layers are one part."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulator.captured import INPUT, CapturedKernel, CapturedNode, CapturedPart, CapturedTensor, CapturedWeight
from simulator.capturing.backward import alive_bytes, for_weights, made_by
from simulator.capturing.calls import DTYPES, Launch
from simulator.capturing.recorder import Entry, Tape
from simulator.capturing.sections import Sections
from simulator.capturing.splitting import RankShare, Shares
from simulator.program import GroupedMatmul, Matmul, kernel_to_text


@dataclass(frozen=True)
class _Placed:
    """An entry of the tape with its number."""

    number: int
    entry: Entry


class Parts:
    """The parts of a model, each of which is built where somebody asks for it."""

    def __init__(self, tape: Tape, sections: Sections, shares: Shares, weights: Mapping[str, Any]) -> None:
        self.tape, self.sections, self.shares, self.weights = tape, sections, shares, weights
        self.only_weights = for_weights(tape)
        self.alive = alive_bytes(tape, backward=False), alive_bytes(tape, backward=True)
        self.nodes: dict[tuple[int, int], tuple[list[_Placed], list[_Placed]]] = {}
        self.part_of_storage: dict[int, int] = {}
        for number, entry in enumerate(tape.entries):
            part = sections.part_of_node(entry.node) if entry.backward else sections.part_of_entry(number)
            self.nodes.setdefault((part, entry.node), ([], []))[entry.backward].append(_Placed(number, entry))
            for use in entry.outputs:
                if use is not None and not entry.backward:
                    self.part_of_storage.setdefault(use.storage, part)
        self.kept = self._kept()
        self.keys: dict[int, list[tuple[int, int]]] = {}
        for key in sorted(self.nodes | self.kept):
            self.keys.setdefault(key[0], []).append(key)
        self.owners = {number: self._owners(keys) for number, keys in self.keys.items()}
        self.first_part_of_weight: dict[str, int] = {}
        for number, owned in self.owners.items():
            for name in itertools.chain.from_iterable(owned.values()):
                self.first_part_of_weight.setdefault(name, number)

    def _kept(self) -> dict[tuple[int, int], list[CapturedTensor]]:
        """Return by part and node the tensors that it keeps, each storage once in the model."""
        tape, readers = self.tape, dict[int, list[tuple[int, int]]]()
        for kept in tape.kept:
            if kept.storage not in tape.weights and kept.storage not in tape.inputs:
                readers.setdefault(kept.storage, []).append((self.sections.part_of_node(kept.node), kept.node))
        forward = [entry for entry in tape.entries if not entry.backward]
        carries_gradient = {use.storage for entry in forward for use in entry.inputs if use.has_gradient}
        tensors: dict[tuple[int, int], list[CapturedTensor]] = {}
        counts: Counter[int] = Counter()
        for storage, keys in readers.items():
            part, node = self._keeper_of(storage, sorted(keys), storage in carries_gradient)
            counts[part] += 1
            passed = storage in carries_gradient and self.part_of_storage.get(storage, part) < part
            name = INPUT if passed else f"kept {counts[part]}"
            tensor = CapturedTensor(name=name, nbytes=tape.storages[storage], split=storage in self.shares.storages)
            tensors.setdefault((part, node), []).append(tensor)
        return tensors

    def _keeper_of(self, storage: int, readers: list[tuple[int, int]], carries_gradient: bool) -> tuple[int, int]:
        """Return the part and the node that count a kept storage, of the sorted ``readers`` that keep it.

        That is a reader in the part that has made it, or else the first. What carries no gradient, such as positions,
        stays with the last node of the part that has made it.
        """
        maker = self.part_of_storage.get(storage, readers[0][0])
        inside = [key for key in readers if key[0] == maker]
        if inside:
            return inside[0]
        if carries_gradient:
            return readers[0]
        return maker, max(node for part, node in self.nodes if part == maker)

    def part(self, number: int) -> CapturedPart:
        """Return a part. A weight that several parts read is of the first of them; it is tied to that in the others."""
        names, owners = _Names(self.sections.path(number)), self.owners.get(number, {})
        nodes = [self._node(key, names, owners.get(key, ())) for key in self.keys.get(number, ())]
        return CapturedPart(nodes=tuple(node for node in nodes if node != CapturedNode()))

    def _owners(self, keys: list[tuple[int, int]]) -> dict[tuple[int, int], list[str]]:
        """Return the weights of each node of a part, by its ``keys``.

        A weight is of the node that makes its gradient, or else of the one that reads it first.
        """
        owner: dict[str, tuple[int, int]] = {}
        for key in keys:
            forward, backward = self.nodes.get(key, ((), ()))
            for placed in forward:
                for use in placed.entry.inputs:
                    if use.storage in self.tape.weights:
                        owner.setdefault(self.tape.weights[use.storage], key)
            for placed in backward:
                for output in placed.entry.outputs if not placed.entry.is_view else ():
                    name = self.tape.gradients.get(output.storage) if output is not None else None
                    if name in owner:
                        owner[name] = key
        owned: dict[tuple[int, int], list[str]] = {}
        for name, key in owner.items():
            if name in self.weights:
                owned.setdefault(key, []).append(name)
        return owned

    def _node(self, key: tuple[int, int], names: _Names, owned: Any) -> CapturedNode:
        part, _ = key
        forward, backward = self.nodes.get(key, ([], []))
        gradients: dict[str, str] = {}
        passes: dict[str, list[CapturedKernel]] = {"F": [], "B": [], "W": []}
        for placed in (*forward, *backward):
            for place, launch in enumerate(placed.entry.launches):
                alone = (placed.number, place) in self.only_weights
                phase = "F" if not placed.entry.backward else "W" if alone else "B"
                name = names.name_of(placed.entry, launch, phase, self._module(key, placed.entry))
                share = self.shares.kernels.get((placed.number, place), RankShare())
                passes[phase].append(_kernel(name, launch, phase, share))
                if isinstance(launch.kernel, Matmul | GroupedMatmul) and phase == "W":
                    with_gradients = (self.tape.gradients.get(use.storage) for use in made_by(placed.entry, launch))
                    gradients |= {weight: name for weight in with_gradients if weight}
        outputs = (use for placed in forward if placed.entry.launches for use in placed.entry.outputs if use)
        return CapturedNode(
            forward=tuple(passes["F"]),
            input_grad=tuple(passes["B"]),
            weight_grad=tuple(passes["W"]),
            saved=tuple(self.kept.get(key, ())),
            weights=tuple(self._weight(name, part, names, gradients.get(name, "")) for name in owned),
            forward_bytes=max((self.alive[0][placed.number] for placed in forward), default=0.0),
            grad_bytes=max((self.alive[1][placed.number] for placed in backward), default=0.0),
            output_grad_bytes=sum(self.tape.storages[use.storage] for use in outputs) if passes["W"] else 0.0,
        )

    def _module(self, key: tuple[int, int], entry: Entry) -> str:
        """Return the module that an entry belongs to: one that it tells, else that of its node's forward pass."""
        if entry.module or not entry.backward:
            return entry.module
        forward, _ = self.nodes[key]
        return forward[0].entry.module if forward else self.sections.path(key[0])

    def _weight(self, name: str, part: int, names: _Names, gradient: str) -> CapturedWeight:
        weight = self.weights[name]
        first = self.first_part_of_weight[name]
        return CapturedWeight(
            name=names.inside(name),
            shape=tuple(weight.shape),
            dtype=DTYPES[str(weight.dtype).removeprefix("torch.")],
            gradient=gradient,
            split_dimension=self.shares.dimensions.get(name, -1),
            tied_to=name if first != part else "",
            trainable=weight.requires_grad,
        )


class _Names:
    """Names of kernels, different from each other in a part, which count from its module."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._times = prefix, dict[str, int]()

    def inside(self, path: str) -> str:
        """Return a dotted name as it counts from the part."""
        return path.removeprefix(self._prefix).removeprefix(".") if self._prefix else path

    def name_of(self, entry: Entry, launch: Launch, phase: str, module: str) -> str:
        """Return the name of a kernel of ``entry``."""
        suffix = {"F": "", "B": " bwd", "W": " wgrad"}[phase]
        name = f"{self.inside(module)} {entry.name.strip('_')}{launch.label}{suffix}".strip()
        self._times[name] = self._times.get(name, 0) + 1
        return name if self._times[name] == 1 else f"{name} {self._times[name]}"


def _kernel(name: str, launch: Launch, phase: str, share: RankShare) -> CapturedKernel:
    kernel = launch.kernel
    if phase != "F" and isinstance(kernel, Matmul | GroupedMatmul):
        kernel = replace(kernel, role="wgrad" if phase == "W" else "dgrad")
    return CapturedKernel(
        name=name,
        kernel=kernel_to_text(kernel),
        split=share.sizes,
        summed_bytes=share.summed_bytes,
        gathered_bytes=share.gathered_bytes,
    )


def distinct_parts(parts: list[CapturedPart]) -> tuple[tuple[CapturedPart, ...], list[int]]:
    """Return the distinct parts, and the number of each of ``parts`` among them."""
    numbers: dict[CapturedPart, int] = {}
    places = [numbers.setdefault(part, len(numbers)) for part in parts]
    return tuple(numbers), places

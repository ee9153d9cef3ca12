"""Two looks at a tape: kernels that only gradients of weights need, and bytes that are alive in a pass."""

from __future__ import annotations

from collections.abc import Iterable

from simulator.capturing.calls import Launch
from simulator.capturing.recorder import Entry, Tape, Use


def made_by(entry: Entry, launch: Launch) -> tuple[Use, ...]:
    """Return the tensors that a kernel of an operation makes."""
    numbers = range(len(entry.outputs)) if launch.outputs is None else launch.outputs
    return tuple(use for number in numbers if (use := entry.outputs[number]) is not None)


def for_weights(tape: Tape) -> set[tuple[int, int]]:
    """Return the kernels that gradients of weights alone depend on: (number of the entry, number of its kernel).

    Such a kernel makes a gradient of a weight, or what only such kernels of the same node of autograd read.
    """
    readers: dict[int, list[int | None]] = {}
    chosen: set[tuple[int, int]] = set()
    for number in reversed(range(len(tape.entries))):
        entry = tape.entries[number]
        if not entry.backward:
            break
        if entry.is_view or not entry.launches:
            continue
        alone = [_only_for_weights(tape, entry.node, made_by(entry, launch), readers) for launch in entry.launches]
        chosen |= {(number, place) for place, yes in enumerate(alone) if yes}
        for use in entry.inputs:
            readers.setdefault(use.storage, []).append(entry.node if all(alone) else None)
    return chosen


def _only_for_weights(tape: Tape, node: int, results: Iterable[Use], readers: dict[int, list[int | None]]) -> bool:
    """Tell whether each of the tensors is a gradient of a weight, or read for such gradients of its node alone."""
    uses = [use for use in results if use.storage in tape.gradients or readers.get(use.storage)]
    return bool(uses) and all(use.storage in tape.gradients or set(readers[use.storage]) == {node} for use in uses)


def alive_bytes(tape: Tape, *, backward: bool) -> list[float]:
    """Return for each entry the bytes that one direction of the pass has alive then beside kept and given tensors.

    A tensor lives from the operation that makes it to the last one that reads it in that direction. Gradients of
    weights are left out. So are outputs of compiled layers, which count with whoever keeps them.
    """
    left_out = {kept.storage for kept in tape.kept} | set(tape.weights) | set(tape.gradients)
    left_out |= tape.inputs | tape.passed
    last: dict[int, int] = {}
    for number, entry in enumerate(tape.entries):
        if entry.backward == backward:
            for use in (*entry.inputs, *(one for one in entry.outputs if one is not None)):
                last[use.storage] = number
    ends: dict[int, list[int]] = {}
    alive, total, present = [0.0] * len(tape.entries), 0.0, set[int]()
    for number, entry in enumerate(tape.entries):
        if entry.backward != backward:
            continue
        for output in entry.outputs:
            if output is not None and output.storage not in present | left_out:
                present.add(output.storage)
                total += tape.storages[output.storage]
                ends.setdefault(last[output.storage], []).append(output.storage)
        alive[number] = total
        total -= sum(tape.storages[storage] for storage in ends.pop(number, ()))
    return alive

"""Shares of tensor-parallel ranks in the operations of a tape, by a plan of how modules are split.

A plan has a style for patterns of module names, as ``parallelize_module`` of PyTorch and ``tp_plan`` of Hugging Face's
models have it. ``colwise`` splits the outputs of a linear layer, ``rowwise`` its inputs and sums its outputs
(arXiv 1909.08053, section 3). What works on split tensors between them is split too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from simulator.capturing.backward import made_by
from simulator.capturing.kernels import Launch
from simulator.capturing.recorder import Entry, Tape
from simulator.program import Attention, Matmul, Memory

#: Style of a module -> what becomes of its weight and output.
STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise")
#: Styles that say nothing of weights or sums: what lies between split layers works on split tensors anyway.
_IMPLIED = ("replicated_with_grad_allreduce", "local", "sequence_parallel")
_MEMORY = ("read_bytes", "write_bytes")


@dataclass(frozen=True)
class RankShare:
    """A rank's share of one kernel: names of the sizes that are split, and bytes that ranks then sum or gather."""

    sizes: tuple[str, ...] = ()
    summed_bytes: float = 0.0
    gathered_bytes: float = 0.0


@dataclass
class Shares:
    """Shares of kernels by (number of the entry, number of the kernel), split storages and weights, or why none."""

    kernels: dict[tuple[int, int], RankShare] = field(default_factory=dict)
    storages: set[int] = field(default_factory=set)
    dimensions: dict[str, int] = field(default_factory=dict)
    divisor: int = 0
    reason: str = ""


def shares(module: Any, tape: Tape, plan: Mapping[str, str] | None) -> Shares:
    """Return what ranks share of the kernels on a ``tape`` of ``module`` under a ``plan``."""
    if not plan:
        return Shares(reason="it was captured without a plan of what to split: capture(..., tp_plan={...})")
    styles, reason = _styles(module, plan)
    shared = Shares(reason=reason)
    modules = {entry.node: entry.module for entry in tape.entries if not entry.backward and not entry.is_view}
    transposed = {path for path, one in module.named_modules() if type(one).__name__ == "Conv1D"}
    for number, entry in enumerate(tape.entries):
        if shared.reason:
            return shared
        path = modules.get(entry.node, entry.module) if entry.backward else entry.module
        _share_of_entry(shared, tape, number, entry, styles.get(path, ""), path in transposed)
    return shared


def _styles(module: Any, plan: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the styles of modules by their names, and a style or a pattern that is not understood, as a reason."""
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        paths = [path for path, _ in module.named_modules() if fnmatchcase(path, pattern)]
        if style in _IMPLIED:
            continue
        if style not in STYLES:
            if paths:
                return {}, f"the plan says {style} of {pattern}, which is not simulated ({', '.join(STYLES)} are)"
            continue
        styles |= dict.fromkeys(paths, style)
    return styles, "" if styles else "no module has a name of the plan"


def _share_of_entry(shared: Shares, tape: Tape, number: int, entry: Entry, style: str, transposed: bool) -> None:
    """Note what ranks share of one entry."""
    weights = [use for use in entry.inputs if use.storage in tape.weights]
    split_inputs = [use for use in entry.inputs if use.storage in shared.storages]
    if entry.is_view:
        return
    products = [launch for launch in entry.launches if isinstance(launch.kernel, Matmul)]
    if style and style != "embedding_rowwise" and (products or not entry.backward):
        for use in weights if not entry.backward else ():
            column = style.startswith("colwise")
            if len(use.shape) > 1 or column:
                first = column != (transposed and len(use.shape) > 1)
                shared.dimensions[tape.weights[use.storage]] = 0 if first else len(use.shape) - 1
        if products:
            for place, launch in enumerate(entry.launches):
                _share_of_product(shared, tape, (number, place), entry, launch, style, transposed)
            return
    if style == "embedding_rowwise" and not entry.backward and weights:
        shared.dimensions[tape.weights[weights[0].storage]] = 0
        shared.divisor = math.gcd(shared.divisor, weights[0].shape[0])
        out = sum(tape.storages[use.storage] for use in entry.outputs if use is not None)
        shared.kernels[number, 0] = RankShare(summed_bytes=out)
        return
    if style == "embedding_rowwise" and entry.backward:
        cleared = (place for place, launch in enumerate(entry.launches) if launch.kernel.kind == "zero")
        shared.kernels |= {(number, place): RankShare(("write_bytes",)) for place in cleared}
        return
    if split_inputs:
        for place, launch in enumerate(entry.launches):
            _share_of_split(shared, tape, (number, place), entry, launch)


def _share_of_product(
    shared: Shares, tape: Tape, place: tuple[int, int], entry: Entry, launch: Launch, style: str, transposed: bool
) -> None:
    """Note the share of a kernel of a layer whose weight is split."""
    results = made_by(entry, launch)
    nbytes = sum(tape.storages[use.storage] for use in results)
    column, kernel = style.startswith("colwise"), launch.kernel
    if not isinstance(kernel, Matmul):
        if column:
            shared.kernels[place] = RankShare(_MEMORY)
        return
    size, keeps = _split_of_product(tape, entry, results, column, transposed)
    shared.divisor = math.gcd(shared.divisor, getattr(kernel, size))
    gathers = style == "colwise_gather_output" and not entry.backward
    sums = size == "k" and not any(use.storage in tape.gradients for use in results)
    shared.kernels[place] = RankShare((size,), nbytes if sums else 0.0, nbytes if gathers else 0.0)
    if keeps and not gathers:
        shared.storages |= {use.storage for use in results}


def _split_of_product(tape: Tape, entry: Entry, results: Any, column: bool, transposed: bool) -> tuple[str, bool]:
    """Return the size of a product that ranks share, and whether each has a part of its result.

    ``transposed``: the layer's weight has its inputs as rows, and so has its gradient.
    """
    if not entry.backward:
        return ("n", True) if column else ("k", False)
    if any(use.storage in tape.gradients for use in results):
        return ("n" if column == transposed else "m"), True
    return ("k", False) if column else ("n", True)


def _share_of_split(shared: Shares, tape: Tape, place: tuple[int, int], entry: Entry, launch: Launch) -> None:
    """Note the share of a kernel that works on split tensors, and so makes split ones."""
    kernel = launch.kernel
    match kernel:
        case Memory():
            sizes: tuple[str, ...] = _MEMORY
        case Attention():
            sizes = ("heads", "kv_heads")
        case Matmul() if kernel.batch > 1:
            sizes = ("batch",)
        case _:
            shared.reason = f"{entry.module or 'the model itself'} multiplies split tensors ({entry.name})"
            return
    for size in sizes if sizes != _MEMORY else ():
        shared.divisor = math.gcd(shared.divisor, getattr(kernel, size))
    shared.kernels[place] = RankShare(sizes)
    shared.storages |= {use.storage for use in made_by(entry, launch)}

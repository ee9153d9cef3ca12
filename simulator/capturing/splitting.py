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
from typing import Any, NamedTuple

from simulator.capturing.backward import made_by
from simulator.capturing.calls import Launch
from simulator.capturing.recorder import Entry, Tape
from simulator.errors import InputError
from simulator.input_files import closest
from simulator.program import Attention, Matmul, Memory


class SplitStyle(NamedTuple):
    """A way to share a module out to ranks.

    ``outputs``: they split the outputs of a product, and else its inputs. ``gathers``: each then gathers all outputs.
    ``embeds``: they split the rows of an embedding.
    """

    outputs: bool = False
    gathers: bool = False
    embeds: bool = False


#: Styles of plans by name.
STYLES = {
    "colwise": SplitStyle(outputs=True),
    "rowwise": SplitStyle(),
    "colwise_gather_output": SplitStyle(outputs=True, gathers=True),
    "embedding_rowwise": SplitStyle(embeds=True),
}
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
        _share_of_entry(shared, tape, number, entry, styles.get(path), path in transposed)
    return shared


def check_plan(module: Any, tape: Tape, plan: Mapping[str, str]) -> None:
    """Raise `InputError` where an entry of a plan that the caller wrote names no module, no style, or no products."""
    paths = [path for path, _ in module.named_modules()]
    working = {
        entry.module
        for entry in tape.entries
        if any(isinstance(launch.kernel, Matmul) for launch in entry.launches) or entry.name == "embedding"
    }
    for pattern, style in plan.items():
        key = f"tp_plan[{pattern!r}]"
        named = [path for path in paths if fnmatchcase(path, pattern)]
        if style not in (*STYLES, *_IMPLIED):
            allowed = ", ".join((*STYLES, *_IMPLIED))
            raise InputError("is no style", key=key, found=style, allowed=allowed, fix=closest(style, STYLES))
        if not named:
            raise InputError("is the name of no module", key=key, found=pattern, fix=closest(pattern, paths))
        if style in STYLES and not working & set(named):
            below = [path for path in working if any(path.startswith(f"{one}.") for one in named)]
            raise InputError(
                "splits no product: the modules of this name have none themselves",
                key=key,
                found=pattern,
                allowed=", ".join(sorted(below)[:5]) or None,
            )


def _styles(module: Any, plan: Mapping[str, str]) -> tuple[dict[str, SplitStyle], str]:
    """Return the styles of modules by their names, and a style or a pattern that is not understood, as a reason."""
    styles: dict[str, SplitStyle] = {}
    for pattern, style in plan.items():
        paths = [path for path, _ in module.named_modules() if fnmatchcase(path, pattern)]
        if style in _IMPLIED:
            continue
        if style not in STYLES:
            if paths:
                return {}, f"the plan says {style} of {pattern}, which is not simulated ({', '.join(STYLES)} are)"
            continue
        styles |= dict.fromkeys(paths, STYLES[style])
    return styles, "" if styles else "no module has a name of the plan"


def _share_of_entry(
    shared: Shares, tape: Tape, number: int, entry: Entry, style: SplitStyle | None, transposed: bool
) -> None:
    """Note what ranks share of one entry."""
    if entry.is_view:
        return
    if style is not None and style.embeds:
        _share_of_embedding(shared, tape, number, entry)
        return
    products = any(isinstance(launch.kernel, Matmul) for launch in entry.launches)
    if style is not None and not entry.backward:
        _note_dimensions(shared, tape, entry, style, transposed)
    for place, launch in enumerate(entry.launches):
        if style is not None and products:
            _share_of_product(shared, tape, (number, place), entry, launch, style, transposed)
        elif any(use.storage in shared.storages for use in entry.inputs):
            _share_of_split(shared, tape, (number, place), entry, launch)


def _note_dimensions(shared: Shares, tape: Tape, entry: Entry, style: SplitStyle, transposed: bool) -> None:
    """Note the dimensions along which weights of a split module are split; a bias only with its outputs."""
    for use in entry.inputs:
        if use.storage not in tape.weights or (len(use.shape) == 1 and not style.outputs):
            continue
        first = style.outputs != (transposed and len(use.shape) > 1)
        shared.dimensions[tape.weights[use.storage]] = 0 if first else len(use.shape) - 1


def _share_of_embedding(shared: Shares, tape: Tape, number: int, entry: Entry) -> None:
    """Note the share of an embedding whose rows are split: ranks sum what they look up, and clear their own rows."""
    if entry.backward:
        cleared = (place for place, launch in enumerate(entry.launches) if launch.kernel.kind == "zero")
        shared.kernels |= {(number, place): RankShare(("write_bytes",)) for place in cleared}
        return
    weights = [use for use in entry.inputs if use.storage in tape.weights]
    if weights and entry.name == "embedding":  # what scales its rows afterwards is whole
        shared.dimensions[tape.weights[weights[0].storage]] = 0
        shared.divisor = math.gcd(shared.divisor, weights[0].shape[0])
        out = sum(tape.storages[use.storage] for use in entry.outputs if use is not None)
        shared.kernels[number, 0] = RankShare(summed_bytes=out)


def _share_of_product(
    shared: Shares,
    tape: Tape,
    place: tuple[int, int],
    entry: Entry,
    launch: Launch,
    style: SplitStyle,
    transposed: bool,
) -> None:
    """Note the share of a kernel of a layer whose weight is split."""
    results = made_by(entry, launch)
    nbytes = sum(tape.storages[use.storage] for use in results)
    kernel = launch.kernel
    if not isinstance(kernel, Matmul):
        if style.outputs:
            shared.kernels[place] = RankShare(_MEMORY)
        return
    size, keeps = _split_of_product(tape, entry, results, style.outputs, transposed)
    shared.divisor = math.gcd(shared.divisor, getattr(kernel, size))
    gathers = style.gathers and not entry.backward
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

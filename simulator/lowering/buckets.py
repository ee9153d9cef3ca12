"""Buckets: passes cut where the gradients of a bucket are complete, or where its weights are needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from simulator.models import Op, Part
from simulator.operations.weights import Weight, elements, trained
from simulator.program import Block, Step, kernels_of, reordered


class Mark(NamedTuple):
    """Weights whose gradients are complete, or which have been used, after the first ``ops`` ops of a block."""

    ops: int
    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class Bucket:
    """Weights whose gradients are reduced together, or which are gathered together.

    ``block`` is the piece of a pass that completes the gradients of ``weights``, or needs their values.
    """

    block: Block
    weights: tuple[Weight, ...]


def gradients_complete(parts: Sequence[Part], first: int = 0, *, whole: bool = True) -> list[Mark]:
    """Return where the backward pass of ``parts`` completes gradients; it begins at op ``first`` of a block.

    Unless ``whole``, the pass is the one that computes weight gradients alone. A product completes the gradient of its
    weight once all that follows it in its phase is done, such as adding it to the buffer. Gradients that no product
    makes (of norms, biases, embeddings) are complete at the end of the part that holds the weight.
    """
    marks: list[Mark] = []
    done = first
    for part in reversed(parts):
        done += len(part.recompute) if whole else 0
        weight_of_product = {weight.gradient_product: weight for weight in part.weights if weight.gradient_product}
        for run in _runs(part.backward if whole else part.weight_grad, weight_of_product.keys()):
            done += len(run)
            names = [kernel.name for op in run for kernel in kernels_of(op)]
            marks.append(Mark(done, trained(weight_of_product[name] for name in names if name in weight_of_product)))
        marks.append(Mark(done, trained(weight for weight in part.weights if not weight.gradient_product)))
    return [mark for mark in marks if mark.weights]


def _runs(ops: Sequence[Op], products: Collection[str]) -> Iterator[list[Op]]:
    """Cut ``ops`` where the weight phase begins and ends.

    Within it they are cut before each of the ``products`` but the first.
    """
    run: list[Op] = []
    has_product = False
    for op in ops:
        weight, product = _in_weight_phase(op), any(kernel.name in products for kernel in kernels_of(op))
        if run and (weight != _in_weight_phase(run[0]) or (product and has_product)):
            yield run
            run, has_product = [], False
        run.append(op)
        has_product |= product
    if run:
        yield run


def weights_used(parts: Sequence[Part], first: int = 0) -> list[Mark]:
    """Return where the forward pass of ``parts``, which begins at op ``first``, has used trained weights, by part."""
    marks: list[Mark] = []
    done = first
    for part in parts:
        done += len(part.forward)
        marks.append(Mark(done, trained(part.weights)))
    return [mark for mark in marks if mark.weights]


def buckets(block: Block, marks: Sequence[Mark], bytes_per_element: int, bucket_bytes: float) -> list[Bucket]:
    """Cut ``block``, a backward pass, where gradients fill a bucket: of ``bucket_bytes`` or more, each axis apart.

    DDP fills its buckets in the order of the real pass, and so it is here. The mark that closes a bucket is in it
    whole. Ops after the last mark belong to the last bucket, which closes what is left of every axis. Without marks the
    one piece has no weights.
    """
    if not marks:
        return [Bucket(block, ())]
    pieces: list[Bucket] = []
    begin = 0
    filled: dict[str, list[Weight]] = {}
    for done, marked in groupby(marks, key=lambda mark: mark.ops):
        for weight in (weight for mark in marked for weight in mark.weights):
            filled.setdefault(weight.axis, []).append(weight)
        last = done == marks[-1].ops
        full = [axis for axis, group in filled.items() if last or elements(group) * bytes_per_element >= bucket_bytes]
        if full:
            end = len(block.ops) if last else done
            closed = tuple(weight for axis in full for weight in filled.pop(axis))
            pieces.append(Bucket(Block(f"{block.name}.{len(pieces)}", block.ops[begin:end]), closed))
            begin = end
    return pieces


def pieces(step: Step, blocks: Sequence[Block]) -> list[Step]:
    """Return ``step``, a pass, cut into ``blocks`` one after another.

    The first piece waits for the steps that the whole pass waited for. The last one has the label that other steps wait
    for.
    """
    cut = [
        reordered(
            step,
            (),
            label=f"{step.label}.{number}",
            op=block,
            part=f"{step.part}.{number}",
            alloc_bytes=0.0,
            free_bytes=0.0,
        )
        for number, block in enumerate(blocks)
    ]
    cut[0] = reordered(cut[0], step.after, alloc_bytes=step.alloc_bytes)
    cut[-1] = reordered(cut[-1], cut[-1].after, label=step.label, free_bytes=step.free_bytes)
    return cut


def _in_weight_phase(op: Op) -> bool:
    kernels = kernels_of(op)
    return bool(kernels) and kernels[0].phase == "W"

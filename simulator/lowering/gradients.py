"""When gradients are complete and when parameters are needed: passes cut where buckets fill up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from simulator.models import Op, Part
from simulator.program import Block, GroupedMatmul, Matmul, Step
from simulator.program.ops import kernels_of


class Mark(NamedTuple):
    """After the first ``ops`` ops of a block, ``params`` more parameters of an ``axis`` are done with."""

    ops: int
    params: int
    axis: str = "dp"


@dataclass(frozen=True)
class Bucket:
    """``block`` is the piece of a pass that goes with ``params`` (parameters by axis): it completes their gradients, or
    needs their values."""

    block: Block
    params: dict[str, int]


def gradients_complete(parts: Sequence[Part], first: int = 0, *, whole: bool = True) -> list[Mark]:
    """Where in the backward pass of ``parts``, which begins at op ``first`` of a block, gradients are complete; unless
    ``whole``, in the pass that computes weight gradients alone.

    A weight-gradient product completes its weight once all that follows it in its phase is done, such as adding it to
    the buffer; what no product makes (norms, biases, embeddings) and what a part only shares (a tied projection) is
    complete at the end of the part that holds it.
    """
    marks: list[Mark] = []
    done = first
    for part in reversed(parts):
        done += len(part.recompute) if whole else 0
        left = part.params_on
        for run in _runs(part.backward if whole else part.weight_grad):
            done += len(run)
            axis = _axis_of(run)
            made = min(sum(_made_by(op) for op in run), left.get(axis, 0)) if _in_weight_phase(run[0]) else 0
            if made:
                marks.append(Mark(done, made, axis))
                left[axis] -= made
        marks += [Mark(done, count, axis) for axis, count in left.items() if count]
    return marks


def _axis_of(run: Sequence[Op]) -> str:
    """The axis (see `Part.params_on`) of the weight whose gradient a run makes."""
    grouped = any(isinstance(one.kernel, GroupedMatmul) for op in run for one in kernels_of(op))
    return "edp" if grouped else "dp"


def _runs(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """``ops`` cut where the weight phase begins and ends, and within it before each product but the first."""
    run: list[Op] = []
    for op in ops:
        weight = _in_weight_phase(op)
        if run and (weight != _in_weight_phase(run[0]) or (weight and _made_by(op) and any(map(_made_by, run)))):
            yield run
            run = []
        run.append(op)
    if run:
        yield run


def parameters_used(parts: Sequence[Part], first: int = 0) -> list[Mark]:
    """Where in the forward pass of ``parts``, which begins at op ``first``, parameters have been used: part by part."""
    marks: list[Mark] = []
    done = first
    for part in parts:
        done += len(part.forward)
        marks += [Mark(done, count, axis) for axis, count in part.params_on.items()]
    return marks


def buckets(block: Block, marks: Sequence[Mark], bytes_per_param: int, bucket_bytes: float) -> list[Bucket]:
    """Cut ``block`` so that each piece goes with at least ``bucket_bytes``, as DDP fills its buckets in the order of
    the real pass, each axis apart. What closes a bucket is in it whole; ops after the last mark belong to the last one,
    which closes what is left of every axis."""
    pieces: list[Bucket] = []
    begin = 0
    filled: dict[str, int] = {}
    for done, marked in groupby(marks, key=lambda mark: mark.ops):
        for mark in marked:
            filled[mark.axis] = filled.get(mark.axis, 0) + mark.params
        last = done == marks[-1].ops
        full = [axis for axis, params in filled.items() if last or params * bytes_per_param >= bucket_bytes]
        if full:
            end = len(block.ops) if last else done
            closed = {axis: filled.pop(axis) for axis in full}
            pieces.append(Bucket(Block(f"{block.name}.{len(pieces)}", block.ops[begin:end]), closed))
            begin = end
    return pieces


def pieces(step: Step, blocks: Sequence[Block]) -> list[Step]:
    """``step``, a pass, as ``blocks`` one after another; the first waits as the whole did, the last carries the label
    that others wait for."""
    cut = [
        replace(
            step,
            label=f"{step.label}.{number}",
            op=block,
            after=(),
            part=f"{step.part}.{number}",
            alloc_bytes=0.0,
            free_bytes=0.0,
        )
        for number, block in enumerate(blocks)
    ]
    cut[0] = replace(cut[0], after=step.after, alloc_bytes=step.alloc_bytes)
    cut[-1] = replace(cut[-1], label=step.label, free_bytes=step.free_bytes)
    return cut


def _in_weight_phase(op: Op) -> bool:
    kernels = kernels_of(op)
    return bool(kernels) and kernels[0].phase == "W"


def _made_by(op: Op) -> int:
    """Parameters whose gradient ``op`` computes."""
    made = 0
    for one in kernels_of(op):
        match one.kernel:
            case Matmul() as product:
                made += product.m * product.n * product.batch
            case GroupedMatmul() as products:
                made += len(products.tokens) * products.n * products.k
    return made

"""When gradients are ready: the backward pass cut where buckets fill up."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.program import Block, Comm, Compute, Matmul


@dataclass(frozen=True)
class Bucket:
    """``block`` is the part of the backward pass after which the gradients of ``params`` parameters are complete."""

    block: Block
    params: int


def buckets(backward: Block, params: int, grad_bytes: int, bucket_bytes: float) -> list[Bucket]:
    """Cut ``backward`` so that each part completes at least ``bucket_bytes`` of gradients, as DDP fills its buckets.

    Gradients become ready with the weight-gradient product that makes them, in the order of the real backward pass;
    what no product makes (norms, biases, embeddings) belongs to the last bucket. The bucket that a tensor closes
    holds the whole tensor. ``params``: parameters of this rank in the chunk, which the buckets sum to.
    """
    cuts: list[tuple[int, int]] = []
    filled = counted = 0
    for index, op in enumerate(backward.ops):
        filled += _made_by(op)
        if filled * grad_bytes >= bucket_bytes:
            cuts.append((index + 1, filled))
            counted += filled
            filled = 0
    if params > counted or not cuts or cuts[-1][0] < len(backward.ops):
        cuts.append((len(backward.ops), params - counted))
    begin, parts = 0, []
    for number, (end, made) in enumerate(cuts):
        parts.append(Bucket(Block(f"{backward.name}.{number}", backward.ops[begin:end]), made))
        begin = end
    return _without_empty(parts)


def _made_by(op: Compute | Comm) -> int:
    """Parameters whose gradient ``op`` completes. Attention's own products have weight-gradient layouts too."""
    if isinstance(op, Compute) and op.phase == "W" and isinstance(op.kernel, Matmul):
        return op.kernel.m * op.kernel.n * op.kernel.batch
    return 0


def _without_empty(parts: list[Bucket]) -> list[Bucket]:
    """Join a last bucket that has no ops or no parameters of its own to the one before."""
    if len(parts) > 1 and (not parts[-1].block.ops or parts[-1].params == 0):
        last, before = parts.pop(), parts.pop()
        joined = Block(before.block.name, before.block.ops + last.block.ops)
        parts.append(Bucket(joined, before.params + last.params))
    return parts

"""NCCL's operations among some of the ranks, with the sizes of nccl-tests: seconds on the stream, and on the host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from calibration.measure.bench import Bench
from calibration.measure.case import Case, Level, Scalar, UnavailableError, Work

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "send",
    "barrier",
)
COMMON = OPS[:4]
#: Numbers of ranks of the groups that are asked for; none stands for all.
Sizes = Collection[int]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def groups(level: Level, world: int, local: int, only: Sizes = ()) -> list[tuple[int, ...]]:
    """Return the groups to measure in: the first 2, 3, .. ranks of a node, whole nodes, and one rank of each node.

    Below "full" only groups of 2, of a node and of all remain. ``only``: numbers of ranks, whatever the level.
    """
    within = range(2, min(world, local) + 1)
    nodes = range(2, world // local + 1)
    sizes = [*within, *(local * count for count in nodes)]
    if level != "full" and not only:
        sizes = [size for size in sizes if size in (2, local, world)]
    listed = [tuple(range(size)) for size in sizes]
    listed += [tuple(range(0, local * count, local)) for count in nodes if local > 1]
    return [ranks for ranks in listed if not only or len(ranks) in only]


def cases(level: Level, world: int, local: int, only: Sizes = ()) -> Iterator[Case]:
    sizes = {"smoke": (4096,), "quick": tuple(4**power for power in range(4, 16))}.get(
        level, tuple(2**power for power in range(8, 33))
    )
    for ranks in groups(level, world, local, only):
        for op in OPS:
            if op == "barrier":
                yield Case("collective", op, {}, ranks)
                continue
            if op == "send" and len(ranks) > 2:
                continue
            for nbytes in sizes:
                params: dict[str, Scalar] = {"bytes": nbytes, "dtype": "bf16"}
                if op in COMMON or level == "smoke" or nbytes.bit_length() % 2:  # every second size of the rarer ones
                    yield Case("collective", op, params, ranks, limit_s=60.0)
                if op == "all_reduce" and level == "full" and nbytes.bit_length() % 4 == 1:
                    yield Case("collective", op, {**params, "dtype": "fp32"}, ranks, limit_s=60.0)


def prepare(case: Case, bench: Bench, group: dist.ProcessGroup) -> Work:
    """Work of the collective; its ``nbytes`` are the size as nccl-tests counts it, of whole elements for every rank."""
    n, rank = len(case.ranks), case.ranks.index(dist.get_rank())
    if case.op == "barrier":
        return Work(lambda i: dist.barrier(group))
    dtype = DTYPES[str(case.params["dtype"])]
    share = max(1, int(case.params["bytes"]) // (n * dtype.itemsize))
    if case.op not in ("send_recv", "send"):
        share = -(-share // 8) * 8 if share > 8 else share  # parts of 16 bytes are handed over faster
    numel = share * n
    nbytes = float(numel * dtype.itemsize)
    sets = bench.sets(nbytes, 16)
    make = MAKERS.get(case.op)
    if make is None:
        raise UnavailableError(f"no such collective: {case.op}")
    calls = [make(GroupBuffers(bench, group, case.ranks, rank, share, dtype)) for _ in range(sets)]
    return Work(lambda i: calls[i](), nbytes=nbytes, sets=sets)


GroupCall = Callable[[], object]


@dataclass(frozen=True)
class GroupBuffers:
    """The part of one of ``ranks``: its buffers are ``share`` elements, or ``share`` for each rank."""

    bench: Bench
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    share: int
    dtype: torch.dtype

    def data(self, shares: int = 1) -> torch.Tensor:
        # So small that sums repeated in place stay finite.
        return self.bench.fresh(self.share * shares, dtype=self.dtype).mul_(1e-30)

    def whole(self) -> torch.Tensor:
        return self.data(len(self.ranks))


CallMaker = Callable[[GroupBuffers], GroupCall]


def _all_reduce(part: GroupBuffers) -> GroupCall:
    x = part.whole()
    return lambda: dist.all_reduce(x, group=part.group)


def _all_gather(part: GroupBuffers) -> GroupCall:
    mine, out = part.data(), part.whole()
    return lambda: dist.all_gather_into_tensor(out, mine, group=part.group)


def _reduce_scatter(part: GroupBuffers) -> GroupCall:
    x, out = part.whole(), part.data()
    return lambda: dist.reduce_scatter_tensor(out, x, group=part.group)


def _all_to_all(part: GroupBuffers) -> GroupCall:
    x, out = part.whole(), part.whole()
    return lambda: dist.all_to_all_single(out, x, group=part.group)


def _broadcast(part: GroupBuffers) -> GroupCall:
    x = part.whole()
    return lambda: dist.broadcast(x, part.ranks[0], group=part.group)


def _reduce(part: GroupBuffers) -> GroupCall:
    x = part.whole()
    return lambda: dist.reduce(x, part.ranks[0], group=part.group)


def _gather(part: GroupBuffers) -> GroupCall:
    mine = part.data()
    parts = [part.data() for _ in part.ranks] if part.rank == 0 else None
    return lambda: dist.gather(mine, parts, part.ranks[0], group=part.group)


def _scatter(part: GroupBuffers) -> GroupCall:
    out = part.data()
    parts = [part.data() for _ in part.ranks] if part.rank == 0 else None
    return lambda: dist.scatter(out, parts, part.ranks[0], group=part.group)


def _send_recv(part: GroupBuffers) -> GroupCall:
    """Each sends the whole size to the next rank and receives as much from the one before, at once."""
    ranks, rank, n = part.ranks, part.rank, len(part.ranks)
    x, out = part.whole(), part.whole()
    after, before = ranks[(rank + 1) % n], ranks[(rank - 1) % n]

    def run() -> None:
        sides = [dist.P2POp(dist.isend, x, after, part.group), dist.P2POp(dist.irecv, out, before, part.group)]
        for work in dist.batch_isend_irecv(sides):
            work.wait()

    return run


def _send(part: GroupBuffers) -> GroupCall:
    """One way, as between two pipeline stages."""
    x = part.whole()
    if part.rank == 0:
        return lambda: dist.send(x, part.ranks[1], group=part.group)
    return lambda: dist.recv(x, part.ranks[0], group=part.group)


MAKERS: dict[str, CallMaker] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
    "send": _send,
}

"""Orders of GPUs that follow their NVLinks, where these do not join each to each other one alike.

NCCL searches such orders too (src/graph/search.cc): rings that use no link beyond its bandwidth, as many as it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

GpuPair = tuple[int, int]

#: Steps after which a search is given up: enough for 16 GPUs with a few links each.
_MOST_STEPS = 20_000
#: First rings that are tried before the best of what followed is taken.
_MOST_FIRST = 64


def rings(gpus: tuple[int, ...], direct_Bps: Mapping[GpuPair, float]) -> tuple[tuple[int, ...], ...]:
    """Return rings through all of ``gpus``, each in both directions; none where links lead to no ring.

    If every ring has the bandwidth of the narrowest link, together they load no link beyond its bandwidth.
    ``direct_Bps``: bandwidth between GPUs that are joined, both ways round.

    >>> square = {(a, b): 1.0 for a, b in ((0, 1), (1, 3), (3, 2), (2, 0))}
    >>> rings((0, 1, 2, 3), square | {(b, a): 1.0 for a, b in square})
    ((0, 1, 3, 2), (2, 3, 1, 0))
    """
    unit = min(direct_Bps.values(), default=0.0)
    if len(gpus) < 3 or not unit:
        return ()
    free = {pair: int(Bps / unit + 1e-9) for pair, Bps in direct_Bps.items()}
    most = min(sum(free.get((a, b), 0) for b in gpus) for a in gpus) // 2
    best: list[tuple[int, ...]] = []
    for number, first in enumerate(_ways(gpus, gpus[0], gpus[0], free)):
        rings_so_far, left = [first], _without(free, first)
        while (ring := next(_ways(gpus, gpus[0], gpus[0], left), None)) is not None:
            rings_so_far, left = [*rings_so_far, ring], _without(left, ring)
        best = max(best, rings_so_far, key=len)
        if len(best) == most or number == _MOST_FIRST:
            break
    return tuple([way for ring in best for way in (ring, ring[::-1])])


def path(gpus: tuple[int, ...], first: int, last: int, direct_Bps: Mapping[GpuPair, float]) -> tuple[int, ...] | None:
    """Return a way along links from ``first`` through all others to ``last``, by the wider ones first."""
    unit = min(direct_Bps.values(), default=1.0)
    return next(_ways(gpus, first, last, {pair: int(Bps / unit + 1e-9) for pair, Bps in direct_Bps.items()}), None)


def _ways(gpus: tuple[int, ...], first: int, last: int, free: Mapping[GpuPair, int]) -> Iterator[tuple[int, ...]]:
    """Yield ways from ``first`` through all GPUs to ``last``, or back to ``first`` where they are the same.

    The first ways are over the links with most to spare."""
    steps = 0
    waiting: list[tuple[int, ...]] = [(first,)]
    while waiting and steps < _MOST_STEPS:
        way = waiting.pop()
        steps += 1
        if len(way) == len(gpus):
            if way[-1] == last or (first == last and free.get((way[-1], first), 0)):
                yield way
            continue
        ends_here = first != last and len(way) < len(gpus) - 1
        onward = [
            gpu for gpu in gpus if gpu not in way and free.get((way[-1], gpu), 0) and not (ends_here and gpu == last)
        ]
        waiting += [(*way, gpu) for gpu in sorted(onward, key=lambda gpu: (free[way[-1], gpu], -gpu))]


def _without(free: Mapping[GpuPair, int], ring: tuple[int, ...]) -> dict[GpuPair, int]:
    """Return what a ring that goes both ways leaves of links."""
    left = dict(free)
    for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
        left[a, b] -= 1
        left[b, a] -= 1
    return left

"""Collectives as messages, rank by rank: what the algorithms of `simulator.network` are held against. Written from the
papers, and knowing nothing of flows."""

from __future__ import annotations

from tests.support.replay import Part, Script


def ring_reduce_scatter(n: int, size: float, script: Script | None = None) -> Script:
    """In step s rank i adds what it has of part i - s to the next one's; it ends with all of part i + 1."""
    script = script or Script()
    for s in range(n - 1):
        script.step((i, (i + 1) % n, [(i - s) % n], size / n, True) for i in range(n))
    return script


def ring_all_gather(n: int, size: float, script: Script | None = None) -> Script:
    """In step s rank i hands on part i + 1 - s."""
    script = script or Script()
    for s in range(n - 1):
        script.step((i, (i + 1) % n, [(i + 1 - s) % n], size / n, False) for i in range(n))
    return script


def ring_all_reduce(n: int, size: float) -> Script:
    return ring_all_gather(n, size, ring_reduce_scatter(n, size))


def chain_broadcast(n: int, size: float, chunks: int) -> Script:
    script = Script()
    for chunk in range(chunks):
        for i in range(n - 1):
            script.step([(i, i + 1, [chunk], size / chunks, False)])
    return script


def chain_reduce(n: int, size: float, chunks: int) -> Script:
    script = Script()
    for chunk in range(chunks):
        for i in range(n - 1, 0, -1):
            script.step([(i, i - 1, [chunk], size / chunks, True)])
    return script


def direct_reduce_scatter(n: int, size: float, script: Script | None = None) -> Script:
    script = script or Script()
    script.step((i, (i + d) % n, [(i + d) % n], size / n, True) for d in range(1, n) for i in range(n))
    return script


def direct_all_gather(n: int, size: float, script: Script | None = None) -> Script:
    script = script or Script()
    script.step((i, (i + d) % n, [i], size / n, False) for d in range(1, n) for i in range(n))
    return script


def direct_all_reduce(n: int, size: float) -> Script:
    return direct_all_gather(n, size, direct_reduce_scatter(n, size))


def pairwise_all_to_all(n: int, size: float) -> Script:
    script = Script()
    script.step((i, (i + d) % n, [(i, (i + d) % n)], size / n, False) for d in range(1, n) for i in range(n))
    return script


def send_recv(n: int, size: float) -> Script:
    script = Script()
    script.step((i, (i + 1) % n, [i], size, False) for i in range(n))
    return script


def halving_doubling_all_reduce(n: int, size: float) -> Script:
    p = 1
    while 2 * p <= n:
        p *= 2
    extra = n - p
    every = range(p)
    real = [2 * i if i < extra else i + extra for i in every]
    script = Script()
    script.step((2 * i + 1, 2 * i, every, size, True) for i in range(extra))
    mine = {i: set(every) for i in every}
    distance = 1
    while distance < p:
        keeps = {i: {part for part in mine[i] if (part & distance) == (i & distance)} for i in every}
        gives = {i: sorted(mine[i] - keeps[i]) for i in every}
        script.step((real[i], real[i ^ distance], gives[i], size * len(gives[i]) / p, True) for i in every)
        mine, distance = keeps, 2 * distance
    while distance > 1:
        distance //= 2
        script.step((real[i], real[i ^ distance], sorted(mine[i]), size * len(mine[i]) / p, False) for i in every)
        mine = {i: mine[i] | mine[i ^ distance] for i in every}
    script.step((2 * i, 2 * i + 1, every, size, False) for i in range(extra))
    return script


def bruck_all_gather(n: int, size: float) -> Script:
    script, have = Script(), 1
    while have < n:
        count = min(have, n - have)
        script.step((i, (i - have) % n, [(i + k) % n for k in range(count)], size * count / n, False) for i in range(n))
        have += count
    return script


def pat_all_gather(n: int, size: float) -> Script:
    """A part goes on to ranks before its own, farthest first: what rank i sends d ranks back is of rank i + s, for all
    s whose steps so far were longer than d, and that has not been there."""
    script = Script()
    for d in [1 << k for k in reversed(range((n - 1).bit_length()))]:
        offsets = [s for s in range(n - d) if s % (2 * d) == 0]
        script.step((i, (i - d) % n, [(i + s) % n for s in offsets], size * len(offsets) / n, False) for i in range(n))
    return script


def pat_reduce_scatter(n: int, size: float) -> Script:
    """The same backwards."""
    script = Script()
    for message in reversed(pat_all_gather(n, size).messages):
        script.messages.append(message._replace(sender=message.receiver, receiver=message.sender, adds=True, after=()))
    forward, script = script.messages, Script()
    for start in range(0, len(forward), n):
        script.step((m.sender, m.receiver, m.parts, m.nbytes, m.adds) for m in forward[start : start + n])
    return script


def bruck_all_to_all(n: int, size: float) -> Script:
    script, bit = Script(), 1
    at = {(i, j): i for i in range(n) for j in range(n)}
    while bit < n:
        moving: dict[int, list[Part]] = {}
        for (i, j), place in at.items():
            if (j - i) % n & bit:
                moving.setdefault(place, []).append((i, j))
        script.step((i, (i + bit) % n, parts, size * len(parts) / n, False) for i, parts in sorted(moving.items()))
        for i, parts in moving.items():
            for part in parts:
                at[part] = (i + bit) % n
        bit *= 2
    return script


def binomial(n: int, size: float, kind: str) -> Script:
    """broadcast, reduce, scatter or gather: rank i's parent is i without its lowest set bit."""
    script = Script()
    bits = [1 << k for k in range(n.bit_length()) if 1 << k < n]
    towards_root = kind in ("reduce", "gather")
    for bit in bits if towards_root else reversed(bits):
        pairs = [(i - bit, i) for i in range(n) if i & bit and not i & (bit - 1)]
        messages = []
        for parent, child in pairs:
            below = range(child, min(child + bit, n))
            whole = kind in ("broadcast", "reduce")
            ends = (child, parent) if towards_root else (parent, child)
            messages.append(
                (*ends, [0] if whole else below, size if whole else size * len(below) / n, kind == "reduce")
            )
        script.step(messages)
    return script


def linear(n: int, size: float, kind: str) -> Script:
    script = Script()
    whole = kind in ("broadcast", "reduce")
    for i in range(1, n):
        ends = (i, 0) if kind in ("reduce", "gather") else (0, i)
        script.step([(*ends, [0] if whole else [i], size if whole else size / n, kind == "reduce")])
    return script


def tree_all_reduce(parents: list[list[int]], size: float, chunks: int) -> Script:
    """Chunks go up each tree, added up on the way, and down again; every tree has its own part of the message."""
    script = Script()
    for chunk in range(chunks):
        for number, of in enumerate(parents):
            part, nbytes = (number, chunk), size / len(parents) / chunks
            order = sorted(range(len(of)), key=lambda node: -_depth(of, node))
            for node in order:
                if of[node] >= 0:
                    script.step([(node, of[node], [part], nbytes, True)])
            for node in reversed(order):
                if of[node] >= 0:
                    script.step([(of[node], node, [part], nbytes, False)])
    return script


def _depth(of: list[int], node: int) -> int:
    depth = 0
    while of[node] >= 0:
        node, depth = of[node], depth + 1
    return depth


def nvls_all_reduce(n: int, size: float, chunks: int) -> Script:
    """Of each head's part, chunk by chunk: all GPUs to the switch, the sum to the head, back, and on to all."""
    script = Script()
    for chunk in range(chunks):
        for head in range(n):
            part, nbytes = (head, chunk), size / n / chunks
            script.step((i, ("sum", head), [part], nbytes, True) for i in range(n))
            script.step([(("sum", head), head, [part], nbytes, False)])
            script.step([(head, ("copy", head), [part], nbytes, False)])
            script.step((("copy", head), i, [part], nbytes, False) for i in range(n))
    return script


def hierarchical_all_reduce(nodes: int, gpus: int, size: float) -> Script:
    """Rank (node, place). Parts (place, node): those of one place travel along its rail."""
    script = Script()

    def part(place: int) -> list[Part]:
        return [(place % gpus, number) for number in range(nodes)]

    every = [(node, place) for node in range(nodes) for place in range(gpus)]
    for s in range(gpus - 1):
        script.step(((a, i), (a, (i + 1) % gpus), part(i - s), size / gpus, True) for a, i in every)
    each = size / gpus / nodes
    for s in range(nodes - 1):
        script.step(((a, i), ((a + 1) % nodes, i), [((i + 1) % gpus, (a - s) % nodes)], each, True) for a, i in every)
    for s in range(nodes - 1):
        script.step(
            ((a, i), ((a + 1) % nodes, i), [((i + 1) % gpus, (a + 1 - s) % nodes)], each, False) for a, i in every
        )
    for s in range(gpus - 1):
        script.step(((a, i), (a, (i + 1) % gpus), part(i + 1 - s), size / gpus, False) for a, i in every)
    return script


def rail_all_to_all(nodes: int, gpus: int, size: float) -> Script:
    """Rank (node, place). Parts are pairs of ranks: first to the place of the receiver, then to its node."""
    script = Script()
    every = [(node, place) for node in range(nodes) for place in range(gpus)]
    script.step(
        (
            (a, i),
            (a, (i + d) % gpus),
            [((a, i), (b, (i + d) % gpus)) for b in range(nodes)],
            size / gpus,
            False,
        )
        for d in range(1, gpus)
        for a, i in every
    )
    script.step(
        (
            (a, i),
            ((a + d) % nodes, i),
            [((a, j), ((a + d) % nodes, i)) for j in range(gpus)],
            size / nodes,
            False,
        )
        for d in range(1, nodes)
        for a, i in every
    )
    return script

"""Requests to the allocator: by hand, and played in C as in Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from simulator.analysis.training.memory_requests import FREED, MemoryRequests, MostBytes, RequestSequences
from simulator.engine.engines import engine_in_use
from simulator.units import KiB, MiB

BOTH = [False, pytest.param(True, marks=pytest.mark.skipif(engine_in_use() == "python", reason="needs a C compiler"))]


def requests_of(sequences: RequestSequences, *ranks: list[tuple[int, int]]) -> MemoryRequests:
    """Return the requests of ranks: of each, numbers of sequences and the slots that are their slots 0."""
    order = np.array([row for rank in ranks for row in rank], dtype=np.int64).reshape(-1, 2).T
    n_slots = 1 + sum(slot + sequences.arrays[number][:, 0].max(initial=0) for rank in ranks for number, slot in rank)
    return MemoryRequests(sequences, order, np.cumsum([0, *map(len, ranks)]), int(n_slots))


@pytest.mark.parametrize("compiled", BOTH)
def test_a_sequence_comes_again_in_other_slots(compiled: bool) -> None:
    """Twice 60 MiB are in use at once, in two segments; a third such tensor takes the block of the first.

    The next rank begins with nothing: its 60 MiB are one segment, and the third rank has none.
    """
    sequences = RequestSequences()
    take, give_back = sequences.tensors((60.0 * MiB,)), sequences.describe(FREED)
    requests = requests_of(sequences, [(take, 0), (take, 1), (give_back, 0), (take, 2)], [(take, 3)], [])
    assert requests.in_order(0) == [(0, 60 * MiB), (1, 60 * MiB), (0, 0), (2, 60 * MiB)]
    assert requests.in_order(1) == [(3, 60 * MiB)]
    most = [MostBytes(120 * MiB, 120 * MiB), MostBytes(60 * MiB, 60 * MiB), MostBytes(0, 0)]
    assert requests.most_bytes([math.inf] * 3, compiled=compiled) == most


def test_equal_tensors_are_one_sequence() -> None:
    """A tensor of 513 bytes takes two times 512, as one of 1,024 does, but sizes are told apart as they are given."""
    sequences = RequestSequences()
    numbers = [sequences.tensors(sizes) for sizes in ((513.0, 1.0), (1024.0,), (513.0, 1.0), ())]
    assert numbers == [0, 1, 0, 2]
    assert [one.tolist() for one in sequences.arrays] == [[[0, 1024], [1, 512]], [[0, 1024]], []]


def some_requests(seed: int) -> MemoryRequests:
    """Return requests of tensors of every kind of segment: two sequences, each of which comes a few hundred times.

    Of the two ranks the first has the begin of those of the second.
    """
    chosen, sequences = random.Random(seed), RequestSequences()
    sizes = [100, 70 * KiB, 1 * MiB, 1 * MiB + 1, 3 * MiB, 10 * MiB, 11 * MiB, 64 * MiB + 7]
    shapes = [[float(chosen.choice(sizes)) for _ in range(chosen.randint(1, 9))] for _ in range(2)]
    take = [sequences.tensors(tuple(shape)) for shape in shapes]
    orders = [chosen.sample(range(len(shape)), len(shape)) for shape in shapes]
    give_back = [sequences.describe(np.array([(slot, 0) for slot in order], dtype=np.int64)) for order in orders]
    alive: list[tuple[int, int]] = []
    order, n_slots = [], 0
    for _ in range(600):
        if alive and chosen.random() < 0.49:
            which, slot = alive.pop(chosen.randrange(len(alive)))
            order.append((give_back[which], slot))
        else:
            which = chosen.randrange(2)
            alive.append((which, n_slots))
            order.append((take[which], n_slots))
            n_slots += len(shapes[which])
    return requests_of(sequences, order[:200], order)


@pytest.mark.skipif(engine_in_use() == "python", reason="needs a C compiler")
@pytest.mark.parametrize("seed", range(8))
def test_the_allocator_in_c_hands_out_the_same_blocks(seed: int) -> None:
    """Most bytes are equal to the last one, with room for all and where free segments go back to CUDA.

    The limits are below what is reserved without any, so that segments do go back.
    """
    requests = some_requests(seed)
    _, most = requests.most_bytes([math.inf] * 2, compiled=False)
    for limit in (math.inf, 0.9 * most.reserved, 0.6 * most.reserved):
        limits = [0.5 * limit, limit]
        assert requests.most_bytes(limits, compiled=True) == requests.most_bytes(limits, compiled=False)

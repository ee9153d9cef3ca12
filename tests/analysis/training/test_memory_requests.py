"""Requests to the allocator: by hand, and played in C as in Python."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from simulator.analysis.training.caching_allocator import rounded
from simulator.analysis.training.memory_requests import MemoryRequests, MostBytes, RequestSequences
from simulator.analysis.training.part_requests import request
from simulator.engine.engines import engine_in_use
from simulator.units import KiB, MiB

BOTH = [False, pytest.param(True, marks=pytest.mark.skipif(engine_in_use() == "python", reason="needs a C compiler"))]


@pytest.mark.parametrize("compiled", BOTH)
def test_a_sequence_comes_again_in_other_slots(compiled: bool) -> None:
    """Twice 60 MiB are in use at once, in two segments; a third such tensor takes the block of the first."""
    sequences = RequestSequences()
    take, give_back = sequences.describe(request(60 * MiB)), sequences.describe(request(0))
    requests = MemoryRequests(sequences)
    first, second, third = (requests.new_slots(1) for _ in range(3))
    for number, slot in ((take, first), (take, second), (give_back, first), (take, third)):
        requests.add(number, slot)
    assert requests.in_order() == [(first, 60 * MiB), (second, 60 * MiB), (first, 0), (third, 60 * MiB)]
    assert requests.most_bytes(math.inf, compiled=compiled) == MostBytes(120 * MiB, 120 * MiB)


@pytest.mark.parametrize("compiled", BOTH)
def test_nothing_is_asked_for(compiled: bool) -> None:
    assert MemoryRequests(RequestSequences()).most_bytes(math.inf, compiled=compiled) == MostBytes(0, 0)


def some_requests(seed: int) -> MemoryRequests:
    """Return requests of tensors of every kind of segment: two sequences, each of which comes a few hundred times."""
    chosen, sequences = random.Random(seed), RequestSequences()
    sizes = [100, 70 * KiB, 1 * MiB, 1 * MiB + 1, 3 * MiB, 10 * MiB, 11 * MiB, 64 * MiB + 7]
    shapes = [[rounded(chosen.choice(sizes)) for _ in range(chosen.randint(1, 9))] for _ in range(2)]
    take = [sequences.describe(np.array([*enumerate(shape)], dtype=np.int64)) for shape in shapes]
    orders = [chosen.sample(range(len(shape)), len(shape)) for shape in shapes]
    give_back = [sequences.describe(np.array([(slot, 0) for slot in order], dtype=np.int64)) for order in orders]
    alive: list[tuple[int, int]] = []
    requests = MemoryRequests(sequences)
    for _ in range(600):
        if alive and chosen.random() < 0.49:
            which, slot = alive.pop(chosen.randrange(len(alive)))
            requests.add(give_back[which], slot)
        else:
            which = chosen.randrange(2)
            alive.append((which, requests.new_slots(len(shapes[which]))))
            requests.add(take[which], alive[-1][1])
    return requests


@pytest.mark.skipif(engine_in_use() == "python", reason="needs a C compiler")
@pytest.mark.parametrize("seed", range(8))
def test_the_allocator_in_c_hands_out_the_same_blocks(seed: int) -> None:
    """Most bytes are equal to the last one, with room for all and where free segments go back to CUDA.

    The limits are below what is reserved without any, so that segments do go back.
    """
    requests = some_requests(seed)
    most = requests.most_bytes(math.inf, compiled=False)
    for limit in (math.inf, 0.9 * most.reserved, 0.6 * most.reserved):
        assert requests.most_bytes(limit, compiled=True) == requests.most_bytes(limit, compiled=False)

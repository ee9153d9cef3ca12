"""PyTorch's caching allocator: its rules, one by one, and what they do to a step."""

from __future__ import annotations

import pytest

from simulator.analysis.training.caching_allocator import CachingAllocator, rounded, segment_bytes
from simulator.units import KiB, MiB


@pytest.mark.parametrize(("nbytes", "takes"), [(1, 512), (512, 512), (513, 1024), (3 * MiB + 1, 3 * MiB + 512)])
def test_tensors_take_multiples_of_512_bytes(nbytes: int, takes: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(nbytes)
    assert allocator.allocated == rounded(nbytes) == takes


@pytest.mark.parametrize(
    ("size", "taken"),
    [
        (512, 2 * MiB),
        (1 * MiB, 2 * MiB),
        (1 * MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (100 * MiB, 100 * MiB),
    ],
)
def test_segments_of_small_medium_and_large_requests(size: int, taken: int) -> None:
    """c10/cuda/CUDACachingAllocator.cpp, get_allocation_size: kSmallBuffer, kLargeBuffer, kRoundLarge."""
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved == segment_bytes(size) == taken


def test_small_requests_share_segments_and_large_ones_do_not_use_them() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(512 * KiB) for _ in range(4)]
    assert allocator.reserved == 2 * MiB
    for block in blocks:
        allocator.free(block)
    allocator.malloc(1 * MiB)  # the four have joined
    assert allocator.reserved == 2 * MiB
    allocator.malloc(1 * MiB + 512)
    assert allocator.reserved == 22 * MiB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    for block in [allocator.malloc(size * MiB) for size in (60, 20, 40)]:
        allocator.free(block)
    assert allocator.malloc(30 * MiB).size == 30 * MiB  # of the 40
    assert allocator.malloc(20 * MiB).size == 20 * MiB
    assert allocator.malloc(10 * MiB).size == 10 * MiB  # what was left of the 40
    assert allocator.malloc(60 * MiB).size == 60 * MiB
    assert allocator.reserved == 120 * MiB


def test_what_is_left_of_a_large_block_is_split_off_above_a_megabyte() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MiB))
    whole = allocator.malloc(19 * MiB)  # a remainder of exactly 1 MiB stays with it
    assert whole.size == allocator.allocated == 20 * MiB
    allocator.free(whole)
    assert allocator.malloc(19 * MiB - 512).size == 19 * MiB - 512


def test_pieces_of_different_segments_never_join() -> None:
    """Sixty tensors of 20 MiB give back 1,200 MiB, and one of 1,000 MiB still needs a segment of its own."""
    allocator = CachingAllocator()
    for block in [allocator.malloc(20 * MiB) for _ in range(60)]:
        allocator.free(block)
    allocator.malloc(1000 * MiB)
    assert allocator.reserved == 2200 * MiB
    assert allocator.most_allocated == 1200 * MiB


def test_near_the_limit_free_segments_are_given_back() -> None:
    allocator = CachingAllocator(limit=1500 * MiB)
    blocks = [allocator.malloc(20 * MiB) for _ in range(60)]
    for block in blocks[1:]:
        allocator.free(block)
    allocator.malloc(1000 * MiB)
    assert allocator.reserved == 1020 * MiB
    assert allocator.most_reserved == 1200 * MiB


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_kept_account_of(seed: int) -> None:
    """Any order of requests: what is allocated is the sum of what lives, never more than what is reserved, and all of
    it comes back as whole segments."""
    import random

    chosen = random.Random(seed)
    allocator, alive = CachingAllocator(), []
    for _ in range(400):
        if alive and chosen.random() < 0.45:
            allocator.free(alive.pop(chosen.randrange(len(alive))))
        else:
            alive.append(allocator.malloc(chosen.choice([100, 70 * KiB, 3 * MiB, 11 * MiB, 64 * MiB])))
        assert allocator.allocated == sum(block.size for block in alive) <= allocator.reserved
        assert allocator.most_reserved >= allocator.reserved
    for block in alive:
        allocator.free(block)
    allocator.limit = 0.0
    allocator.malloc(512 * MiB)
    assert allocator.reserved == 512 * MiB


def test_no_tensor_has_less_than_no_bytes() -> None:
    with pytest.raises(ValueError, match="a tensor of -1 bytes"):
        CachingAllocator().malloc(-1)

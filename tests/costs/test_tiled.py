"""Kernels of tiles other than attention: their price is arithmetic on what attention reaches over one tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.costs.interference import SmLoad
from simulator.errors import InputError
from simulator.program import Attention, Tiled
from tests.support.profiles import COSTS, PROFILE

GPU = "h100-sxm-80gb"
SPEC, MODEL = PROFILE[GPU].gpu_spec, PROFILE[GPU].kernels.attention
#: Pieces of 256 tokens, with products as wide as a head of 64: products take it longer than its bytes.
SCAN = Tiled(flops=4e12, read_bytes=2e9, write_bytes=1e9, chunk=256, width=64, launches=5)


def products_s(kernel: Tiled) -> float:
    """Return the seconds at the speed of attention whose every query sees the ``chunk`` keys of a piece.

    Attention's share of the peak is limit * keys / (keys + half length), at a head as wide as the products.
    """
    curve = (MODEL.backward if kernel.backward else MODEL.forward)[kernel.width]
    share = curve.limit * kernel.chunk / (kernel.chunk + curve.half_length)
    return kernel.flops / (SPEC.peak_flops_per_s[kernel.dtype].value * share)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("chunk", "width"), [(256, 64), (64, 128)])
def test_products_are_as_fast_as_attention_over_a_piece(chunk: int, width: int, backward: bool) -> None:
    """Five kernels start one behind another, and their products take the SMs as blocks of attention do."""
    kernel = replace(SCAN, chunk=chunk, width=width, backward=backward)
    expected_s = 5 * MODEL.start_s.value + products_s(kernel)
    assert COSTS[GPU].kernel_s(kernel, GPU) == pytest.approx(expected_s, rel=1e-12)


def test_bytes_bound_where_there_are_few_products() -> None:
    """Reads and writes are 3e9 bytes, at the bandwidth of the data sheet; a hundredth of the products hides behind."""
    few = replace(SCAN, flops=SCAN.flops / 100)
    bytes_s = 3e9 / SPEC.memory_bandwidth_Bps.value
    assert products_s(few) < bytes_s < products_s(SCAN)
    expected_s = 5 * MODEL.start_s.value + bytes_s
    assert COSTS[GPU].kernel_s(few, GPU) == pytest.approx(expected_s, rel=1e-12)


def test_twice_the_products_of_a_piece_take_twice_as_long_behind_the_starts() -> None:
    """How many pieces there are, and so how many FLOPs, says nothing of the speed inside a piece."""
    starts_s = 5 * MODEL.start_s.value
    once_s, twice_s = (COSTS[GPU].kernel_s(replace(SCAN, flops=n * SCAN.flops), GPU) - starts_s for n in (1, 2))
    assert twice_s == pytest.approx(2 * once_s, rel=1e-12)


def test_beside_communication_it_has_the_sms_that_this_leaves() -> None:
    """Collectives hold n of N SMs. Products have the others, and the speed (N - n) / N of before.

    Of the memory's bandwidth a kernel of tiles leaves what attention leaves.
    """
    beside = COSTS[GPU].interference
    assert beside is not None
    held = PROFILE[GPU].interference.sms.collective
    long = replace(SCAN, flops=1e6 * SCAN.flops)  # beside which its starts are nothing
    speed = beside.speed(long, SmLoad(moves=True, by="collective"))
    assert speed == pytest.approx(1 - held / SPEC.sms, rel=1e-6)
    assert beside.leaves(long) == beside.leaves(Attention(1, 1, 1, 256, 256, 64))


def test_a_type_that_the_gpu_does_not_multiply_is_refused() -> None:
    """An A100 has no products in 8 bits."""
    with pytest.raises(InputError, match="has no matrix units for it"):
        COSTS["a100-sxm-80gb"].kernel_s(replace(SCAN, dtype="fp8"), "a100-sxm-80gb")

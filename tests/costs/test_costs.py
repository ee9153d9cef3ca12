"""Costs of kernels: closed forms, bounds of the hardware, and how a profile file is read."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.config.profile import check_attention, load_profile, load_profiles
from simulator.config.training import Training
from simulator.costs import Costs
from simulator.costs.attention import around_bytes
from simulator.costs.matmul import MatmulCost, Products
from simulator.costs.memory import MemoryCost, slices
from simulator.errors import InputError
from simulator.frameworks import DEFAULT, pytorch
from simulator.hardware.kernels import RowCurve
from simulator.program import Attention, GroupedMatmul, Matmul, Memory
from tests.support.profiles import COSTS, PROFILE, PROFILES

SIZES = st.integers(1, 20_000)
#: Training with the attention kernel of PyTorch's older releases.
FLASH2 = Training(seq=1, global_batch=1, attention_kernel="flash2")

#: What a GPU trains in: a V100 has no bf16.
DTYPE = {name: "bf16" if "bf16" in profile.gpu_spec.peak_flops_per_s else "fp16" for name, profile in PROFILE.items()}


@pytest.mark.parametrize("name", PROFILES)
@given(m=SIZES, n=SIZES, k=SIZES, batch=st.integers(1, 64), role=st.sampled_from(["fwd", "dgrad", "wgrad"]))
@settings(max_examples=10, deadline=None)
def test_no_product_beats_the_peak_flops_or_the_peak_bandwidth(name, m, n, k, batch, role):
    kernel = Matmul(m, n, k, batch=batch, dtype=DTYPE[name], role=role)
    spec = PROFILE[name].gpu_spec
    seconds = COSTS[name].kernel_s(kernel, name)
    assert seconds > kernel.flops / spec.peak_flops_per_s[DTYPE[name]].value
    assert seconds > kernel.bytes / spec.memory_bandwidth_Bps.value


@pytest.mark.parametrize("name", PROFILES)
@given(
    heads=st.integers(1, 96),
    length=st.integers(1, 20_000),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    causal=st.booleans(),
    backward=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_no_attention_beats_the_peak_flops_or_the_peak_bandwidth(name, heads, length, head_dim, causal, backward):
    kernel = Attention(1, heads, heads, length, length, head_dim, dtype=DTYPE[name], causal=causal, backward=backward)
    spec = PROFILE[name].gpu_spec
    seconds = COSTS[name].kernel_s(kernel, name)
    assert seconds > kernel.flops / spec.peak_flops_per_s[DTYPE[name]].value
    assert seconds > kernel.bytes / spec.memory_bandwidth_Bps.value


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("axis", ["m", "n", "k", "batch"])
def test_a_product_of_twice_the_size_never_costs_less(name, axis):
    """Twice a size is twice the work for each tile shape. A library's choice of tile may improve with the size, by no
    more than what its preference for large tiles had cost before: (largest / smallest tile)^preference, 1.2 at most."""
    model = PROFILE[name].kernels.matmul
    areas = [math.prod(int(side) for side in tile.split("x")) for tile in model.tile_efficiency]
    slack = (max(areas) / min(areas)) ** model.large_tile_preference
    for size in (128, 1000, 2048, 6144):
        base = {"m": size, "n": 1536, "k": 2048, "batch": 2, "dtype": DTYPE[name]}
        small, large = Matmul(**base), Matmul(**(base | {axis: 2 * base[axis]}))
        assert COSTS[name].kernel_s(large, name) > COSTS[name].kernel_s(small, name) / slack


@pytest.mark.parametrize("name", PROFILES)
def test_a_large_product_meets_the_power_limit(name):
    """For m = n = k growing, tiles fill their waves and memory vanishes: the burst rate tends to peak * efficiency, and
    the lasting rate to (burst^-p + limit^-p)^(-1/p), below both."""
    model, spec = PROFILE[name].kernels.matmul, PROFILE[name].gpu_spec
    best = max(model.tile_efficiency.values())
    burst = spec.peak_flops_per_s[DTYPE[name]].value * best * model.layout_speed[DTYPE[name]]["fwd"].value
    limit, p = model.sustained_flops_per_s[DTYPE[name]].value, model.power_exponent
    expected = (burst**-p + limit**-p) ** (-1 / p)
    kernel = Matmul(65536, 65536, 65536, dtype=DTYPE[name])
    assert kernel.flops / COSTS[name].kernel_s(kernel, name) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", PROFILES)
def test_one_more_tile_than_the_sms_costs_a_whole_wave(name):
    """With one kind of tile, no slices of k and endless bandwidth: as many tiles as SMs fill one wave, one tile more
    begins another."""
    spec, model = PROFILE[name].gpu_spec, PROFILE[name].kernels.matmul
    endless = replace(spec.memory_bandwidth_Bps, value=1e30)
    cost = MatmulCost(
        replace(spec, memory_bandwidth_Bps=endless),
        replace(
            model,
            tile_efficiency={"256x128": 0.9},
            grouped=replace(model.grouped, tiles=("256x128",)),
            min_k_per_split=1e9,
        ),
    )
    for waves in (1, 2, 5):
        kernels = [Matmul(256 * n, 128, 4096, dtype=DTYPE[name]) for n in (waves * spec.sms, waves * spec.sms + 1)]
        full, more = cost.burst_seconds(Products.from_kernels(kernels))
        assert (more - model.start_s) / (full - model.start_s) == pytest.approx((waves + 1) / waves)


@pytest.mark.parametrize("name", PROFILES)
def test_a_batch_of_products_costs_as_many_tiles_in_one_launch(name):
    """b products in one kernel share waves and one start: more than one kernel, less than b of them."""
    costs = COSTS[name]
    single = costs.kernel_s(Matmul(2048, 2048, 128, dtype=DTYPE[name]), name)
    for batch in (2, 12, 96, 512):
        together = costs.kernel_s(Matmul(2048, 2048, 128, batch=batch, dtype=DTYPE[name]), name)
        assert single < together < batch * single


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize(
    "software", [pytorch.FRAMEWORK, DEFAULT, pytorch.COMPILED], ids=["pytorch", "megatron", "compiled"]
)
def test_memory_kernels_are_a_start_and_bytes_at_the_share_of_their_class_or_time_per_element(name, software):
    """Fused and compiled kernels where the profile has some, PyTorch's own elsewhere."""
    profile = PROFILE[name]
    costs = Costs.from_profile(profile, software)
    for op, own in profile.kernels.memory.eager.items():
        curve = own if software is pytorch.FRAMEWORK else profile.kernels.memory.fused.get(op, own)
        for nbytes in (0.0, 1e3, 1e6, 1e9):
            seconds = costs.kernel_s(Memory(op, 0.75 * nbytes, 0.25 * nbytes), name)
            bandwidth = curve.share * profile.gpu_spec.memory_bandwidth_Bps.value
            found_s = (curve.element_s or 0.0) * 0.25 * nbytes / 2  # of bf16
            assert seconds == pytest.approx(curve.start_s + max(nbytes / bandwidth, found_s))


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k", "measured_s"),
    [(2, 1024, 1024, 2048, 30.2e-6), (4, 512, 1024, 1408, 24.6e-6), (8, 256, 1024, 1024, 21.1e-6)],
)
def test_small_groups_begin_at_once_and_have_the_tile_that_their_kernel_is_made_for(groups, rows, n, k, measured_s):
    """Grouped products of an H200 (calibration/measurements, one-gpu-grouped): one wave of large tiles, though smaller
    ones would fill the GPU; with 128 rows a group small ones are taken."""
    costs = COSTS["h200-sxm-141gb"]
    assert costs.kernel_s(GroupedMatmul((rows,) * groups, n, k), costs.gpu) == pytest.approx(measured_s, rel=0.1)
    large, small = (costs.kernel_s(GroupedMatmul((rows,) * 2, 1024, 8192), costs.gpu) for rows in (129, 128))
    assert small < 0.7 * large


def test_products_with_a_weight_per_row_take_as_long_as_there_are_elements_to_write():
    """On an H200 8,192 x 4 rows of 1,024: 85.6 us from as many rows, 87.5 from one per token, whose bytes are fewer
    (calibration/measurements, `choices_weigh` and `choices_weigh_bwd`); and their sum 38.4 us."""
    costs, row = COSTS["h200-sxm-141gb"], 8192 * 1024 * 2.0
    for read, measured_s in ((4 * row, 85.6e-6), (row, 87.5e-6)):
        assert costs.kernel_s(Memory("weigh", read, 4 * row), costs.gpu) == pytest.approx(measured_s, rel=0.04)
    assert costs.kernel_s(Memory("combine", 4 * row, row), costs.gpu) == pytest.approx(38.4e-6, rel=0.05)


def test_kernels_that_look_for_their_operands_are_not_bound_by_memory():
    """An H200's sums of two rows a token reach 0.3 of the bandwidth, of eight 0.65 as their class: beside communication
    the first lose their part of the SMs and leave it the memory. On a GPU with fewer SMs each element takes longer."""
    profile = PROFILE["h200-sxm-141gb"]
    costs, row = COSTS["h200-sxm-141gb"], 8192 * 4096 * 2.0
    memory = costs.kernels[Memory]
    few, many = Memory("combine", 2 * row, row), Memory("combine", 8 * row, row)
    assert memory.share(few) == pytest.approx(0.3, abs=0.02)
    assert memory.share(many) == profile.kernels.memory.eager["combine"].share
    assert costs.interference.leaves(few) == math.inf
    assert costs.interference.leaves(many) == profile.interference.leaves.other
    h20, h100 = (PROFILE[name] for name in ("h20-sxm-96gb", "h100-sxm-80gb"))
    slower = h20.kernels.memory.eager["combine"].element_s / h100.kernels.memory.eager["combine"].element_s
    assert slower == pytest.approx(132 / h20.gpu_spec.sms)


@pytest.mark.parametrize(("sms", "per_sm"), [(108, 2048), (132, 2048), (142, 1536), (40, 1024)])
@pytest.mark.parametrize("width", [128, 1024, 4096, 12288, 131072])
def test_sums_over_columns_are_sliced_as_pytorch_does(sms, per_sm, width):
    """A thread is never left with more than 256 values; where rows are cut none has fewer than 16 but for the last one,
    unless it has more than 256 otherwise; blocks (a 128th of the width each) of 128 threads fill the GPU at most about
    once more; all rows are added. Below 1024 rows (4 threads of 256 values) nothing is cut."""
    across, at_once = width // 128, sms * per_sm // 128
    for rows in (64, 512, 1020, 1024, 5000, 32768, 10**6):
        number, values = slices(rows, width, sms * per_sm)
        assert number * values * 4 >= rows > (number * values - number) * 4 - 4
        assert number == 1 or values >= 16
        assert number == 1 or rows >= 1024
        if across <= at_once and rows >= 1024:
            assert values <= 256 or number == 1
            assert (number - 1) * across < at_once or values > 128
    assert slices(1020, width, sms * per_sm)[0] == 1
    assert slices(48, width, sms * per_sm) == (1, 48)


def test_rows_are_cut_only_where_blocks_across_leave_room() -> None:
    """1,024 threads are 8 blocks. 4,096 rows leave each of 4 threads 1,024 values. 1,024 columns are 8 blocks across:
    rows are cut so that a thread has at most 256 values. One block across more, and nothing is cut; one less, and the 2
    slices that fill the GPU are no more than those 4."""
    assert slices(4096, 1024, 1024) == (4, 256)
    assert slices(4096, 1025, 1024) == (1, 1024)
    assert slices(4096, 1024 - 128, 1024) == (4, 256)


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "h200-sxm-141gb"])
@pytest.mark.parametrize("width", [1024, 4096])
def test_a_sum_over_columns_adds_values_and_slices_to_its_bytes(name, width):
    """1020 rows leave each thread 255 values of one slice, so that 1024 rows, in 16 slices of 16, take less though they
    are more: by 239 values less 15 slices, and the bytes of 4 rows more."""
    spec, curve = PROFILE[name].gpu_spec, PROFILE[name].kernels.memory.eager["reduce"]
    costs = Costs.from_profile(PROFILE[name], pytorch.FRAMEWORK)
    few, more = (costs.kernel_s(Memory("reduce", 2.0 * rows * width, 0, width=width), name) for rows in (1020, 1024))
    moved = 2.0 * 4 * width / (curve.share * spec.memory_bandwidth_Bps.value)
    assert few - more == pytest.approx(239 * curve.columns.value_s - 15 * curve.columns.slice_s - moved)
    assert few > more


@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_around_the_backward_kernel_go_those_that_memory_bounds(kv_heads):
    """Per row of a head, of 128: output and its gradient read, 2 x 2 bytes; an fp32 gradient of the queries cleared,
    read, and written as bf16, 4 + 4 + 2. Where 8 heads share keys, gradients of keys and values of all of them read and
    those of each group written, 2 x 2 bytes. Flash attention itself is longer by that, forward it is not."""
    kernel = Attention(2, 8, kv_heads, 512, 512, 128, backward=True)
    shared = 2 * 512 * 128 * 4 * (8 + kv_heads) if kv_heads < 8 else 0
    assert around_bytes(kernel) == 2 * 512 * 8 * 128 * (4 + 10) + shared
    profile = PROFILE["h200-sxm-141gb"]
    around = profile.kernels.attention.around
    without = replace(profile.kernels.attention, around=None)
    whole = replace(profile.kernels, attention=without)
    alone = Costs.from_profile(replace(profile, kernels=whole))
    longer = COSTS[profile.name].kernel_s(kernel, profile.gpu) - alone.kernel_s(kernel, profile.gpu)
    bandwidth = around.share * profile.gpu_spec.memory_bandwidth_Bps.value
    assert longer == pytest.approx(around.start_s + around_bytes(kernel) / bandwidth)
    forward = Attention(2, 8, kv_heads, 512, 512, 128)
    assert COSTS[profile.name].kernel_s(forward, profile.gpu) == alone.kernel_s(forward, profile.gpu)


@pytest.mark.parametrize(("head_dim", "forward_s"), [(32, 0.35e-12), (64, 0.35e-12), (96, 0.427e-12), (128, 0.504e-12)])
def test_a_bias_costs_a_time_for_each_score(head_dim: int, forward_s: float) -> None:
    """Long sequences, whose last blocks do not count: so many seconds for each of 8 x 32 x 8,192 x 8,192 scores, and
    half way between measured head dimensions for one half way between."""
    costs = COSTS["h200-sxm-141gb"]
    plain = Attention(8, 32, 32, 8192, 8192, head_dim, causal=False)
    longer_s = costs.kernel_s(replace(plain, bias=True), "h200-sxm-141gb") - costs.kernel_s(plain, "h200-sxm-141gb")
    assert longer_s / (8 * 32 * 8192 * 8192) == pytest.approx(forward_s, rel=0.01)


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200-sxm-141gb", "h100-sxm-96gb-500w"])
@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_flash_attention_2_is_slower_than_newer_kernels_on_hopper(gpu: str, length: int) -> None:
    """cuDNN's are 1.7 to 2.3 times faster "for training shapes" there (huggingface/transformers, pull 48163)."""
    newest, older = (
        Costs.from_profiles(load_profiles({gpu: gpu}, training), pytorch.FRAMEWORK)
        for training in (Training(seq=1, global_batch=1), FLASH2)
    )
    for backward in (False, True):
        kernel = Attention(32768 // length, 16, 16, length, length, 128, backward=backward)
        ratio = older.kernel_s(kernel, gpu) / newest.kernel_s(kernel, gpu)
        assert 1.45 < ratio < 2.3
    # An A100's is FlashAttention 2's anyway.
    (profile,) = load_profiles({"a100-sxm-80gb": "a100-sxm-80gb"}, FLASH2).values()
    assert profile == load_profile("a100-sxm-80gb")


@pytest.mark.parametrize(("backward", "share"), [(False, 0.37), (True, 0.25)])
def test_attention_of_2022_in_triton_takes_what_its_own_test_allows(backward, share):
    """4 x 48 heads of 64 and 4,096 tokens under a causal mask are two products of 4 x 48 x 4096^2 x 64 FLOPs. The
    backward pass has 2.5 times as many. An A100 reaches 37 and 25 % of 312 TFLOP/s (release 2.0 of Triton,
    python/test/regression/test_performance.py). On an H100 it is half of the share, as FlashAttention 2's is."""
    kernel = Attention(4, 48, 48, 4096, 4096, 64, dtype="fp16", backward=backward)
    flops = 2 * 4 * 48 * 4096**2 * 64 * (2.5 if backward else 1)
    for gpu, peak in (("a100-sxm-80gb", 312e12), ("h100-sxm-80gb", 989.4e12 / 2)):
        profile = load_profiles({gpu: gpu}, Training(seq=1, global_batch=1, attention_kernel="triton"))[gpu]
        assert Costs.from_profile(profile).kernel_s(kernel, gpu) == pytest.approx(flops / (share * peak), rel=0.01)


@pytest.mark.parametrize("older", ["flash2", "triton"])
@pytest.mark.parametrize("name", [name for name, profile in PROFILE.items() if profile.kernels.attention_triton])
@pytest.mark.parametrize("extra", [{}, {"dropout": True}, {"bias": True, "causal": False}])
def test_an_older_kernel_of_attention_is_never_faster(older, name, extra):
    """What is added to the scores, or dropped of them, costs both the same. The sequences are as long as those that all
    newest kernels were fitted to: a B200's to 4,096 tokens and more."""
    asked = Training(seq=1, global_batch=1, attention_kernel=older)
    costs = Costs.from_profile(load_profiles({name: name}, asked)[name])
    for length, backward in itertools.product((4096, 8192, 32768), (False, True)):
        kernel = Attention(4, 32, 8, length, length, 128, dtype=DTYPE[name], backward=backward, **extra)
        assert costs.kernel_s(kernel, name) >= COSTS[name].kernel_s(kernel, name)


def test_attention_that_a_profile_lacks_is_refused():
    profile = load_profile("a100-sxm-80gb")
    profile = replace(profile, kernels=replace(profile.kernels, attention_triton=None))
    with pytest.raises(InputError, match=r"no kernels\.attention_triton") as caught:
        check_attention(profile, "triton")
    assert caught.value.key == "training.attention_kernel"
    check_attention(profile, "flash2")  # its newest


@pytest.mark.parametrize("name", PROFILES)
def test_a_causal_mask_halves_long_attention(name):
    """Half the pairs, and at great length the same share of the peak."""
    full, causal = (
        COSTS[name].kernel_s(Attention(1, 32, 32, 131072, 131072, 128, dtype=DTYPE[name], causal=causal), name)
        for causal in (False, True)
    )
    assert full / causal == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("backward", [False, True])
def test_few_heads_leave_sms_idle(name, backward):
    """As long as there are fewer blocks than SMs more heads cost little, what memory bounds of the kernels around
    backward ones; many heads cost what they compute."""
    costs = COSTS[name]
    few, double = (
        costs.kernel_s(Attention(1, h, h, 1024, 1024, 128, dtype=DTYPE[name], backward=backward), name) for h in (4, 8)
    )
    assert double == pytest.approx(few, rel=0.08)
    many, twice = (
        costs.kernel_s(Attention(1, h, h, 4096, 4096, 128, dtype=DTYPE[name], backward=backward), name)
        for h in (128, 256)
    )
    assert twice == pytest.approx(2 * many, rel=0.05)


def test_lasting_products_reproduce_the_published_speeds():
    """A100, fp16, random data, TFLOP/s: three products of Azure's benchmarking guide, five of EleutherAI's cookbook."""
    published = {
        (8192, 8192, 8192): 253.7,
        (16384, 16384, 16384): 256.5,
        (6144, 12288, 12288): 250.8,
        (8192, 12288, 4096): 241.6,
        (8192, 4096, 4096): 234.9,
        (8192, 16384, 4096): 241.1,
        (8192, 4096, 16384): 252.8,
        (8192, 51200, 4096): 255.4,
    }
    errors = []
    for (m, n, k), tflops in published.items():
        kernel = Matmul(m, n, k, dtype="fp16")
        errors.append(kernel.flops / COSTS["a100-sxm-80gb"].kernel_s(kernel, "a100-sxm-80gb") / 1e12 / tflops - 1)
    assert statistics.fmean(map(abs, errors)) < 0.03
    assert max(abs(error) for error in errors) < 0.07


def test_rows_between_two_measured_widths_have_the_share_between_theirs() -> None:
    """Linear in the logarithm: 2,048 is halfway from 1,024 to 4,096, and the share halfway from 0.4 to 0.8.

    The start is halfway from 1 us to 3 us. 1,024 to 1,024 * sqrt(2) is a quarter of the way. Narrower and wider rows
    are as the nearest.
    """
    spec = load_profile("a100-sxm-80gb").gpu_spec
    by_width = {1024: RowCurve(share=0.4, start_s=1e-6), 4096: RowCurve(share=0.8, start_s=3e-6)}
    curve = replace(load_profile("a100-sxm-80gb").kernels.memory.eager["norm"], by_width=by_width, element_s=None)
    cost = MemoryCost(spec, {"norm": curve})
    rows = {512: (0.4, 1.0), 1024: (0.4, 1.0), 1448: (0.5, 1.5), 2048: (0.6, 2.0), 4096: (0.8, 3.0), 8192: (0.8, 3.0)}
    for width, (share, start_us) in rows.items():
        kernel = Memory("norm", 1e8, 0.0, width=width)
        assert cost.share(kernel) == pytest.approx(share, rel=1e-3)
        assert cost.seconds(kernel) - cost.moving_s(kernel) == pytest.approx(start_us * 1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("head_dim", "limit"), [(32, 0.64), (64, 0.64), (80, 0.6625), (96, 0.685), (128, 0.73), (256, 0.73)]
)
def test_attention_between_two_measured_heads_has_the_share_between_theirs(head_dim: int, limit: float) -> None:
    """An A100 reaches 0.64 of its peak with heads of 64 and 0.73 with those of 128, both half of it over 125 keys.
    Others between are on the line from one to the other; narrower and wider ones are as the nearest."""
    attention, length = COSTS["a100-sxm-80gb"].kernels[Attention], 4096
    kernel = Attention(1, 16, 16, length, length, head_dim, causal=False)
    expected_s = kernel.flops / (312e12 * limit) * (length + 125) / length
    assert attention.busy_s(kernel) == pytest.approx(expected_s, rel=1e-9)

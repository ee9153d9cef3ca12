"""What communication takes from kernels beside it, and costs that are none of a profile."""

import pytest

from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.interference import SmLoad, without
from simulator.errors import InputError
from simulator.frameworks import DEFAULT, pytorch
from simulator.hardware.profile import Profile
from simulator.program import Attention, Collective, Fixed, Matmul, Memory, PointToPoint
from tests.support.profiles import COSTS, PROFILE, changed


def test_ideal_costs_are_what_kernels_say_on_perfect_links():
    costs = Costs.ideal()
    assert costs.kernel_s(Fixed(3.0), "any") == 3.0
    assert costs.launched_s({"forward_other": 1}) == 0
    assert costs.reachable_Bps("nvlink", 1e9) == 1e9
    assert costs.interference is None
    assert costs.origin(Fixed(1.0)).kind == "exact"
    with pytest.raises(TypeError, match="Matmul"):
        costs.kernel_s(Matmul(1, 1, 1), "any")


def test_communication_takes_sms_from_products_and_attention_and_bandwidth_from_the_rest():
    beside = COSTS["h100-sxm-80gb"].interference
    assert beside is not None
    assert beside.load([], []) is None
    reduce, gather = (Collective("", op, 1.0, "dp", "dp") for op in ("all_reduce", "all_gather"))
    send, recv = (PointToPoint("", op, 1.0, "pp", "pp", peer=0) for op in ("send", "recv"))
    load, p2p = beside.load([], [reduce]), beside.load([recv], [send])
    assert load == beside.load([gather], [reduce, send]) == beside.load([gather], [send])
    attention = Attention(2, 32, 32, 4096, 4096, 128)
    assert beside.speed(attention, load) < beside.speed(attention, p2p) < 1  # sends and receives hold fewer SMs
    for kernel in (Matmul(8192, 8192, 8192), Attention(2, 32, 32, 4096, 4096, 128), Memory("norm", 1e8, 1e8)):
        assert 0.5 < beside.speed(kernel, load) < 0.9
        assert beside.speed(kernel, None) == 1
    assert beside.speed(Fixed(1.0), load) == 1
    assert COSTS["a40-48gb"].interference is None


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200-sxm-141gb"])
def test_streams_that_sms_bound_lose_their_part_of_the_sms(gpu: str) -> None:
    """NCCL holds n of N SMs. Kernels of halves of rows and of biases, whose loads are not vectors, and rotations of
    plain PyTorch reach 0.3 to 0.55 of the bandwidth with all SMs: with N - n of them (N - n) / N of that, and less of
    it where bytes move; sums, activations and GELU have enough with those, as have the rotations of fused kernels."""
    profile = load_profile(gpu)
    held = profile.interference.sms
    for load, sms, speeds in (
        (SmLoad(False, "p2p"), held.p2p, profile.interference.waiting_speed),
        (SmLoad(True, "p2p"), held.p2p, profile.interference.memory_speed),
        (SmLoad(True, "collective"), held.collective, profile.interference.memory_speed),
    ):
        left = 1 - sms / profile.gpu_spec.sms
        assert left < 0.9
        eager, fused = (Costs.from_profile(profile, of).interference for of in (pytorch.FRAMEWORK, DEFAULT))
        assert eager is not None
        assert fused is not None
        for op in ("strided", "bias", "rope"):
            assert eager.speed(Memory(op, 1e8, 1e8), load) == pytest.approx(speeds.other * left)
        for op in ("residual", "activation", "gelu", "copy"):
            assert eager.speed(Memory(op, 1e8, 1e8), load) == speeds.other
        assert fused.speed(Memory("rope", 1e8, 1e8), load) == speeds.other
        assert eager.speed(Memory("norm", 1e8, 1e8, width=4096), load) == speeds.norm


@pytest.mark.parametrize(("lost", "left"), [(0, 132), (24, 108), (130, 2), (131, 1), (132, 1), (500, 1)])
def test_a_gpu_without_some_sms_has_as_much_less_of_its_peak(lost: int, left: int) -> None:
    """An H100 has 132, of which one is always left. Memory's bandwidth stays."""
    spec = PROFILE["h100-sxm-80gb"].gpu_spec
    fewer = without(spec, lost)
    assert fewer.sms == left
    for dtype, peak in spec.peak_flops_per_s.items():
        assert fewer.peak_flops_per_s[dtype].value == pytest.approx(peak.value * left / 132)
    assert fewer.memory_bandwidth_Bps == spec.memory_bandwidth_Bps


@pytest.mark.parametrize("key", ["sms.collective", "sms.p2p", "matmul_sms"])
@pytest.mark.parametrize("more", [0, 5000])
def test_communication_leaves_kernels_an_sm(key: str, more: int) -> None:
    """Of an H100's 132; one less is a profile."""
    data = as_data(PROFILE["h100-sxm-80gb"])
    sms = data["gpu_spec"]["sms"]
    validated(Profile, changed(data, f"interference.{key}", sms - 1), "mine.yaml")
    with pytest.raises(InputError, match="as many SMs") as caught:
        validated(Profile, changed(data, f"interference.{key}", sms + more), "mine.yaml")
    assert caught.value.key == f"interference.{key}"
    assert caught.value.found == sms + more


@pytest.mark.parametrize(("collective", "p2p"), [(0, 0), (0, 1), (0, 14), (24, 0), (24, 14), (14, 24)])
def test_sends_alone_cannot_hold_sms(collective: int, p2p: int) -> None:
    """Collectives that hold none are not known, and nothing is taken from kernels: sends that held some would count for
    nothing."""
    data = as_data(load_profile("h200-sxm-141gb"), nulls=False)
    data["interference"]["sms"] = {"collective": collective, "p2p": p2p}
    if collective == 0 < p2p:
        with pytest.raises(InputError, match="where collectives hold none") as caught:
            validated(Profile, data, "mine.yaml")
        error = caught.value
        assert (error.file, error.key, error.found) == ("mine.yaml", "interference.sms.p2p", p2p)
        return
    beside = Costs.from_profile(validated(Profile, data, "mine.yaml")).interference
    assert (beside is None) == (collective == 0)


def test_costs_of_one_gpu_are_refused_on_another():
    with pytest.raises(InputError, match="another GPU"):
        COSTS["a100-sxm-80gb"].kernel_s(Fixed(1.0), "h100-sxm-80gb")


def test_a_precision_that_the_gpu_lacks_is_refused():
    with pytest.raises(InputError, match="a100-sxm-80gb") as caught:
        COSTS["a100-sxm-80gb"].kernel_s(Matmul(64, 64, 64, dtype="fp8"), "a100-sxm-80gb")
    assert caught.value.found == "fp8"

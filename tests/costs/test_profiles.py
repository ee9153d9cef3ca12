"""Files of profiles: origin of their figures, reading back, what is refused."""

import math
import re

import pytest
import yaml

from simulator.config import catalog
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.interference import SmLoad
from simulator.errors import InputError
from simulator.hardware.profile import Profile
from simulator.input_files import read_yaml
from simulator.program import Attention, GroupedMatmul, Matmul, Memory
from tests.support.grids import one_in
from tests.support.profiles import COSTS, PROFILE, PROFILES, changed


def test_origin_says_what_was_fitted_and_what_was_not():
    costs = COSTS["a100-sxm-80gb"]
    assert not costs.origin(Matmul(2048, 4608, 12288)).extrapolated
    assert not costs.origin(Matmul(2048, 4608, 12288, dtype="fp16")).extrapolated
    assert costs.origin(Matmul(2048, 4608, 12288, dtype="fp32")).extrapolated
    assert costs.origin(Matmul(2048, 4608, 12288, dtype="fp32")).beyond == math.inf
    assert costs.origin(Matmul(4 * 8192, 4608, 12288)).beyond == 4
    assert costs.origin(Matmul(2048, 2048, 128, batch=12)).beyond == 12
    assert costs.origin(Attention(1, 12, 12, 2048, 2048, 128)).beyond == 1
    assert costs.origin(Attention(1, 12, 12, 2048, 2048, 96)).beyond == 1.5
    assert costs.origin(Attention(1, 12, 12, 32768, 32768, 128)).beyond == 2
    assert costs.origin(Memory("rope", 1e6, 1e6)).kind == "assumed"
    assert "Azure" in costs.origin(Memory("copy", 1e6, 1e6)).source


@pytest.mark.parametrize(("role", "beyond"), [("fwd", 4), ("dgrad", 4), ("wgrad", 2)])
def test_origin_of_grouped_products_adds_up_tokens_where_the_role_has_them(role: str, beyond: float) -> None:
    """Measured are m up to 8,192, and n and k up to 65,536. Two groups have 32,768 tokens, and weights of 16,384 x 128.
    Forward and for inputs m is the tokens, four times as many. For weights m is 16,384, twice as many, and k the
    tokens."""
    kernel = GroupedMatmul((30000, 2768), 16384, 128, role=role)
    assert COSTS["a100-sxm-80gb"].kernels[GroupedMatmul].origin(kernel).beyond == beyond


def test_costs_are_equal_whatever_was_asked_of_them() -> None:
    """Prices and speeds are kept between questions; what is kept makes no difference."""
    profile, kernel = PROFILE["h100-sxm-80gb"], Matmul(8192, 8192, 8192)
    asked, other = Costs.from_profile(profile), Costs.from_profile(profile)
    asked.kernel_s(kernel, asked.gpu)
    assert asked.interference is not None
    assert asked.interference.speed(kernel, SmLoad(True, "collective")) < 1
    assert asked == other


# The file


@pytest.mark.parametrize("name", one_in(3, PROFILES))
def test_a_profile_survives_a_round_trip(name, tmp_path):
    profile = PROFILE[name]
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(as_data(profile), sort_keys=False))
    assert load_profile(path) == profile


@pytest.mark.parametrize("name", PROFILES)
def test_a_shipped_profile_is_named_by_its_gpu_and_cites_every_figure(name):
    profile = PROFILE[name]
    assert profile.name == profile.gpu == name
    text = (catalog.FOLDERS["profile"] / f"{name}.yaml").read_text()
    defined = {source for source in profile.sources if re.search(rf"(?m)^ +{source}:", text)}
    for source in defined - {profile.like}:  # once, and used as a source or in a note
        assert len(re.findall(rf"\b{source}\b", text)) > 1
    assert all(figure.note for _, figure in profile.cited() if figure.kind == "assumed")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gpu_spec.clock", 1.4e9, "unknown key"),
        ("kernels.matmul.wave_start_s", -1e-6, "out of range"),
        ("kernels.matmul.start_s", "fast", "must be a number"),
        ("kernels.matmul.memory_fraction", 1.5, "out of range"),
        ("kernels.matmul.power_exponent", math.nan, "finite"),
        ("kernels.matmul.tile_efficiency", {}, "at least one tile"),
        ("kernels.matmul.tile_efficiency", {"big": 0.9}, "no size of a tile"),
        ("kernels.matmul.fitted_range.bf16", {"m": [1, 2]}, "lacks n, k, batch"),
        ("kernels.attention.forward", {}, "at least one head dimension"),
        ("kernels.memory.eager.copy.source", "hearsay", "not one of the file's sources"),
        ("transports.nvlink.source", "hearsay", "not one of the file's sources"),
        ("kernels.memory.eager.copy.kind", "guessed", "known values"),
        ("host.launch_s.eager.optimizer_s", True, "must be a number"),
        ("host.launch_s", {}, "lacks eager, megatron, torchtitan"),
        ("interference.memory_speed", {}, "required key"),
        ("schema_version", 2, "known values"),
        ("date", "today", "is no date"),
    ],
)
def test_a_wrong_profile_is_refused_with_its_key(key, value, says):
    path = catalog.FOLDERS["profile"] / "a100-sxm-80gb.yaml"
    data = changed(read_yaml(path), key, value)
    with pytest.raises(InputError, match=says) as caught:
        validated(Profile, data, path)
    assert key in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_precision_without_a_power_limit_is_refused():
    path = catalog.FOLDERS["profile"] / "h100-sxm-80gb.yaml"
    data = read_yaml(path)
    del data["kernels"]["matmul"]["sustained_flops_per_s"]["fp8"]
    with pytest.raises(InputError, match="lacks fp8"):
        validated(Profile, data, path)

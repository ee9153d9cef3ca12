"""Models whose layers are of several kinds: with fewer layers, and in frameworks that lack some."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.config.presets import presets
from simulator.errors import InputError, each

#: Models with a pattern, but for those whose last layers attend to keys of layers before.
PATTERNED = [name for name, keys in presets().items() if {"mixers", "mlps"} & keys.keys() and "reused_keys" not in keys]


def job(preset: str, **changes: Any) -> Workload:
    """A job of so few sizes that a preset is all that it says."""
    training = {"seq": 512, "global_batch": 8}
    data = {"model": {"preset": preset, **changes}, "training": training, "cluster": {"name": "dgx_h100", "nodes": 1}}
    return load_workload(data)


@pytest.mark.parametrize("preset", PATTERNED)
def test_fewer_layers_are_the_models_first_ones(preset: str) -> None:
    """Three layers are shorter than each of the patterns but those of two; the kinds are those of the whole model."""
    whole, short = job(preset).model, job(preset, layers=3).model
    assert [short.alike(layer) for layer in range(3)] == [whole.alike(layer) for layer in range(3)]


def test_a_pattern_of_the_file_itself_is_not_cut() -> None:
    with pytest.raises(InputError, match="says more than the model's 2 layers"):
        job("gemma3-1b", layers=2, mixers=["window", "window", "attention"])


def test_layers_that_reuse_keys_are_as_many_as_may() -> None:
    """The kinds of 8 layers are five windows, attention, two windows. Two windows at the end have a lender before them;
    attention, the third from the end, is the only one of its kind. What is proposed loads."""
    with pytest.raises(InputError) as caught:
        job("gemma-4-e4b", layers=8)
    assert caught.value.key == "model.reused_keys.layers"
    assert (caught.value.allowed, caught.value.fix) == ("at most 2", "reused_keys: {layers: 2}")
    assert job("gemma-4-e4b", layers=8, reused_keys={"layers": 2}).model.layers == 8
    with pytest.raises(InputError, match=r"allowed: no model\.reused_keys"):
        job("gemma-4-e4b", layers=1)


def test_dense_layers_at_the_beginning_leave_one_for_experts() -> None:
    """DeepSeek-V3 has three: of two layers one may be dense."""
    with pytest.raises(InputError, match="leaves none of the 2 layers for experts") as caught:
        job("deepseek-v3", layers=2)
    assert caught.value.fix == "first_dense_layers: 1"
    assert job("deepseek-v3", layers=2, moe={"first_dense_layers": 1}).model.mlp(1) == "moe"


def test_what_a_framework_lacks_in_several_keys_is_said_once() -> None:
    """Gemma 4's E4B has six keys that torchtitan's layers lack, all for one reason."""
    with pytest.raises(InputError) as caught:
        load_workload("llama3_8b_dgx_h100", {"model": {"preset": "gemma-4-e4b"}, "framework": "torchtitan"})
    alike = [error for error in each(caught.value)[0] if "all of one kind" in error.message]
    assert [error.key for error in alike] == ["model"]
    assert "norm_place: 'both'" in str(alike[0])
    assert "norm_place: 'before'" in str(alike[0])
    assert "deepspeed" in str(alike[0].fix)


def test_kinds_of_layers_are_named_in_their_order() -> None:
    with pytest.raises(InputError, match="layers of kind shared_key and compressed_sparse and heavily_compressed"):
        job("deepseek-v4-flash", shared_key=None)

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
        job("gemma-4-e4b", layers=8, reused_keys={"layers": 3})
    assert caught.value.key == "model.reused_keys.layers"
    assert (caught.value.allowed, caught.value.fix) == ("at most 2", "reused_keys: {layers: 2}")
    assert job("gemma-4-e4b", layers=8, reused_keys={"layers": 2}).model.layers == 8
    with pytest.raises(InputError, match=r"fix: +reused_keys: null"):
        job("gemma-4-e4b", layers=1, reused_keys={"layers": 1})
    assert job("gemma-4-e4b", layers=1, reused_keys=None).model.reused_keys is None


@pytest.mark.parametrize(("layers", "reusing"), [(1, 0), (3, 0), (24, 0), (25, 1), (41, 17), (42, 18)])
def test_the_last_layers_are_those_that_reuse_keys(layers: int, reusing: int) -> None:
    """The last 18 of Gemma 4's 42 layers: of the first 25 it is one."""
    model = job("gemma-4-e4b", layers=layers).model
    assert sum(map(model.reuses_keys, range(layers))) == reusing


@pytest.mark.parametrize("preset", ["deepseek-v3", "glm4.5-355b-a32b"])
def test_first_layers_without_experts_are_a_dense_model(preset: str) -> None:
    """Three layers of each are dense. A pattern of the file itself may give them experts."""
    assert job(preset, layers=3).model.moe is None
    assert job(preset, layers=4).model.mlp(3) == "moe"
    assert job("nemotron3-nano-30b-a3b", layers=1).model.moe is None
    assert job("nemotron3-nano-30b-a3b", layers=1, mlps=["moe"]).model.mlp(0) == "moe"


def test_dense_layers_at_the_beginning_leave_one_for_experts() -> None:
    """One of two layers may be dense: the other has the experts."""
    with pytest.raises(InputError, match="leaves none of the 2 layers for experts") as caught:
        job("deepseek-v3", layers=2, moe={"first_dense_layers": 2})
    assert caught.value.fix == "moe: {first_dense_layers: 1}"
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

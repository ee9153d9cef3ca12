"""Shipped models: every weight can be frozen, and adapters are as wide as the products beside which they stand."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import Workload, load_workload, presets
from simulator.models import embedding, head, layer, trained_parameters
from simulator.models.tuning import is_of_kinds

#: Kinds that adapters freeze.
EVERYTHING = ("embedding", "head", "norms", "layers")


def preset(name: str, *, adapted: tuple[str, ...] = ()) -> Workload:
    """Return a job of a preset on one GPU, with adapters of rank 16 beside ``adapted`` products."""
    training: dict[str, Any] = {"seq": 2048, "global_batch": 1}
    if adapted:
        training["adapters"] = {"rank": 16, "targets": list(adapted)}
    return load_workload(
        {"model": {"preset": name}, "training": training, "parallelism": {"dp": 1}, "cluster": "one_gpu"}
    )


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_weight_is_of_a_kind_that_can_be_frozen(name: str) -> None:
    job = preset(name)
    parts = [embedding(job), *[layer(job, number=number) for number in range(job.model.layers)], head(job)]
    weights = {weight.name: weight for part in parts for weight in part.weights}
    assert [name for name, weight in weights.items() if not is_of_kinds(weight, EVERYTHING)] == []


@pytest.mark.parametrize(
    ("name", "targets", "trained"),
    [
        # 48 layers with one shared expert of 512 each: A has 16 x 2,048 or 16 x 512, B the other side. The product with
        # one column that weighs the shared expert is no target.
        ("qwen3-next-80b-a3b", ("gate", "up", "down"), 48 * 3 * 16 * (2048 + 512)),
        # Attention in every fourth layer, 16 heads of 256. The gate of its output comes with the queries.
        (
            "qwen3-next-80b-a3b",
            ("q", "k", "v", "o"),
            12 * 16 * (2048 + 2 * 4096 + 2 * (2048 + 2 * 256) + 4096 + 2048),
        ),
        # 42 layers. What adds the inputs of layers has a gate too, of another name in transformers: no target.
        ("gemma-4-e4b", ("gate", "up", "down"), 42 * 3 * 16 * (2560 + 10240)),
    ],
)
def test_adapters_are_as_wide_as_the_products_of_their_names(name: str, targets: tuple[str, ...], trained: int) -> None:
    assert trained_parameters(preset(name, adapted=targets)) == trained


def test_where_keys_are_values_too_nothing_is_beside_values() -> None:
    """Layers of whole attention have no product for values; 25 of 30 have a window, with 8 heads of 256 for values."""
    whole, windows = 5, 25
    expected = windows * 16 * (2816 + 8 * 256)
    assert whole + windows == preset("gemma-4-26b-a4b").model.layers
    assert trained_parameters(preset("gemma-4-26b-a4b", adapted=("v",))) == expected

"""Adapters beside the linear layers of captured modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.capturing.entry import capture_made
from simulator.errors import InputError
from simulator.models import parameters, trained_parameters
from simulator.program import Matmul
from tests.support.captured_modules import ROWS, WIDTH, Tiny, captured, kernels, workload

ADAPTERS = {"rank": 4, "targets": ["qkv"]}


def test_adapters_are_trained_beside_frozen_layers(tmp_path: Path) -> None:
    # A of 64 x 4 and B of 4 x 192 elements in each of two layers. A layer keeps what it kept, but for the context and
    # the norm's output that gradients of the out layer's weight need, and x A beside: 4 columns.
    model = captured(Tiny(), adapters=ADAPTERS)
    job = workload(model, tmp_path)
    assert trained_parameters(job) == 2 * 4 * (WIDTH + 3 * WIDTH)
    assert parameters(job) == captured(Tiny()).parameters + trained_parameters(job)
    products = [one for one in kernels(model, Matmul) if one.role == "wgrad"]
    assert {(one.m, one.n, one.k) for one in products} == {(4, WIDTH, ROWS), (3 * WIDTH, 4, ROWS)}
    for layout in ({"dp": 4}, {"dp": 4, "zero": 3}, {"pp": 2}):
        assert simulator.run(workload(model, tmp_path, parallelism=layout)).to_dict()["memory"]["fits"]
    with pytest.raises(InputError, match="adapters are not split"):
        workload(model, tmp_path, parallelism={"tp": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "adapters.rank"),
        ({"rank": 2.5}, "adapters.rank"),
        ({"targets": []}, "adapters.targets"),
        ({"targets": 5}, "adapters.targets"),
        ({"dtype": ["bf16"]}, "adapters.dtype"),
        ({"targets": ["qvk"]}, r"is the name of no linear layer[\s\S]*fix: +qkv"),
        ({"targets": ["norm"]}, "is the name of no linear layer"),
        ({"dtype": "int8"}, "adapters.dtype"),
        ({"dropout": 1}, "adapters.dropout"),
        ({"alpha": 16}, "adapters.alpha: unknown key"),
    ],
)
def test_adapters_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        captured(Tiny(), adapters={**ADAPTERS, **change})


def test_adapters_of_an_option_are_checked_before_the_function_runs() -> None:
    with pytest.raises(InputError, match="must be a whole number"):
        capture_made(lambda: pytest.fail("has run"), "m:f", {"adapters": {"rank": 99999, "targets": ["q"]}})
    with pytest.raises(InputError, match="must be a mapping"):
        capture_made(lambda: pytest.fail("has run"), "m:f", {"adapters": [16, "q"]})

"""The space of a search: arithmetic leaves out what no rule would allow, and nothing else."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from simulator.errors import InputError
from simulator.searching.dimensions import DIMENSIONS
from simulator.searching.space import LayoutSpace, SizeLimit, legal_values, whole_key
from tests.support.experts import job as experts_job
from tests.support.jobs import job
from tests.support.searches import space_on

KEYS = [one.key for one in DIMENSIONS]


def legal(space: LayoutSpace) -> list[dict[str, Any]]:
    layouts = []
    for changes in space.layouts():
        try:
            space.variants.variant(changes)
        except InputError:
            continue
        layouts.append(changes)
    return layouts


@pytest.mark.parametrize("workload", [job(training__global_batch=8), experts_job()], ids=["dense", "experts"])
def test_whatever_rules_allow_is_in_the_space(workload: dict[str, Any]) -> None:
    """All combinations of sizes, whether they make 4 ranks or not, against those that the space has."""
    several: dict[str, list[Any]] = {
        "tp": [1, 2, 3, 4], "cp": [1, 2], "pp": [1, 2, 4], "dp": [1, 2, 4], "ep": [1, 2], "etp": [1, 2],
        "micro_batch": [1, 2], "schedule": ["1f1b", "interleaved"], "vpp": [1, 2], "recompute": ["none"], "zero": [0],
        "sequence_parallel": [False],
    }  # fmt: skip
    space = space_on(4, workload, **several)
    everything = [dict(zip(KEYS, values, strict=True)) for values in product(*several.values())]
    allowed = []
    for changes in everything:
        ranks = changes["parallelism.tp"] * changes["parallelism.cp"] * changes["parallelism.pp"]
        if ranks * changes["parallelism.dp"] != 4:
            continue
        try:
            space.variants.variant(changes)
        except InputError:
            continue
        allowed.append(changes)
    assert len(allowed) > 10
    assert legal(space) == allowed


def test_usual_values_of_a_dense_job_on_four_gpus() -> None:
    """Four powers of two whose exponents add up to 2: 10 ways. Stages of 8 layers are even; pp > 1 has chunks."""
    layouts = legal(space_on(4, job(), recompute=["none"], zero=[0], micro_batch=[1]))
    sizes = {tuple(one[f"parallelism.{axis}"] for axis in ("tp", "cp", "pp", "dp")) for one in layouts}
    assert len(sizes) == 10
    assert all(tp * cp * pp * dp == 4 for tp, cp, pp, dp in sizes)
    chunks = {(one["parallelism.pp"], one["parallelism.vpp"]) for one in layouts}
    assert chunks == {(1, 1), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)}


@pytest.mark.parametrize(("batch", "interleaved"), [(16, {2, 4}), (12, set())])
def test_interleaved_rounds_and_zero_of_pipelines_are_usual_ones(batch: int, interleaved: set[int]) -> None:
    """Two ranks by four replicas, four by two: of 16 sequences 4 and 8 micro-batches each, of 12 only 3 and 6.

    Other values are tried where they are asked for.
    """
    workload = job(training={"seq": 128, "global_batch": batch})
    few: dict[str, Any] = {"tp": [1], "cp": [1], "micro_batch": [1], "recompute": ["none"]}
    layouts = legal(space_on(8, workload, **few))
    assert {one["parallelism.pp"] for one in layouts if one["parallelism.schedule"] == "interleaved"} == interleaved
    assert {one["parallelism.zero"] for one in layouts if one["parallelism.pp"] > 1} == {0, 1}
    asked = legal(space_on(8, workload, **few, pp=[2], zero=[2], schedule=["gpipe"]))
    assert {(one["parallelism.zero"], one["parallelism.schedule"]) for one in asked} == {(2, "gpipe")}


def test_limits_leave_out_values_of_numbers() -> None:
    space = space_on(4, job(), recompute=["none"], zero=[0])
    bounded = LayoutSpace(space.variants, 4, space.fixed, {"parallelism.tp": SizeLimit(2, 2)})
    assert {one["parallelism.tp"] for one in bounded.layouts()} == {2}


def test_another_key_may_have_values_too() -> None:
    space = space_on(2, job(), recompute=["none"], zero=[0], bucket_bytes=[1_000_000, 2_000_000])
    assert {one["parallelism.bucket_bytes"] for one in space.layouts()} == {1_000_000, 2_000_000}


@pytest.mark.parametrize(
    ("key", "default"), [("parallelism.tp", 1), ("parallelism.vpp", 1), ("training.recompute", "none")]
)
def test_null_is_the_default_of_a_key(key: str, default: object) -> None:
    """The key has one value, not two, where the default stands beside null."""
    variants = space_on(2, job()).variants
    assert legal_values(variants, key, [None, default]) == [default]


@pytest.mark.parametrize(
    ("name", "said"),
    [("tpp", "is no key of a layout"), ("training.seq", "changes the work"), ("model.layers", "is no key of a layout")],
)
def test_keys_that_are_none_are_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        whole_key(name, "--fix")

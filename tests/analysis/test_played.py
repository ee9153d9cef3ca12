"""What is said of a step does not turn on how it was played: folded or not, cut at every collective or not."""

from __future__ import annotations

from typing import Any

import pytest

import simulator

MODEL = {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000}
#: On H100s: collectives wait for SMs, and in pipelines more is coalesced on one stage than on another.
JOBS: dict[str, dict[str, Any]] = {
    "dp": {"training": {"seq": 2048, "global_batch": 64}, "parallelism": {"dp": 16}},
    "tp and pp": {"training": {"seq": 2048, "global_batch": 8}, "parallelism": {"tp": 2, "pp": 4}},
    "zero 2": {"training": {"seq": 2048, "global_batch": 32}, "parallelism": {"tp": 2, "dp": 8, "zero": 2}},
}


def reports(name: str, key: str) -> list[dict[str, Any]]:
    description = JOBS[name] | {"model": MODEL, "cluster": "dgx_h100"}
    return [simulator.run(description, set={f"simulation.{key}": on}).to_dict() for on in (True, False)]


@pytest.mark.parametrize("name", ["dp", "tp and pp", pytest.param("zero 2", marks=pytest.mark.slow)])
def test_the_critical_path_is_the_same(name: str) -> None:
    """A collective that waited for a kernel inside a span follows on it, and not on the one before."""
    quick, plain = (
        {row["class"]: row["seconds"] for row in report["critical_path"]} for report in reports(name, "coalesce")
    )
    assert quick == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_the_critical_path_crosses_from_stage_to_stage() -> None:
    """A receive is released by its sender, which looked for SMs first: nothing of the step is unexplained."""
    for report in reports("tp and pp", "coalesce"):
        classes = {row["class"]: row["share"] for row in report["critical_path"]}
        assert classes.get("waiting", 0.0) < 0.01
        assert sum(classes.values()) == pytest.approx(1)


@pytest.mark.parametrize("key", ["coalesce", pytest.param("fold", marks=pytest.mark.slow)])
def test_how_even_stages_are_is_the_same(key: str) -> None:
    """A pass lasts from its beginning to its end, also where its collectives are spans of their own."""
    quick, plain = (report["stages"] for report in reports("tp and pp", key))
    assert quick["layers_per_stage"] == plain["layers_per_stage"]
    for one, other in zip(quick["per_stage"], plain["per_stage"], strict=True):
        assert one["seconds"] == pytest.approx(other["seconds"], rel=1e-9)


@pytest.mark.parametrize("overrides", [[], [{"gpu": "node0.gpu1", "host_speed": 0.5}]])
def test_links_of_a_name_are_counted_alike(overrides: list[dict[str, Any]]) -> None:
    """Two nodes: links of GPUs and of cards are alike but for their names."""
    description = {
        "model": MODEL,
        "training": {"seq": 2048, "global_batch": 8},
        "parallelism": {"tp": 4, "pp": 2, "dp": 2},
        "cluster": {"name": "dgx_a100", "overrides": overrides},
    }
    counts = [
        {
            (purpose, row["links"]): row["count"]
            for purpose, found in simulator.run(description, set={"simulation.fold": fold})
            .to_dict()["communication"]
            .items()
            for row in found["links"]
        }
        for fold in (True, False)
    ]
    assert counts[0] == counts[1]


def test_no_split_is_proposed_where_hosts_hold_gpus_up() -> None:
    """The last of four stages waits for its host: with a layer less, the others do. So the layers stay."""
    description = {
        "model": MODEL | {"layers": 16},
        "training": {"seq": 512, "global_batch": 16},
        "framework": "pytorch",
        "parallelism": {"tp": 4, "pp": 4},
        "cluster": "dgx_h100",
    }
    report = simulator.run(description).to_dict()
    assert report["host_bound_fraction"] > 0.1
    assert report["stages"]["slowest_over_mean"] > 1.5
    assert report["stages"]["layers_per_stage"] is None
    moved = simulator.run(description, set={"parallelism.layers_per_stage": [4, 6, 6, 0]}).to_dict()
    assert moved["step_time_s"] > report["step_time_s"]

"""Splits of the layers that are proposed: by each layer's seconds on each stage, and only where a step is faster."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

import simulator
from simulator.analysis.training.stage_balance import stage_seconds
from simulator.analysis.training.stage_split import LayerSeconds, SimulatedSplit, better_split, most_even
from simulator.input_files import as_options
from simulator.output.summary import summary
from tests.support.jobs import FAST_HOSTS
from tests.support.terminal import printed

#: Hosts of all GPUs that hold up none.
FAST_OVERRIDES = [{"gpu": f"node{node}.gpu{gpu}", **FAST_HOSTS} for node in range(4) for gpu in range(8)]
#: 24 equal layers; the last two of four stages are on slower GPUs.
UNLIKE_GPUS = {
    "model": {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 32000},
    "training": {"seq": 2048, "global_batch": 32},
    "parallelism": {"pp": 4, "tp": 8},
    "cluster": {
        "name": "mix",
        "groups": [{"count": 2, "node": "dgx_h100"}, {"count": 2, "node": "dgx_a100"}],
        "overrides": FAST_OVERRIDES,
    },
}
#: 8 dense layers, then 8 with experts, of which each takes four times as long.
UNLIKE_LAYERS = {
    "model": {
        "layers": 16,
        "hidden": 2048,
        "heads": 16,
        "ffn_hidden": 8192,
        "vocab": 8192,
        "moe": {"experts": 8, "top_k": 4, "ffn_hidden": 8192, "first_dense_layers": 8},
    },
    "training": {"seq": 2048, "micro_batch": 4, "global_batch": 256},
    "parallelism": {"pp": 4},
    "cluster": {"name": "dgx_h100", "nodes": 1},
}


@pytest.mark.parametrize("seed", range(20))
def test_the_split_is_the_best_of_all(seed: int) -> None:
    """Compared with all splits of 9 layers over 4 stages of unlike speed: least seconds of the slowest stage, and of
    those the least sum of squares. Only the first and the last stage may be empty."""
    draw = np.random.default_rng(seed)
    seconds = LayerSeconds(
        draw.integers(1, 4, 9) * draw.uniform(1, 3, (4, 1)), np.array([draw.uniform(0, 9), 0, 0, draw.uniform(0, 9)])
    )
    bounds = combinations(range(10), 3)
    splits = [(first, second - first, third - second, 9 - third) for first, second, third in bounds]
    loads = [seconds.by_stage(split) for split in splits]
    best = min((round(load.max(), 9), round((load**2).sum(), 6)) for load in loads)
    load = seconds.by_stage(most_even(seconds))
    assert (round(load.max(), 9), round((load**2).sum(), 6)) == best


def test_too_few_layers_have_no_split() -> None:
    """One layer cannot lie on both of the inner stages of four."""
    assert most_even(LayerSeconds(np.ones((4, 1)), np.zeros(4))) == ()


@pytest.mark.parametrize(
    ("job", "step_s"), [(UNLIKE_GPUS, 0.459), (UNLIKE_LAYERS, 1.6632)], ids=["unlike GPUs", "unlike layers"]
)
def test_a_proposed_split_takes_the_seconds_that_are_printed(job: dict[str, Any], step_s: float) -> None:
    """Typed in, the split is legal and takes just so long, at most what [9, 8, 4, 3] and [8, 3, 3, 2] take by hand.
    What is proposed then is faster once more, or nothing."""
    result = simulator.run(job)
    stages = result.to_dict()["stages"]
    split = stages["layers_per_stage"]
    again = simulator.run(job, set={"parallelism.layers_per_stage": split}).to_dict()
    assert again["step_time_s"] == pytest.approx(stages["step_time_s"], rel=1e-9)
    assert again["step_time_s"] <= step_s
    further = again["stages"]
    assert further["layers_per_stage"] is None or further["step_time_s"] < 0.99 * again["step_time_s"]
    assert f"with layers_per_stage: {split} a step takes" in " ".join(printed(summary(result.report)).split())


def test_no_split_is_proposed_that_is_no_faster() -> None:
    """Stages of 2 and 1 second look uneven, but moving a layer makes the simulated step slower; so the layers stay."""
    prices = LayerSeconds(np.ones((2, 6)), np.zeros(2))
    now = SimulatedSplit((4, 2), 10.0, np.array([4.0, 2.0]))
    tried = []

    def slower(split: tuple[int, ...]) -> SimulatedSplit:
        tried.append(split)
        return SimulatedSplit(split, 11.0, np.array([5.0, 5.0]))

    assert better_split(now, prices, slower) is None
    assert tried == [(3, 3)]
    assert better_split(now, prices, lambda split: None) is None


def test_keys_that_ask_for_an_even_split_are_named_beside_the_proposal() -> None:
    """A split stands beside no such key, so that the proposal turns it off. As printed it is legal."""
    job: dict[str, Any] = {
        "model": {"layers": 15, "hidden": 2048, "heads": 16, "vocab": 32000},
        "training": {"seq": 2048, "global_batch": 32},
        "parallelism": {"pp": 4, "account_for_embedding": True},
        "cluster": {
            "name": "dgx_h100",
            "nodes": 1,
            "node": FAST_HOSTS,
            "overrides": [{"gpu": f"node0.gpu{gpu}", "speed_scale": 0.5} for gpu in (2, 3)],
        },
    }
    result = simulator.run(job)
    split = result.to_dict()["stages"]["layers_per_stage"]
    text = " ".join(printed(summary(result.report)).split())
    changes = {"parallelism.layers_per_stage": split, "parallelism.account_for_embedding": False}
    assert f"with {as_options(changes)} a step takes" in text
    simulator.run(job, set=changes)


def test_a_pass_of_collectives_alone_counts_however_kernels_are_joined() -> None:
    """The last piece of a split backward pass gathers a gradient alone, where activations are on the host."""
    workload = {
        "framework": "megatron_core",
        "model": {"layers": 2, "hidden": 64, "heads": 2, "vocab": 125},
        "training": {"seq": 16, "global_batch": 4},
        "parallelism": {"tp": 2, "dp": 1, "schedule": "zb_h1", "offload": {"activations": "cpu"}},
        "cluster": "dgx_h100",
    }
    steps = [simulator.run(workload, set={"simulation.coalesce": joined}).spans for joined in (True, False)]
    joined, single = (stage_seconds(step, 1) for step in steps)
    assert joined == pytest.approx(single, rel=1e-9)

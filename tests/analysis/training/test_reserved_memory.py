"""Steps on the caching allocator, by hand: states of the first update, and experts with uneven loads."""

from __future__ import annotations

from typing import Any

import pytest

import simulator
from simulator.analysis.training.memory import RankMemory, memory_of_ranks
from simulator.analysis.training.static_memory import StaticMemory
from simulator.analysis.training.uneven_experts import uneven_experts_warning
from simulator.config import Workload, load_workload
from simulator.models import StateBytes
from simulator.units import MiB
from tests.support import experts
from tests.support.timelines import Span, template, timeline


def test_states_of_the_first_update_break_up_what_the_first_step_has_left() -> None:
    """A pass holds 60 MiB, then an update makes two states of 20 MiB each.

    They come into the segment of 60, whose last 20 are too small for the second step's tensor. It takes 60 anew: 120
    are reserved where 40 + 60 are allocated. States that are there from the start leave nothing unused.
    """
    pass_, update = template(("a", "norm", "compute", 1.0)), template(("adam", "optimizer", "optimizer", 1.0))
    play = timeline(
        [
            Span(0, "compute", pass_, 0.0, alloc=60.0 * MiB, free=60.0 * MiB, stage=0, microbatch=0),
            Span(0, "compute", update, 1.0, workspace=2.0 * MiB, phase="O"),
        ]
    )
    state = StateBytes(weights=0.0, gradients=0.0, optimizer=40.0 * MiB)
    late = StaticMemory(state, first_update_tensors=(20.0 * MiB, 20.0 * MiB))
    cached = {
        name: memory_of_ranks(play, {0: static})[0].cached
        for name, static in (("late", late), ("early", StaticMemory(state)))
    }
    assert cached == {"late": 20.0 * MiB, "early": 0.0}


def test_what_is_left_of_a_sum_is_no_tensor() -> None:
    """Bytes that a difference of sums leaves, of either sign, take no block of 512 bytes, nor a segment of 2 MiB."""
    state = StateBytes(weights=1e-7, gradients=-1e-7, optimizer=0.0)
    play = timeline([Span(0, "compute", template(("a", "norm", "compute", 1.0)), 0.0, workspace=1e-7)])
    assert memory_of_ranks(play, {0: StaticMemory(state)})[0].cached == 0.0


#: DeepSeek-V3 16B as torchtitan trains it (github.com/pytorch/torchtitan, issue 1789).
DEEPSEEK_16B: dict[str, Any] = {
    "name": "deepseek",
    "model": {
        **{"layers": 27, "hidden": 2048, "heads": 16, "ffn_hidden": 10944, "vocab": 102400, "activation": "swiglu"},
        **{"norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
        "mla": {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        "moe": {"experts": 64, "top_k": 6, "ffn_hidden": 1408, "shared_experts": 2, "first_dense_layers": 1},
    },
    "framework": "torchtitan",
    "training": {"seq": 4096, "micro_batch": 8, "global_batch": 64, "recompute": "full"},
    "parallelism": {"zero": 3, "ep": 8},
    "cluster": {"name": "dgx_h100", "nodes": 1},
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [({}, True), ({"parallelism.ep": 1}, False), ({"training.micro_batch": 4, "training.global_batch": 32}, False)],
)
def test_a_job_that_fits_at_even_loads_only_says_so(changes: dict[str, Any], told: bool) -> None:
    """The run with EP 8 ran out of memory. It fitted at 96 % with EP 1, and with EP 8 and four sequences."""
    result = simulator.run(DEEPSEEK_16B, set=changes)
    assert result.to_dict()["memory"]["fits"]
    assert any(text.startswith("fits while the loads of experts are even") for text in result.warnings) == told


@pytest.mark.parametrize(
    ("top_k", "ep", "tried"),
    [
        (1, 8, [2.0, 3.0]),
        (3, 8, [2.0, 8 / 3]),  # an expert gets each token once: a third of all copies, which are eight shares
        (4, 4, [2.0]),
        (1, 2, [2.0]),  # all tokens are two shares
        (8, 8, []),  # every expert gets every token
    ],
)
def test_loads_are_as_uneven_as_a_router_can_make_them(top_k: int, ep: int, tried: list[float]) -> None:
    """No load is tried twice, and a warning says the load that was tried. All but 5 % of a GPU is full at even ones."""
    static = StaticMemory(StateBytes(weights=0.0, gradients=0.0, optimizer=0.0))
    capacity = static.overhead / 0.95
    memory = RankMemory(0, 0, static, {}, 0.0, 0.0, 0.0, capacity, 0.0, 0.0, "", 1)
    workload = load_workload(experts.job(moe={"top_k": top_k}, parallelism={"ep": ep, "dp": 8}))
    seen: list[float] = []

    def needed_bytes(uneven: Workload) -> float:
        shares = uneven.model.moe.token_distribution if uneven.model.moe else ()
        assert isinstance(shares, tuple)
        assert sum(shares) == pytest.approx(1.0)
        seen.append(sum(shares[: 8 // ep]) * ep)
        return capacity * (2 if len(seen) == len(tried) else 1)

    warnings = uneven_experts_warning([memory], workload, needed_bytes)
    assert seen == pytest.approx(tried)
    assert [f"receives {tried[-1]:.3g} times" in text for text in warnings] == [True] * bool(tried)

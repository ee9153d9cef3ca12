"""Rules R34, R35, R36, R38 and R41: what people rely on about experts, data parallelism and the FLOPs of a model."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.config.rules import warnings
from simulator.errors import InputError
from simulator.lowering.layout import layout
from simulator.models import (
    active_parameters,
    model_flops_per_step,
    parameters,
    rank_parts,
    state_bytes,
    weights_of,
)
from simulator.operations.weights import elements_by_axis
from tests.support.experts import job, play


def load(**changes: Any) -> Workload:
    return load_workload(job(**changes))


def refused(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        load(**changes)
    return str(caught.value)


def test_r34_experts_fold_over_tensor_context_and_data_parallelism() -> None:
    """tp 1, cp 16, dp 2 and ep 32 on 32 GPUs are legal: etp * ep divides tp * cp * dp. No two ranks then hold the same
    experts, so that their optimizer state is not sharded, while that of the rest is shared by 32."""
    work = load(
        model__moe={"experts": 32, "top_k": 2, "ffn_hidden": 256},
        training__seq=1024,
        parallelism={"cp": 16, "dp": 2, "ep": 32, "zero": 1},
    )
    placed = layout(work)
    assert work.parallelism.replicas("edp") == 1
    assert "edp" not in placed.groups
    assert placed.groups["ep"] == (tuple(range(32)),)
    assert any("of experts is not sharded" in note for note in warnings(work))
    plain = load(
        model__moe={"experts": 32, "top_k": 2, "ffn_hidden": 256},
        training__seq=1024,
        parallelism={"cp": 16, "dp": 2, "ep": 32, "zero": 0},
    )
    held, saved = state_bytes(plain, 0), state_bytes(plain, 0).optimizer - state_bytes(work, 0).optimizer
    outside = 12 * (held.weights / 2 - 2 * 3 * 256 * 256)  # one expert of three matrices in each of two layers
    assert saved == pytest.approx(outside * 31 / 32)
    assert "does not divide tp 1 x cp 1 x dp 4" in refused(parallelism={"dp": 4, "ep": 8})


def test_r35_groups_of_16_ranks_with_ep_2() -> None:
    """EP groups are neighbours; the ranks that hold the same experts are the even and the odd ones."""
    groups = layout(load(parallelism={"dp": 16, "ep": 2})).groups
    assert groups["ep"] == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    assert groups["edp"] == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))


def test_r36_experts_that_ep_does_not_divide() -> None:
    """256 experts on ep 3 are refused, with the sizes that divide and the padding that would; 258 run when asked."""
    moe = {"experts": 256, "top_k": 8, "ffn_hidden": 64}
    layout_of = {"dp": 3, "ep": 3}
    message = refused(model__moe=moe, training__global_batch=12, parallelism=layout_of)
    assert "parallelism.ep" in message
    assert "1, 2, 4, 8, 16, 32, 64, 128, 256" in message
    assert "redundant_experts: 2 (258 experts)" in message
    work = load(model__moe=moe | {"redundant_experts": 2}, training__global_batch=12, parallelism=layout_of)
    # A rank holds 86 experts of 3 matrices of 256 x 64 in each of two layers; copies are no parameters of the model.
    assert elements_by_axis(weights_of(rank_parts(work, 0)))["edp"] == 2 * 86 * 3 * 256 * 64
    assert parameters(work) == parameters(load(model__moe=moe))


def test_zero_1_divides_the_state_of_experts_and_of_the_rest_by_those_who_share_them() -> None:
    """2-byte weights, fp32 gradients and 12 bytes of fp32 Adam per parameter, which ZeRO-1 divides by those who hold
    the same ones: with dp 4 and ep 2, by 4 outside experts, by 2 in them."""
    work = load(parallelism={"dp": 4, "ep": 2, "zero": 1})
    state = state_bytes(work, 0)
    experts = 2 * 4 * 3 * 256 * 256  # two layers, 4 of 8 experts, three matrices
    rest = state.weights / 2 - experts
    assert state.gradients == 2 * state.weights
    assert state.optimizer == pytest.approx(12 * (experts / 2 + rest / 4))


def _layer_s(result: Any, *kinds: str) -> float:
    """Seconds of grouped products of the slowest rank."""
    frame = result.timeline
    chosen = frame[frame["kind"].isin(kinds)]
    seconds = (chosen["end_s"] - chosen["start_s"]).groupby(chosen["rank"]).sum()
    return float(seconds.max())


@pytest.mark.parametrize("ep", [4, 8])
def test_r38_twice_the_tokens_take_twice_as_long(ep: int) -> None:
    """One expert a rank; of 2 * ep tokens the first gets 4 and each other rank (2 ep - 4) / (ep - 1): twice the mean on
    the hottest. At sizes that fill the GPU (weights are read once, whatever the tokens) its products last twice as long
    as balanced ones, and every all-to-all as long as its port needs for twice the bytes; the others wait for it."""
    moe: dict[str, Any] = {"experts": ep, "top_k": 1, "ffn_hidden": 8192}
    shares = [2.0, *[(ep - 2) / (ep - 1)] * (ep - 1)]
    sizes: dict[str, Any] = {
        "model__hidden": 4096,
        "model__heads": 32,
        "training__seq": 8192,
        "training__global_batch": 8,
        "parallelism": {"dp": ep, "ep": ep},
    }
    even, hot = play(model__moe=moe, **sizes), play(model__moe=moe | {"token_distribution": shares}, **sizes)
    assert _layer_s(hot, "grouped_matmul") / _layer_s(even, "grouped_matmul") == pytest.approx(2, rel=0.03)
    dispatch = [
        frame[frame["name"] == "ep.all_to_all dispatch"].pipe(lambda f: f["end_s"] - f["start_s"]).max()
        for frame in (even.timeline, hot.timeline)
    ]
    # Of its own tokens it keeps what it would send itself: (ep - 1) / ep of twice the bytes come in.
    assert dispatch[1] / dispatch[0] == pytest.approx(2, rel=0.1)
    assert hot.spans.step_time_s > even.spans.step_time_s


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 4)])
def test_r41_flops_count_active_experts_only(experts: int, k: int) -> None:
    """Three times two per weight that a token meets: attention, router, k experts of three matrices, the vocabulary;
    and full attention. More experts add a router column each, no more."""

    def flops(count: int) -> float:
        return model_flops_per_step(load(model__moe={"experts": count, "top_k": k, "ffn_hidden": 512}))

    h, s, v, layers, tokens = 256, 128, 1024, 2, 32 * 128
    weights = layers * (4 * h * h + h * experts + k * 3 * h * 512) + v * h
    assert flops(experts) == pytest.approx(6 * tokens * weights + 3 * layers * 4 * s * s * h * 32)
    assert flops(2 * experts) - flops(experts) == pytest.approx(6 * tokens * layers * h * experts)


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 141e9, 39e9),
        ("deepseek-v2", 236e9, 21e9),
        ("deepseek-v3", 671e9, 37e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
    ],
)
def test_r41_parameters_of_published_models(preset: str, total: float, active: float) -> None:
    """As their makers give them; 46,702,792,704 of Mixtral 8x7B are also those of the released checkpoint."""
    work = load_workload(
        {"model": {"preset": preset}, "training": {"seq": 4096, "global_batch": 1}, "cluster": "dgx_h100"}
    )
    assert parameters(work) == pytest.approx(total, rel=0.005)
    assert active_parameters(work) == pytest.approx(active, rel=0.02)
    if preset == "mixtral-8x7b":
        assert parameters(work) == 46_702_792_704


def test_the_ep_that_is_proposed_counts_copies_of_experts() -> None:
    """58 experts and 6 copies on 48 ranks: 64 are held, which 3 ranks cannot share, and copies need 2 ranks."""
    moe = {"experts": 58, "top_k": 2, "ffn_hidden": 64, "redundant_experts": 6}
    message = refused(model__moe=moe, training__global_batch=48, parallelism={"dp": 48, "ep": 32})
    assert "2, 4, 8, 16" in message
    assert "1, 2" not in message


def test_expert_parallelism_needs_experts() -> None:
    assert "the model has no experts" in refused(model__moe=None, parallelism={"dp": 2, "ep": 2})

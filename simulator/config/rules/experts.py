"""Experts and expert parallelism, latent attention, multi-token prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.model import Moe
from simulator.config.rules.numbers import divisors, listed, nearest, nearest_multiple
from simulator.config.rules.scale import fills_cluster
from simulator.config.rules.tensor import MAX_TENSOR, sequence_unit
from simulator.errors import InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Sizes of experts against each other and against ep, etp and tp."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    moe = model.moe
    if moe is None:
        for key, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                # As Megatron-LM: "num_experts must be non None to use expert model parallelism".
                yield InputError(
                    "the model has no experts", key=f"parallelism.{key}", found=size, allowed="1, or model.moe"
                )
        if layout.overlap.ep:
            yield InputError(
                "the model has no experts",
                key="parallelism.overlap.ep",
                found=brief(True),
                allowed="false, or model.moe",
            )
    else:
        yield from _moe_problems(moe, model.layers, model.mlps)
        yield from _split_problems(workload, moe)
        copies = training.micro_batch * training.seq * moe.top_k
        if (numbers := copies * max(model.hidden, 2 * moe.ffn_hidden)) > MAX_TENSOR:
            yield InputError(
                f"makes tensors of {numbers:.1e} numbers (micro_batch * seq * top_k * width)",
                key="training.micro_batch",
                found=training.micro_batch,
                allowed=f"at most {MAX_TENSOR:.0e} numbers",
            )
    if model.mla is not None:
        defaults = {"kv_heads": model.heads, "head_dim": max(1, model.hidden // model.heads)}
        for key, default in defaults.items():
            if getattr(model, key) != default:
                yield InputError(
                    "latent attention has keys and values for every head, of widths of its own",
                    key=f"model.{key}",
                    found=getattr(model, key),
                    allowed="left out, beside model.mla",
                )
        if model.position == "learned":
            yield InputError(
                "latent attention has rotary positions (qk_rope_head_dim)",
                key="model.position",
                found=model.position,
                allowed="rope, none",
                fix="position: rope",
            )
    if model.mtp_layers and model.hidden % layout.tp:
        yield InputError(
            f"tp {layout.tp} does not divide it, as the projection of multi-token prediction needs",
            key="model.hidden",
            found=model.hidden,
            allowed=f"a multiple of {layout.tp}",
        )


def _moe_problems(moe: Moe, layers: int, mlps: tuple[str, ...] | None) -> Iterator[InputError]:
    if moe.top_k > moe.experts:
        yield InputError(
            f"a token cannot go to more than the {moe.experts} experts",
            key="model.moe.top_k",
            found=moe.top_k,
            allowed=f"at most {moe.experts}",
        )
        return
    if mlps is None and not any(moe.here(layer) for layer in range(layers)):
        yield InputError(
            f"leaves none of the {layers} layers for experts",
            key="model.moe.first_dense_layers",
            found=moe.first_dense_layers,
            allowed=f"at most {layers - 1}",
            fix=f"moe: {{first_dense_layers: {layers - 1}}}",
        )
    if moe.shared_ffn_hidden and not moe.shared_experts:
        yield InputError(
            "there are no shared experts",
            key="model.moe.shared_ffn_hidden",
            found=moe.shared_ffn_hidden,
            fix="shared_experts: 1",
        )
    if moe.shared_experts and not moe.shared_ffn_hidden:
        yield InputError("shared experts need a width", key="model.moe.shared_ffn_hidden", found=0, allowed=">= 1")
    if not moe.pad_to_capacity and moe.capacity_factor is None:
        yield InputError(
            "has no meaning without a capacity factor",
            key="model.moe.pad_to_capacity",
            found=brief(moe.pad_to_capacity),
            fix="capacity_factor: 1.25",
        )
    if isinstance(moe.token_distribution, tuple):
        yield from _share_problems(moe, moe.token_distribution)


def _share_problems(moe: Moe, shares: tuple[float, ...]) -> Iterator[InputError]:
    key = "model.moe.token_distribution"
    total = math.fsum(shares)
    if len(shares) != moe.experts or total == 0:
        what = "not all 0" if len(shares) == moe.experts else f"{len(shares)} shares for {moe.experts} experts"
        yield InputError(what, key=key, found=brief(list(shares)), allowed=f"{moe.experts} numbers, not all 0")
    elif max(shares) / total > (1 + 1e-9) / moe.top_k:
        yield InputError(
            f"sends one expert {max(shares) / total:.3f} of all copies, but a token goes to {moe.top_k} different ones",
            key=key,
            found=brief(list(shares)),
            allowed=f"shares of at most 1 / top_k = {1 / moe.top_k:.4g} of their sum",
        )


def _split_problems(workload: Workload, moe: Moe) -> Iterator[InputError]:
    training, layout = workload.training, workload.parallelism
    experts = moe.experts + moe.redundant_experts
    if experts % layout.ep:
        missing = -experts % layout.ep
        fits = divisors(experts)
        works = [ep for ep in fits if ep > bool(moe.redundant_experts) and fills_cluster(workload, ep=ep)]
        yield InputError(
            f"{experts} experts do not divide by it",
            key="parallelism.ep",
            found=layout.ep,
            allowed=f"{listed(fits)}; or model.moe.redundant_experts: {moe.redundant_experts + missing} "
            f"({experts + missing} experts)",
            fix=f"ep: {nearest(layout.ep, works)}" if works else None,
        )
    elif moe.redundant_experts and layout.ep == 1:
        yield InputError(
            "copies of experts serve to spread them over ep ranks",
            key="model.moe.redundant_experts",
            found=moe.redundant_experts,
            allowed="0, or ep > 1",
        )
    for axis, size, key, width in (
        ("etp", layout.etp, "ffn_hidden", moe.ffn_hidden),
        ("tp", layout.tp, "shared_ffn_hidden", moe.shared_ffn_hidden),
    ):
        if width % size:
            yield InputError(
                f"{axis} {size} does not divide it",
                key=f"model.moe.{key}",
                found=width,
                allowed=f"a multiple of {size}",
                fix=f"{key}: {nearest_multiple(width, size)}",
            )
    if training.micro_batch * training.seq % (layout.tp * layout.cp):
        yield InputError(
            f"tp {layout.tp} x cp {layout.cp} ranks route equal parts of a micro-batch's tokens",
            key="training.seq",
            found=training.seq,
            allowed=f"a multiple of {layout.tp * layout.cp}",
            fix=f"seq: {nearest_multiple(training.seq, math.lcm(layout.tp * layout.cp, sequence_unit(layout)))}",
        )
    if layout.overlap.ep and "shared_experts" in training.recompute.modules:
        # Megatron-LM: "shared_experts recompute cannot work with --moe-shared-expert-overlap".
        yield InputError(
            "shared experts that compute beside the all-to-all are not recomputed apart",
            key="training.recompute.modules",
            found=list(training.recompute.modules),
            allowed="without shared_experts, or overlap.ep: false",
        )
    if layout.overlap.ep and not moe.shared_experts:
        yield InputError(
            "there are no shared experts to compute beside the all-to-all",
            key="parallelism.overlap.ep",
            found=brief(True),
            allowed="false; overlap.expert_all_to_all has another micro-batch compute beside it",
            fix="expert_all_to_all: true",
        )


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """The grid of experts against that of the rest."""
    layout, moe = workload.parallelism, workload.model.moe
    if moe is None:
        return
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % (layout.ep * layout.etp):
        experts = moe.experts + moe.redundant_experts
        least = 2 if moe.redundant_experts else 1  # copies of experts need ranks to be spread over
        fits = [ep for ep in divisors(ranks) if ep >= least and ranks % (ep * layout.etp) == 0 and experts % ep == 0]
        yield InputError(
            f"ep {layout.ep} x etp {layout.etp} does not divide tp {layout.tp} x cp {layout.cp} x dp {layout.dp}",
            key="parallelism.ep",
            found=layout.ep,
            allowed=listed(fits) if fits else f"an etp that divides {ranks}",
            fix=f"ep: {nearest(layout.ep, fits)}" if fits else "etp: 1" if ranks % layout.ep == 0 else None,
        )
        return
    axes = layout.rank_order.split("-")
    inner = axes[: axes.index("pp")]
    dense = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp}
    mixed = {"tp": layout.etp, "ep": layout.ep, "dp": layout.replicas("edp")}
    strides = [math.prod(sizes.get(axis, 1) for axis in inner) for sizes in (dense, mixed)]
    if layout.pp > 1 and strides[0] != strides[1]:
        # Megatron-LM asserts that both grids have the same pipelines (parallel_state.py, initialize_model_parallel).
        yield InputError(
            f"ranks of one pipeline are {strides[0]} apart outside experts, and {strides[1]} in them",
            key="parallelism.rank_order",
            found=layout.rank_order,
            allowed="pp last, unless etp x ep covers the same ranks as the axes before pp",
            fix="rank_order: tp-cp-ep-dp-pp",
        )
    if moe.node_limit is not None:
        nodes = layout.expert_nodes(workload.cluster.gpus_per_node)
        reachable = (moe.experts + moe.redundant_experts) // nodes * moe.node_limit
        if reachable < moe.top_k:
            yield InputError(
                f"a token goes to {moe.top_k} experts, and {moe.node_limit} of {nodes} nodes hold {reachable}",
                key="model.moe.node_limit",
                found=moe.node_limit,
                allowed=f">= {math.ceil(moe.top_k / ((moe.experts + moe.redundant_experts) / nodes))}",
            )


def warnings(workload: Workload) -> Iterator[str]:
    """Sharding over nobody."""
    layout, moe = workload.parallelism, workload.model.moe
    if moe is None:
        return
    if layout.zero and layout.replicas("edp") == 1 < layout.replicas("dp"):
        yield "the optimizer state of experts is not sharded: no two ranks hold the same (expert data parallelism is 1)"

"""Operations that mixers with a state have in common: a short convolution before it, and a gated norm behind it.

Their products are of heads, which tensor-parallel ranks split. Each rank's part of other weights is that of its heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from simulator.mixers.mixer import Refusal, Split
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight
from simulator.program import AllToAll, Axis, Compute, Purpose


def split_weight(shapes: Shapes, name: str, *shape: int) -> Weight:
    """Return a weight of which tensor-parallel ranks have a part of the first dimension; ``shape`` is this rank's."""
    return Weight(f"mixer.{name}", shape, (shape[0] * shapes.tp, *shape[1:]), shapes.dtype, sharded_over=("tp",))


def convolution(shapes: Shapes, channels: int, taps: int, *, bias: bool, saved: bool) -> Node:
    """Return a causal convolution of each of this rank's ``channels`` over ``taps`` tokens, with SiLU behind it.

    It is one kernel each way, the second of which makes the gradients of the weights too (causal_conv1d,
    causal_conv1d_interface.py). It is assumed to reach the bandwidth of an activation, whose traffic it has. ``saved``:
    it keeps its input.
    """
    nbytes = float(shapes.element * shapes.tokens * channels)
    weights = [split_weight(shapes, "conv.weight", channels, 1, taps)]
    if bias:
        weights.append(split_weight(shapes, "conv.bias", channels))
    return Node(
        forward=(memory("F", "mixer.conv", "activation", nbytes, nbytes, shapes.dtype),),
        input_grad=(memory("B", "mixer.conv bwd", "activation_bwd", 2 * nbytes, nbytes, shapes.dtype),),
        saved=(Tensor("mixer.conv input", nbytes),) if saved else (),
        grad_bytes=2 * nbytes,
        weights=tuple(weights),
    )


def gated_norm(shapes: Shapes, channels: int, width: int, weight: Weight | None) -> Node:
    """Return the norm of the mixer's output in rows ``width`` wide, times a gate, of so many ``channels`` of this rank.

    It is one kernel each way, the second of which makes the weight's gradient too (mamba_ssm and
    flash-linear-attention). Without a ``weight`` there is the gate alone, which is assumed to reach the bandwidth of a
    residual's sum, with the same traffic forward. It keeps both inputs.
    """
    nbytes = float(shapes.element * shapes.tokens * channels)
    op = ("rms_norm", "rms_norm_bwd") if weight else ("residual", "residual")
    return Node(
        forward=(memory("F", "mixer.norm", op[0], 2 * nbytes, nbytes, shapes.dtype, width if weight else 0),),
        input_grad=(
            memory("B", "mixer.norm bwd", op[1], 3 * nbytes, 2 * nbytes, shapes.dtype, width if weight else 0),
        ),
        saved=(Tensor("mixer.raw", nbytes), Tensor("mixer.gate", nbytes)),
        grad_bytes=3 * nbytes,
        weights=(weight,) if weight else (),
    )


def whole_sequences(shapes: Shapes) -> Shapes:
    """Return the sizes with which a context-parallel rank works on whole sequences, of its part of the heads.

    Ranks that split heads count as ``tp``: the tensor-parallel ones, times the context-parallel ones.
    """
    return replace(shapes, cp=1, tokens=shapes.tokens * shapes.cp, tp=shapes.tp * shapes.cp)


def exchanged(shapes: Shapes, widths: Mapping[str, int], *, back: bool = False) -> Node:
    """Return the all-to-alls by which context-parallel ranks trade parts of sequences for heads, or ``back``.

    Each of the tensors, of so many columns by name, has one of its own, before which a copy puts it in order. Behind
    them one copy joins them, and another undoes the order in which attention has its parts of sequences (Megatron-LM,
    ssm/mamba_context_parallel.py, ``_all_to_all_cp2hp`` and ``_undo_attention_load_balancing``). Gradients travel the
    other way.
    """
    sizes = {name: float(shapes.element * shapes.tokens * width) for name, width in widths.items()}
    total = sum(sizes.values())

    def copy(phase: str, name: str, nbytes: float) -> Compute:
        return memory(phase, f"mixer.{name}", "copy", nbytes, nbytes, shapes.dtype)

    def ordered(phase: str, suffix: str) -> Ops:
        way = "to sequences" if back == (phase == "F") else "to heads"
        exchanges = tuple(
            op
            for name, nbytes in sizes.items()
            for op in (
                copy(phase, f"{name} pack{suffix}", nbytes),
                AllToAll(f"cp.all_to_all {name}{suffix}", nbytes, Axis.CP, Purpose.CONTEXT),
            )
        )
        return (*exchanges, copy(phase, f"join {way}{suffix}", total), copy(phase, f"order {way}{suffix}", total))

    return Node(
        forward=ordered("F", ""), input_grad=ordered("B", " bwd"), forward_bytes=2 * total, grad_bytes=2 * total
    )


def split_refusals(name: str, split: Split, **parts: int) -> Iterator[Refusal]:
    """Yield tp that does not divide the ``parts`` of a mixer called ``name``."""
    for key, count in parts.items():
        if count % split.tp:
            allowed = f"a divisor of {count}"
            yield Refusal("parallelism.tp", split.tp, f"does not divide model.{name}.{key} {count}", allowed)
            return


def sequence_refusals(name: str, split: Split, **parts: int) -> Iterator[Refusal]:
    """Yield cp that does not divide the ``parts`` that a tensor-parallel rank has of a mixer called ``name``."""
    for key, count in parts.items():
        if count % (split.tp * split.cp) and split.cp > 1:
            allowed = f"1, or tp * cp a divisor of {count}"
            yield Refusal("parallelism.cp", split.cp, f"does not divide model.{name}.{key} {count} over tp", allowed)
            return

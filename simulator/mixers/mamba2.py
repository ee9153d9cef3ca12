"""Mamba 2: a state-space layer whose heads forget at a rate of each token (arXiv 2405.21060).

With the kernels of mamba_ssm (ops/triton/ssd_combined.py, ``MambaSplitConv1dScanCombinedFn``), which keep the output of
the first product and of the scan, and make all between them again. Tensor parallelism splits heads and groups, as in
Megatron-Core (ssm/mamba_mixer.py). Context-parallel ranks trade parts of sequences for heads before the convolution,
and back behind the scan (ssm/mamba_context_parallel.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simulator.bounds import ModelSize
from simulator.mixers.mixer import Mixer, MixerProduct, Operations, Refusal, Split
from simulator.mixers.state import (
    convolution,
    exchanged,
    gated_norm,
    sequence_refusals,
    split_refusals,
    split_weight,
    whole_sequences,
)
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.program import Compute, StepPhase, Tiled
from simulator.units import FP32_BYTES

#: Kernels of the scan, forward and backward (ssd_combined.py, ``_mamba_chunk_scan_combined_fwd`` and ``_bwd``).
#: Forward: _chunk_cumsum, _chunk_state, _state_passing, _bmm_chunk, _chunk_scan. Backward: the first four again, then
#: _chunk_scan_bwd_dstates, _state_passing_bwd, _chunk_scan_chunk_state_bwd_dx, _chunk_state_bwd_db, _chunk_scan_bwd_dC,
#: _chunk_scan_bwd_dcb, _bmm_chunk_bwd twice, _chunk_scan_bwd_ddAcs_stable and _chunk_cumsum_bwd.
KERNELS, BACKWARD_KERNELS = 5, 14


@dataclass(frozen=True)
class Mamba2:
    """Sizes of Mamba 2's layers (arXiv 2405.21060)."""

    heads: ModelSize
    """heads, each with a state of head_dim x state"""
    head_dim: ModelSize
    """width of a head"""
    state: ModelSize
    """width of a state"""
    groups: ModelSize = 1
    """groups of heads that share what enters and leaves their states (B and C) [1]"""
    conv_width: ModelSize = 4
    """tokens that the convolution before the scan sees [4]"""
    chunk: ModelSize = 256
    """tokens of a piece that kernels work on at once [256]"""
    norm: bool = True
    """the output is normed as it is gated; false: gated alone [true]"""
    conv_bias: bool = True
    """whether the convolution has a bias [true]"""
    bias: bool = False
    """whether both products have biases [false]"""


def operations(shapes: Shapes, sizes: Mamba2) -> Operations:
    """Return the operations of a rank, which has a part of the heads and of the groups."""
    heads, groups = sizes.heads // shapes.tp, sizes.groups // shapes.tp
    inner = heads * sizes.head_dim
    columns = 2 * inner + 2 * groups * sizes.state + heads
    conv, scan, gate = _inside(shapes, sizes)
    apart: Operations = (conv, scan)
    if shapes.cp > 1:
        whole = whole_sequences(shapes)
        shared = max(groups, shapes.cp) * sizes.state  # groups are sent to all ranks that have some of their heads
        widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}
        pairs = zip(_inside(whole, sizes)[:2], (conv, scan), strict=True)
        divided = (replace(node, weights=undivided.weights) for node, undivided in pairs)
        apart = (exchanged(shapes, widths), *divided, exchanged(shapes, {"y": inner}, back=True))
    return (
        MixerProduct("in", columns, shapes.hidden, "column", "attn.normed", columns * shapes.tp, sizes.bias),
        *apart,
        gate,
        MixerProduct("out", shapes.hidden, inner, "row", "mixer.normed", shapes.hidden, sizes.bias),
    )


def _inside(shapes: Shapes, sizes: Mamba2) -> tuple[Node, Node, Node]:
    """Return convolution, scan and norm of the heads and groups that a rank works on."""
    heads, groups = sizes.heads // shapes.tp, max(1, sizes.groups // shapes.tp)
    inner, shared = heads * sizes.head_dim, 2 * groups * sizes.state
    columns = 2 * inner + shared + heads
    projected = float(shapes.element * shapes.tokens * columns)
    conv = convolution(shapes, inner + shared, sizes.conv_width, bias=sizes.conv_bias, saved=False)
    convolved = float(shapes.element * shapes.tokens * (inner + shared))
    again = memory("B", "mixer.conv again", "activation", convolved, convolved, shapes.dtype)
    norm = split_weight(shapes, "norm.weight", inner) if sizes.norm else None
    # The gate is a part of the first product's output, which is kept whole.
    gate = gated_norm(shapes, inner, inner // groups, norm)
    gate = replace(gate, saved=gate.saved[:1])
    return (
        replace(conv, saved=(Tensor("mixer.projected", projected),), input_grad=(again, *conv.input_grad)),
        _scan(shapes, sizes, heads, groups),
        gate,
    )


def _scan(shapes: Shapes, sizes: Mamba2, heads: int, groups: int) -> Node:
    """Return the scan, whose output the norm behind it keeps.

    Pieces have c tokens, heads are p and states n wide. Half of a piece comes before a token.

    Bytes are assumed. Forward x is read by two kernels, and all else once; backward all is read three times and written
    twice, as a guess of what caches leave.
    """
    c, p, n = min(sizes.chunk, shapes.seq), sizes.head_dim, sizes.state
    rows = float(shapes.tokens * heads)
    shared = float(shapes.tokens * groups * c * n)
    # Multiply-adds of all tokens, by kernel.
    again = rows * p * n + shared  # _chunk_state, _bmm_chunk
    forward = again + rows * (c * p / 2 + p * n)  # _chunk_scan
    gradients = (
        3 * rows * p * n  # _chunk_scan_bwd_dstates, _chunk_state_bwd_db, _chunk_scan_bwd_dC
        + rows * (c * p / 2 + p * n)  # _chunk_scan_chunk_state_bwd_dx
        + 2 * rows * c * p / 2  # _chunk_scan_bwd_dcb, _chunk_scan_bwd_ddAcs_stable
        + 2 * shared  # _bmm_chunk_bwd, twice
    )
    x, bc = rows * p, 2.0 * shapes.tokens * groups * n
    states, products = rows * p * n / c, shapes.tokens * groups * c
    decays = FP32_BYTES * rows
    read = shapes.element * (2 * x + bc + products) + FP32_BYTES * 2 * states + 2 * decays
    written = shapes.element * (x + products) + FP32_BYTES * 2 * states + decays
    weights = (
        split_weight(shapes, "A_log", heads),
        split_weight(shapes, "D", heads),
        split_weight(shapes, "dt_bias", heads),
    )
    return Node(
        forward=(
            Compute(
                "mixer.scan", Tiled(2 * forward, read, written, c, n, KERNELS, dtype=shapes.dtype), StepPhase.FORWARD
            ),
        ),
        input_grad=(
            Compute(
                "mixer.scan bwd",
                Tiled(
                    2 * (again + gradients),
                    3 * read,
                    2 * written + shapes.element * bc,
                    c,
                    n,
                    BACKWARD_KERNELS,
                    backward=True,
                    dtype=shapes.dtype,
                ),
                StepPhase.BACKWARD,
            ),
        ),
        weight_grad=(
            memory("W", "mixer.scan wgrad", "reduce", 2 * decays, 3 * FP32_BYTES * heads, shapes.dtype, heads),
        ),
        forward_bytes=shapes.element * (x + bc + products) + FP32_BYTES * states,
        grad_bytes=shapes.element * (3 * x + 2 * bc + products) + FP32_BYTES * 2 * states,
        output_grad_bytes=shapes.element * x,
        weights=weights,
    )


def flops(sizes: Mamba2, seen: float) -> float:
    """Return seven operations for each number of a state, however many tokens are ``seen``.

    So Megatron-LM counts them (training/training.py, ``mamba_layer_flops``).
    """
    return 7.0 * sizes.heads * sizes.head_dim * sizes.state


def refusals(sizes: Mamba2, split: Split) -> Iterator[Refusal]:
    """Yield groups that do not divide, and what the layer cannot be split over."""
    if sizes.heads % sizes.groups:
        yield Refusal(
            "model.mamba2.groups", sizes.groups, "heads are shared out to groups", f"a divisor of heads {sizes.heads}"
        )
        return
    if sizes.groups % split.tp or sizes.heads % split.tp:
        yield from split_refusals("mamba2", split, groups=sizes.groups, heads=sizes.heads)
        return
    yield from sequence_refusals("mamba2", split, heads=sizes.heads)
    groups = sizes.groups // split.tp
    if groups % split.cp and split.cp % groups:
        yield Refusal(
            "parallelism.cp",
            split.cp,
            f"does not divide model.mamba2.groups {sizes.groups} over tp, nor is it a multiple of them",
            f"1, or a divisor or multiple of {groups}",
        )


MIXER = Mixer(
    "mamba2",
    "state-space layer of Mamba 2",
    section="mamba2",
    sizes=Mamba2,
    operations=operations,
    flops=flops,
    refusals=refusals,
)

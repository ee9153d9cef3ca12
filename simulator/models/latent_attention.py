"""Multi-head latent attention: queries, keys and values from compressed forms (DeepSeek-V2, arXiv 2405.04434, 2.1).

It is laid out as in Megatron-Core's MLASelfAttention. Weights that compress are held by every tensor-parallel rank, and
work on its rows; weights that expand are split by heads. One rotary part of the keys serves all heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.config import Workload
from simulator.models.linear import linear
from simulator.models.norms import norm
from simulator.models.pointwise import rotation_kernels
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Ops, Tensor, comm, memory


@dataclass(frozen=True)
class Latent:
    """Widths that queries (0: not compressed), and keys and values are compressed to, and parts of a head."""

    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v: int


def latent(workload: Workload) -> Latent | None:
    """Return the `Latent` of a workload, where it has one."""
    mla = workload.model.mla
    if mla is None:
        return None
    return Latent(mla.q_lora_rank or 0, mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim)


def latent_projections(shapes: FrameworkShapes, latent: Latent) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the operations in two halves.

    The first takes the normed rows to compressed forms, the second takes these to queries, keys and values with
    positions.
    """
    q = shapes.heads * (latent.nope + latent.rope)
    down: tuple[Node, ...] = (_down(shapes, "kv_down", latent.kv_lora + latent.rope),)
    queries: tuple[Node, ...] = (linear(shapes, "attn", "q", q, shapes.hidden, split="column", saved="attn.normed"),)
    if latent.q_lora:
        down = (_down(shapes, "q_down", latent.q_lora), *down)
        queries = (
            norm(replace(shapes, hidden=latent.q_lora), "attn.q_norm", saved="attn.q_compressed", residual=False),
            linear(shapes, "attn", "q_up", q, latent.q_lora, split="column", saved="attn.q_normed"),
        )
    # The input goes to the queries and to the keys and values: their gradients are summed.
    row = shapes.row_bytes
    add = Node(
        input_grad=(memory("B", "attn.input grad", "residual", 2 * row, row, shapes.dtype),),
        grad_bytes=2 * row,
    )
    return (add, *down), (
        *queries,
        norm(replace(shapes, hidden=latent.kv_lora), "attn.kv_norm", saved="attn.kv_compressed", residual=False),
        linear(
            shapes,
            "attn",
            "kv_up",
            shapes.heads * (latent.nope + latent.v),
            latent.kv_lora,
            split="column",
            saved="attn.kv_normed",
        ),
        _positions(shapes, latent),
    )


def up_inputs(up: tuple[Node, ...]) -> tuple[Tensor, ...]:
    """Return the tensors that the second half of `latent_projections` takes from the first."""
    compressed = ("attn.normed", "attn.q_compressed", "attn.kv_compressed")
    return tuple(tensor for node in up for tensor in node.saved if tensor.name in compressed)


def _down(shapes: FrameworkShapes, name: str, n: int) -> Node:
    """Return a product that compresses this rank's rows.

    It is a linear layer like the others, in 8 bits too where these are (core_v0.19, megatron/core/transformer/
    multi_latent_attention.py: `TELinear` with ``parallel_mode="duplicated"``). Each casts the rows for itself.
    """
    return linear(shapes, "attn", name, n, shapes.hidden, split="duplicated", saved="attn.normed")


def _positions(shapes: FrameworkShapes, latent: Latent) -> Node:
    """Return rotary positions on a part of each query and on the keys' shared part, of which every head gets a copy.

    With sequence parallelism the shared part is gathered first. There is one kernel for queries, in place, and one for
    keys and values (Megatron-Core's ``fused_mla_yarn_rope_apply``). Where operations rotate, others join.
    """
    q_rope, k_rope = (
        shapes.element * shapes.tokens * shapes.heads * latent.rope,
        shapes.element * shapes.tokens * latent.rope,
    )
    q, k, v = (shapes.element * shapes.tokens * width for width in (shapes.q_width, shapes.kv_width, shapes.v_width))
    expanded = shapes.element * shapes.tokens * shapes.heads * (latent.nope + latent.v)

    def kernels(phase: str, suffix: str) -> Ops:
        if not shapes.framework.rotates_by_operations:
            read, written = expanded + k_rope, k + v
            if phase == "B":
                read, written = written, read
            return (
                memory(phase, f"attn.rope q{suffix}", "rope", q_rope, q_rope, shapes.dtype),
                memory(phase, f"attn.rope kv{suffix}", "rope", read, written, shapes.dtype),
            )
        rotations = (
            *rotation_kernels(shapes, phase, "q", q_rope, latent=True),
            *rotation_kernels(shapes, phase, "k", k_rope, latent=True),
        )
        joins = (("q join", q, q), ("k join", k, k), ("v copy", v, v))
        return (
            *rotations,
            *(memory(phase, f"attn.{name}{suffix}", "copy", x, y, shapes.dtype) for name, x, y in joins),
        )

    gathered = shapes.sequence_parallel
    return Node(
        forward=(*((comm("all_gather", "attn rope key", k_rope),) if gathered else ()), *kernels("F", "")),
        input_grad=(
            *kernels("B", " bwd"),
            *((comm("reduce_scatter", "attn rope key", k_rope),) if gathered else ()),
        ),
        grad_bytes=float(q + k + v + expanded),
    )

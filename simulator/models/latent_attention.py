"""Multi-head latent attention: queries, keys and values from compressed forms (DeepSeek-V2, arXiv 2405.04434, 2.1).

It is laid out as in Megatron-Core's MLASelfAttention. Weights that compress are held by every tensor-parallel rank, and
work on its rows; weights that expand are split by heads. One rotary part of the keys serves all heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.config import Workload
from simulator.models.linear import add_gradient, linear, new_gradient_bytes, product
from simulator.models.norms import norm
from simulator.models.pointwise import rotated
from simulator.models.shapes import FrameworkShapes
from simulator.models.weight_names import weight_name
from simulator.operations.nodes import Node, Ops, Tensor, comm, memory
from simulator.operations.weights import Weight


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


def latent_projections(z: FrameworkShapes, a: Latent) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the operations in two halves.

    The first takes the normed rows to compressed forms, the second takes these to queries, keys and values with
    positions.
    """
    q = z.heads * (a.nope + a.rope)
    down: tuple[Node, ...] = (_down(z, "kv_down", a.kv_lora + a.rope),)
    queries: tuple[Node, ...] = (linear(z, "attn", "q", q, z.hidden, split="column", saved="attn.normed"),)
    if a.q_lora:
        down = (_down(z, "q_down", a.q_lora), *down)
        queries = (
            norm(replace(z, hidden=a.q_lora), "attn.q_norm", saved="attn.q_compressed", residual=False),
            linear(z, "attn", "q_up", q, a.q_lora, split="column", saved="attn.q_normed"),
        )
    # The input goes to the queries and to the keys and values: their gradients are summed.
    add = Node(input_grad=(memory("B", "attn.input grad", "residual", 2 * z.row_bytes, z.row_bytes, z.dtype),))
    return (add, *down), (
        *queries,
        norm(replace(z, hidden=a.kv_lora), "attn.kv_norm", saved="attn.kv_compressed", residual=False),
        linear(z, "attn", "kv_up", z.heads * (a.nope + a.v), a.kv_lora, split="column", saved="attn.kv_normed"),
        _positions(z, a),
    )


def up_inputs(up: tuple[Node, ...]) -> tuple[Tensor, ...]:
    """Return the tensors that the second half of `latent_projections` takes from the first."""
    compressed = ("attn.normed", "attn.q_compressed", "attn.kv_compressed")
    return tuple(tensor for node in up for tensor in node.saved if tensor.name in compressed)


def _down(z: FrameworkShapes, name: str, n: int) -> Node:
    """Return a product over this rank's rows whose weight every tensor-parallel rank holds."""
    x_bytes, y_bytes = z.row_bytes, float(z.element * z.rows * n)
    name, params = f"attn.{name}", n * z.hidden
    weight_grad: Ops = (product(z, name, "wgrad", n, z.hidden, z.rows),)
    if not z.accumulates_in_product:
        weight_grad += add_gradient(z, name, params)
    weight_grad_bytes = 0.0 if z.accumulates_in_product else new_gradient_bytes(z, params)
    kept = (Tensor("attn.normed", x_bytes),)
    return Node(
        forward=(product(z, name, "fwd", z.rows, n, z.hidden),),
        input_grad=(product(z, name, "dgrad", z.rows, z.hidden, n),),
        weight_grad=weight_grad,
        saved=kept,
        saved_for_weights=kept,
        grad_bytes=x_bytes + y_bytes + weight_grad_bytes,
        output_grad_bytes=y_bytes,
        weight_grad_bytes=weight_grad_bytes,
        weights=(
            Weight(
                weight_name(name),
                (n, z.hidden),
                (n, z.hidden),
                z.dtype,
                partial_rows=n if z.sequence_parallel else 0,
                gradient_product=f"{name} wgrad",
            ),
        ),
    )


def _positions(z: FrameworkShapes, a: Latent) -> Node:
    """Return rotary positions on a part of each query and on the keys' shared part, of which every head gets a copy.

    With sequence parallelism the shared part is gathered first. There is one kernel for queries, in place, and one for
    keys and values (Megatron-Core's ``fused_mla_yarn_rope_apply``). Where operations rotate, others join.
    """
    q_rope, k_rope = z.element * z.tokens * z.heads * a.rope, z.element * z.tokens * a.rope
    q, k, v = (z.element * z.tokens * width for width in (z.q_width, z.kv_width, z.v_width))
    expanded = z.element * z.tokens * z.heads * (a.nope + a.v)

    def kernels(phase: str, suffix: str) -> Ops:
        if not z.framework.rotates_by_operations:
            read, written = expanded + k_rope, k + v
            if phase == "B":
                read, written = written, read
            return (
                memory(phase, f"attn.rope q{suffix}", "rope", q_rope, q_rope, z.dtype),
                memory(phase, f"attn.rope kv{suffix}", "rope", read, written, z.dtype),
            )
        rotations = (*rotated(z, phase, "q", q_rope, suffix), *rotated(z, phase, "k", k_rope, suffix))
        joins = (("q join", q, q), ("k join", k, k), ("v copy", v, v))
        return (*rotations, *(memory(phase, f"attn.{name}{suffix}", "copy", x, y, z.dtype) for name, x, y in joins))

    gathered = z.sequence_parallel
    return Node(
        forward=(*((comm("all_gather", "attn rope key", k_rope),) if gathered else ()), *kernels("F", "")),
        input_grad=(
            *kernels("B", " bwd"),
            *((comm("reduce_scatter", "attn rope key", k_rope),) if gathered else ()),
        ),
        grad_bytes=float(q + k + v + expanded),
    )

"""Transformer layers (Megatron-LM, arXiv 1909.08053, 2104.04473, 2205.05198), and their recomputation.

Norms come first in a block, and products are split by column and by row.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache

from simulator.config import Workload
from simulator.models.attention import attention_inputs, split_qkv
from simulator.models.context_parallelism import core_attention
from simulator.models.experts import experts, mixture
from simulator.models.latent_attention import Latent, latent, latent_projections, up_inputs
from simulator.models.linear import linear, with_summed_gradients
from simulator.models.norms import head_norms, norm
from simulator.models.parts import Checkpoint, Part, part_of
from simulator.models.pointwise import activation, rope
from simulator.models.recompute_by_op import recomputed_by_op
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Tensor, fuse, memory
from simulator.operations.shapes import ANY_SEAT, ANY_TURN, Seat, Turn
from simulator.program import Beside


def layer(
    workload: Workload,
    *,
    recompute: str | None = None,
    seat: Seat = ANY_SEAT,
    turn: Turn = ANY_TURN,
    number: int = 0,
) -> Part:
    """Return transformer layer ``number`` of the model, from 0 on.

    ``recompute`` (none, selective, full) stands in for the workload's own granularity.

    With GELU, ffn 4h, dropout, 2-byte activations and unfused attention a layer saves s b h (10 + 24/t + 5 a s / h t)
    bytes. With sequence parallelism it saves s b h / t (34 + 5 a s / h) (arXiv 2205.05198, equations 2 and 4).
    Selective recomputation of the core attention drops 5 a s / h, full recomputation keeps the input alone.
    """
    moe, chosen = workload.model.moe, workload.training.recompute
    mixed = experts(workload, seat) if moe is not None and moe.here(number) else None
    modules = {"none": (), "selective": tuple(dict.fromkeys(chosen.modules)), "ops": ("ops",), "full": ("layer",)}[
        recompute or chosen.granularity
    ]
    return _layer(shapes(workload, seat, turn, number), modules, latent(workload), mixed)


@lru_cache(maxsize=1024)
def _layer(z: FrameworkShapes, recompute: tuple[str, ...], a: Latent | None, x: Experts | None) -> Part:
    """Return a layer. It is cached, so that equal layers are one object and their blocks can be shared."""
    joined = a is not None or z.framework.joins_projections(z.position)
    attn_norm = norm(z, "attn.norm", saved="input", residual=True, readers=1 if joined else 3)
    down, up = latent_projections(z, a) if a else (_projections(z), ())
    core = core_attention(z)
    projection = linear(z, "attn", "proj", z.hidden, z.context_width, split="row", saved="attn.context", bias=z.bias)
    add, mlp_norm = _residual_norm(z)
    mixed = mixture(z, x) if x else None
    mlp = mixed.nodes if mixed else _mlp(z)
    nodes = (attn_norm, *down, *up, *core, projection, add, mlp_norm, *mlp, z.framework.residual(z, "mlp"))
    start, normed = Tensor("input", z.row_bytes), Tensor("mlp.normed", z.row_bytes)
    # Megatron-LM's --recompute-modules; those that drop their output are its CheckpointWithoutOutput.
    checkpoints = {
        "layer": Checkpoint(nodes, (start,)),
        "ops": Checkpoint(nodes, ()),
        "core_attn": Checkpoint(core, attention_inputs(z)),
        "layernorm": Checkpoint(
            (attn_norm, mlp_norm), (start, Tensor("attn.output", z.row_bytes)), ("attn.normed", "mlp.normed")
        ),
        "mla_up_proj": Checkpoint(up, up_inputs(up), ("attn.q", "attn.k", "attn.v")),
    }
    if mixed:
        act = mixed.activation
        checkpoints["moe"] = Checkpoint(mlp, (normed,))
        checkpoints["moe_act"] = Checkpoint((act,), act.saved, ("moe.act",))
        checkpoints["shared_experts"] = Checkpoint(mixed.shared, (normed,) if mixed.shared else ())
    else:
        checkpoints["mlp"] = Checkpoint(mlp, (normed,))
    chosen = [checkpoints[module] for module in recompute if module in checkpoints]
    part = part_of(z, "moe layer" if x else "layer", nodes, chosen, held_gradient_bytes=z.row_bytes, is_unit=True)
    if "ops" in recompute:
        return recomputed_by_op(z, x, nodes, part)
    ends = z.framework.recompute_ends_before[z.tp > 1]
    if z.tuning.adapters and "down" in z.tuning.adapters.targets:
        ends -= {"mlp.fc2", "mlp.fc2 bias"}  # the product is run again before its adapter
    if "layer" in recompute and ends and not z.dropout:
        needed = itertools.takewhile(lambda op: isinstance(op, Beside) or op.name not in ends, part.recompute)
        return replace(part, recompute=tuple(needed))
    return part


def _projections(z: FrameworkShapes) -> tuple[Node, ...]:
    """Return the operations from the normed rows to queries, keys and values with positions."""
    turn = z.framework.positions or rope
    return (*_qkv(z), *head_norms(z), *((turn(z),) if z.position == "rope" else ()))


def _qkv(z: FrameworkShapes) -> tuple[Node, ...]:
    """Return queries, keys and values as one product that is split, or as three."""
    shared = z.kv_width if z.kv_replicas > 1 else 0
    if z.framework.joins_projections(z.position):
        qkv = z.q_width + 2 * z.kv_width
        joined = linear(
            z,
            "attn",
            "qkv",
            qkv,
            z.hidden,
            split="column",
            saved="attn.normed",
            bias=z.bias,
            shared=2 * shared,
            wide=True,
        )
        if z.bias and z.framework.adds_qkv_bias:
            nbytes = float(z.element * z.tokens * qkv)
            add = memory("F", "attn.qkv bias", "bias", nbytes, nbytes, z.dtype)
            joined = replace(joined, forward=(*joined.forward, add))
        return joined, split_qkv(z)
    widths = {"q": (z.q_width, 0), "k": (z.kv_width, shared), "v": (z.kv_width, shared)}
    return with_summed_gradients(
        z,
        [
            linear(
                z,
                "attn",
                name,
                n,
                z.hidden,
                split="column",
                saved="attn.normed",
                bias=z.bias,
                shared=copies,
                wide=True,
                first=name == "q",
            )
            for name, (n, copies) in widths.items()
        ],
    )


def _mlp(z: FrameworkShapes) -> tuple[Node, ...]:
    """Return the MLP: two products, with the activation between them. The first may be two, of gate and up."""
    apart = z.gated and not z.framework.joins_projections(z.position)
    widths = {"gate": z.ffn, "up": z.ffn} if apart else {"fc1": z.ffn * (2 if z.gated else 1)}
    first = [
        linear(
            z, "mlp", name, n, z.hidden, split="column", saved="mlp.normed", bias=z.bias, wide=True, first=name != "up"
        )
        for name, n in widths.items()
    ]
    return (
        *with_summed_gradients(z, first),
        activation(z, "mlp", z.tokens * z.ffn),
        linear(z, "mlp", "fc2", z.hidden, z.ffn, split="row", saved="mlp.act", bias=z.bias, wide=not z.gated),
    )


def _residual_norm(z: FrameworkShapes) -> tuple[Node, Node]:
    """Return the attention block's residual and the norm after it, in one kernel where the framework has it."""
    readers = 2 if z.gated and not z.framework.joins_projections(z.position) else 1
    add = z.framework.residual(z, "attn")
    mlp_norm = norm(z, "mlp.norm", saved="attn.output", residual=True, readers=readers)
    if not z.framework.fuses_residual_and_norm:
        return add, mlp_norm
    first, second = add.forward[-1], mlp_norm.forward[0]
    return replace(add, forward=()), replace(mlp_norm, forward=(fuse("F", first, second, z.row_bytes, keep=True),))

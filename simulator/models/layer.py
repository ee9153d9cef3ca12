"""Transformer layers (Megatron-LM, arXiv 1909.08053, 2104.04473, 2205.05198), and their recomputation.

A layer has two blocks, a mixer and an MLP, or one of them. Norms come before a block, behind it, or both, and products
are split by column and by row.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from simulator.config import Workload
from simulator.mixers import MIXERS, Mixer
from simulator.models.captured import captured_layer
from simulator.models.cuda_graphs import captured_nodes, with_graphs
from simulator.models.experts import experts, mixture
from simulator.models.experts_beside_dense import beside_dense
from simulator.models.latent_attention import Latent, latent
from simulator.models.layer_inputs import layer_end
from simulator.models.linear import linear, with_summed_gradients
from simulator.models.mixing import mixing
from simulator.models.norms import norm
from simulator.models.parts import Checkpoint, Part, part_of
from simulator.models.pointwise import activation
from simulator.models.recompute_by_op import recomputed_by_op
from simulator.models.residual_streams import read_streams, write_streams
from simulator.models.reused_keys import lent_keys
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Tensor, fuse, memory
from simulator.operations.shapes import ANY_SEAT, ANY_TURN, Seat, Turn
from simulator.program import Beside


class LayerKind(NamedTuple):
    """Parts of a layer: a mixer with its sizes, and whether there is an MLP."""

    mixer: Mixer
    sizes: Any
    has_mlp: bool


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
    model, chosen = workload.model, workload.training.recompute
    if captured := model.captured_model:
        return captured_layer(workload, captured, number, recompute or chosen.granularity, turn)
    mlp = model.mlp(number)
    mixed = experts(workload, seat) if mlp == "moe" else None
    modules = recomputed_modules(workload, recompute)
    kind = LayerKind(model.mixer(number), model.mixer_sizes(number), mlp != "none")
    return _layer(shapes(workload, seat, turn, number), modules, kind, latent(workload), mixed)


def layer_kind(workload: Workload, number: int) -> object:
    """Return what tells layer ``number`` apart: layers of one kind are equal, where they recompute the same."""
    return number if workload.training.frozen else workload.model.alike(number)


def encoder_layer(shapes: FrameworkShapes, recompute: tuple[str, ...]) -> Part:
    """Return a layer of an encoder, whose sizes ``shapes`` are: attention and an MLP."""
    return replace(_layer(shapes, recompute, LayerKind(MIXERS["attention"], None, True), None, None), name="encoder")


def recomputed_modules(workload: Workload, granularity: str | None = None) -> tuple[str, ...]:
    """Return the modules of a layer that run again; ``granularity`` stands in for the workload's own."""
    chosen = workload.training.recompute
    by_granularity: dict[str, tuple[str, ...]] = {
        "none": (),
        "selective": tuple(dict.fromkeys(chosen.modules)),
        "ops": ("ops",),
        "full": ("layer",),
    }
    return by_granularity[granularity or chosen.granularity]


@dataclass(frozen=True)
class _Sublayer:
    """Operations of one block in order, up to the sum with its input, and what of it may run again.

    ``norm`` is the norm before it, if there is one, and ``normed`` what that keeps.
    """

    nodes: tuple[Node, ...] = ()
    norm: Node | None = None
    normed: str = ""
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def _layer(
    shapes: FrameworkShapes, recompute: tuple[str, ...], kind: LayerKind, latent: Latent | None, experts: Experts | None
) -> Part:
    """Return a layer. It is cached, so that equal layers are one object and their blocks can be shared."""
    first = _mixer_block(shapes, kind, latent)
    after_mixer = "attn.output" if first.nodes else "input"
    second = _mlp_block(shapes, experts, after_mixer) if kind.has_mlp else _Sublayer()
    if first.nodes and second.norm and shapes.framework.fuses_residual_and_norm and shapes.streams == 1:
        first, second = _fused(shapes, first, second)
    end = layer_end(shapes, "mlp.output") if shapes.layer_input else ()
    nodes = (*first.nodes, *second.nodes, *end)
    start = Tensor("input", shapes.stream_bytes)
    norms = [(one.norm, Tensor(one.normed, shapes.row_bytes)) for one in (first, second) if one.norm]
    # Megatron-LM's --recompute-modules; those that drop their output are its CheckpointWithoutOutput.
    checkpoints = {
        "layer": Checkpoint(nodes, (start, *lent_keys(shapes))),
        "ops": Checkpoint(nodes, ()),
        "layernorm": Checkpoint(
            tuple(node for node, _ in norms),
            tuple(tensor for _, tensor in norms),
            ("attn.normed", "mlp.normed"),
            apart=True,
        ),
        **first.checkpoints,
        **second.checkpoints,
    }
    chosen = [checkpoints[module] for module in recompute if module in checkpoints]
    part = part_of(
        shapes,
        "moe layer" if experts else "layer",
        nodes,
        chosen,
        held_gradient_bytes=shapes.stream_bytes,
        is_unit=True,
    )
    if shapes.graph_modules:
        in_graphs = captured_nodes(
            shapes.graph_modules,
            first.nodes,
            second.nodes,
            mamba=kind.mixer.name == "mamba2",
            has_experts=experts is not None,
        )
        part = with_graphs(part, in_graphs)
    if "ops" in recompute:
        return recomputed_by_op(shapes, experts, nodes, part)
    ends = shapes.framework.recompute_ends_before[shapes.tp > 1]
    adapted = shapes.tuning.adapters and "down" in shapes.tuning.adapters.targets
    if adapted or shapes.norm_place != "before":
        ends -= {"mlp.fc2", "mlp.fc2 bias"}  # an adapter, or the norm behind the block, needs what the product gives
    if "layer" in recompute and ends and not shapes.dropout:
        needed = itertools.takewhile(lambda op: isinstance(op, Beside) or op.name not in ends, part.recompute)
        return replace(part, recompute=tuple(needed))
    return part


def _mixer_block(shapes: FrameworkShapes, kind: LayerKind, latent: Latent | None) -> _Sublayer:
    """Return the block of a layer's mixer, without operations where it has none."""
    mixed = mixing(shapes, kind.mixer, kind.sizes, latent)
    if mixed is None:
        return _Sublayer()
    return _around(shapes, "attn", "input", mixed.nodes, mixed.readers, mixed.checkpoints)


def _mlp_block(shapes: FrameworkShapes, experts: Experts | None, entering: str) -> _Sublayer:
    """Return the block of a layer's MLP or experts; ``entering`` is the tensor that enters it."""
    readers = 2 if shapes.gated and not shapes.joins_products else 1
    mixed = mixture(shapes, experts) if experts else None
    nodes = mixed.nodes if mixed else _mlp(shapes)
    if experts and experts.beside_dense:
        nodes = beside_dense(shapes, experts, _mlp(shapes), nodes, entering)
    normed = Tensor("mlp.normed", shapes.row_bytes)
    checkpoints: dict[str, Checkpoint] = {}
    if mixed:
        act = mixed.activation
        checkpoints["moe"] = Checkpoint(nodes, (normed,))
        checkpoints["moe_act"] = Checkpoint((act,), act.saved, ("moe.act",))
        checkpoints["shared_experts"] = Checkpoint(mixed.shared, (normed,) if mixed.shared else ())
    else:
        checkpoints["mlp"] = Checkpoint(nodes, (normed,))
    return _around(shapes, "mlp", entering, nodes, readers, checkpoints)


def _around(
    shapes: FrameworkShapes,
    block: str,
    entering: str,
    nodes: tuple[Node, ...],
    readers: int,
    checkpoints: Mapping[str, Checkpoint],
) -> _Sublayer:
    """Return a block of these ``nodes``: norms around them, and the sum with what enters, or with residual streams."""
    if shapes.streams > 1:
        normed = f"{block}.streams read"
        before = norm(shapes, f"{block}.norm", saved=normed, residual=False, readers=readers)
        streams = read_streams(shapes, block, entering)
        return _Sublayer((streams, before, *nodes, write_streams(shapes, block)), before, normed, checkpoints)
    before = _before(shapes, block, entering, readers=readers)
    whole = (before, *nodes, *_behind(shapes, block), shapes.framework.residual(shapes, block))
    return _Sublayer(whole, before if shapes.norm_place != "after" else None, entering, checkpoints)


def _before(shapes: FrameworkShapes, block: str, entering: str, *, readers: int) -> Node:
    """Return the norm before a block; without one, the sum of the gradients through the block and round it."""
    if shapes.norm_place != "after":
        return norm(shapes, f"{block}.norm", saved=entering, residual=True, readers=readers)
    add = memory("B", f"{block} residual grad", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype)
    return Node(input_grad=(add,), grad_bytes=2 * shapes.row_bytes)


def _behind(shapes: FrameworkShapes, block: str) -> tuple[Node, ...]:
    """Return the norm on a block's output, where there is one."""
    if shapes.norm_place == "before":
        return ()
    return (norm(shapes, f"{block}.post_norm", saved=f"{block}.unnormed", residual=False),)


def _mlp(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the MLP: two products, with the activation between them. The first may be two, of gate and up."""
    apart = shapes.gated and not shapes.joins_products
    widths = {"gate": shapes.ffn, "up": shapes.ffn} if apart else {"fc1": shapes.ffn * (2 if shapes.gated else 1)}
    bias = "mlp" in shapes.biases
    first = [
        linear(
            shapes,
            "mlp",
            name,
            n,
            shapes.hidden,
            split="column",
            saved="mlp.normed",
            bias=bias,
            wide=True,
            first=name != "up",
        )
        for name, n in widths.items()
    ]
    return (
        *with_summed_gradients(shapes, first),
        activation(shapes, "mlp", shapes.tokens * shapes.ffn),
        linear(
            shapes,
            "mlp",
            "fc2",
            shapes.hidden,
            shapes.ffn,
            split="row",
            saved="mlp.act",
            bias=bias,
            wide=not shapes.gated,
        ),
    )


def _fused(shapes: FrameworkShapes, first: _Sublayer, second: _Sublayer) -> tuple[_Sublayer, _Sublayer]:
    """Return two blocks with the first one's sum and the norm before the second in one kernel."""
    assert second.norm is not None
    add, *rest = first.nodes[-1], *second.nodes[1:]
    fused = fuse("F", add.forward[-1], second.norm.forward[0], shapes.row_bytes, keep=True)
    normed = replace(second.norm, forward=(fused,))
    return (
        replace(first, nodes=(*first.nodes[:-1], replace(add, forward=()))),
        replace(second, nodes=(normed, *rest), norm=normed),
    )

"""The operations of a layer's mixer: those of attention, or those of another kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.mixers import Mixer, MixerProduct, Operations
from simulator.models.attention import attention_inputs, projected_widths, split_qkv
from simulator.models.context_parallelism import core_attention
from simulator.models.latent_attention import Latent, latent_projections, up_inputs
from simulator.models.linear import add_gradient, linear, with_summed_gradients
from simulator.models.norms import head_norms
from simulator.models.parts import Checkpoint
from simulator.models.pointwise import rope
from simulator.models.reused_keys import queries_alone, summed_key_gradients
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.weights import elements


@dataclass(frozen=True)
class Mixing:
    """Operations from the normed rows to a mixer's output, and what of them may run again.

    ``readers``: products that read the normed rows.
    """

    nodes: tuple[Node, ...]
    readers: int = 1
    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)


def mixing(shapes: FrameworkShapes, mixer: Mixer, sizes: Any, latent: Latent | None) -> Mixing | None:
    """Return the operations of ``mixer`` with its own ``sizes``; None of one that does nothing."""
    if mixer.attends:
        return _attention(shapes, latent, mixer.operations(shapes, sizes) if mixer.operations else ())
    if mixer.operations is None:
        return None
    return Mixing(_nodes(shapes, mixer.operations(shapes, sizes)))


def _attention(shapes: FrameworkShapes, latent: Latent | None, beside: Operations) -> Mixing:
    """Return attention, with the operations ``beside`` it that choose what a query sees."""
    joined = latent is not None or shapes.joins_products
    down, up = latent_projections(shapes, latent) if latent else (_projections(shapes), ())
    core = core_attention(shapes)
    chosen = _nodes(shapes, beside)
    context = "attn.gated" if shapes.gate else "attn.context"
    bias = "o" in shapes.biases
    projection = linear(
        shapes, "attn", "proj", shapes.hidden, shapes.context_width, split="row", saved=context, bias=bias
    )
    checkpoints = {
        "core_attn": Checkpoint(core, attention_inputs(shapes)),
        "mla_up_proj": Checkpoint(up, up_inputs(up), ("attn.q", "attn.k", "attn.v")),
    }
    if shapes.reuses_keys:
        core = (summed_key_gradients(shapes), *core)
    gate = (_gate(shapes),) if shapes.gate else ()
    readers = 1 if joined or shapes.reuses_keys else 3
    return Mixing((*down, *up, *chosen, *core, *gate, projection), readers, checkpoints)


def _gate(shapes: FrameworkShapes) -> Node:
    """Return the sigmoid of the gate, which comes with the queries, and its product with the context."""
    nbytes = float(shapes.element * shapes.tokens * shapes.context_width)
    return Node(
        forward=(memory("F", "attn.gate", "residual", 2 * nbytes, nbytes, shapes.dtype),),
        input_grad=(memory("B", "attn.gate bwd", "residual", 3 * nbytes, 2 * nbytes, shapes.dtype),),
        saved=(Tensor("attn.context", nbytes), Tensor("attn.gate", nbytes)),
        grad_bytes=3 * nbytes,
    )


def _projections(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return the operations from the normed rows to queries, keys and values with positions."""
    if shapes.reuses_keys:
        return queries_alone(shapes)
    turn = shapes.framework.positions or rope
    return (*_qkv(shapes), *head_norms(shapes), *((turn(shapes),) if shapes.position == "rope" else ()))


def _qkv(shapes: FrameworkShapes) -> tuple[Node, ...]:
    """Return queries, keys and values as one product that is split, or as three; a gate comes with the queries."""
    widths = projected_widths(shapes)
    shared = {name: width if shapes.kv_replicas > 1 and name != "q" else 0 for name, width in widths.items()}
    bias = "qkv" in shapes.biases
    if shapes.joins_products:
        qkv = sum(widths.values())
        joined = linear(
            shapes,
            "attn",
            "qkv",
            qkv,
            shapes.hidden,
            split="column",
            saved="attn.normed",
            bias=bias,
            shared=sum(shared.values()),
            wide=True,
        )
        if bias and shapes.framework.adds_qkv_bias:
            nbytes = float(shapes.element * shapes.tokens * qkv)
            add = memory("F", "attn.qkv bias", "bias", nbytes, nbytes, shapes.dtype)
            joined = replace(joined, forward=(*joined.forward, add))
        return joined, split_qkv(shapes)
    return with_summed_gradients(
        shapes,
        [
            linear(
                shapes,
                "attn",
                name,
                n,
                shapes.hidden,
                split="column",
                saved="attn.normed",
                bias=bias,
                shared=shared[name],
                wide=True,
                first=name == "q",
            )
            for name, n in widths.items()
        ],
    )


def _nodes(shapes: FrameworkShapes, operations: Operations) -> tuple[Node, ...]:
    """Return the ``operations`` of a mixer as operations of the framework, gradients of small weights added up too.

    Gradients of products of one input are summed where the second hands its own on.
    """
    nodes: list[Node] = []
    read: set[str] = set()
    for step in operations:
        if isinstance(step, MixerProduct):
            node = linear(
                shapes,
                "mixer",
                step.name,
                step.n,
                step.k,
                split=step.split,
                saved=step.saved,
                bias=step.bias,
                rows=step.rows,
                first=step.saved not in read,
            )
            if step.saved in read:
                nbytes = shapes.row_bytes
                add = memory("B", f"mixer.{step.name} input grad", "residual", 2 * nbytes, nbytes, shapes.dtype)
                node = replace(node, input_grad=(*node.input_grad, add), together=())
            read.add(step.saved)
            if step.detached:
                node = replace(node, input_grad=())
        else:
            gradient = add_gradient(shapes, step.weights[0].name, elements(step.weights)) if step.weights else ()
            node = replace(step, weight_grad=(*step.weight_grad, *gradient))
        nodes.append(node)
    return tuple(nodes)

"""An encoder of images in front of the text model: a product of patches, layers of its own width, a projection.

As in transformers 5.24: Qwen2.5-VL (modeling_qwen2_5_vl.py), Gemma 3 (modeling_gemma3.py, modeling_siglip.py) and Llama
4 (modeling_llama4.py). It runs on the first stage of a pipeline, in bf16 or whatever the job computes in.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from simulator.config import Workload
from simulator.config.encoder import Encoder
from simulator.models.layer import encoder_layer, recomputed_modules
from simulator.models.linear import add_gradient, linear
from simulator.models.norms import norm
from simulator.models.parts import Part, part_of
from simulator.models.pointwise import activation
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.operations.nodes import Node, memory
from simulator.operations.shapes import ANY_TURN, Turn
from simulator.operations.weights import Weight

#: Sizes and facts that an encoder shares with the text model. What else a text model has, an encoder has not.
_OF_THE_JOB = (
    *("framework", "tp", "vocab_parallel", "vocab", "cp", "cp_method", "cp_layout", "cp_rank"),
    *("dtype", "grad_dtype", "autocast", "adds_gradients", "fills_buckets", "fills_expert_buckets"),
    *("accumulates_in_product", "keeps_gradients", "delays_weight_grad"),
)


def encoder_parts(workload: Workload, encoder: Encoder, turn: Turn = ANY_TURN) -> tuple[Part, ...]:
    """Return the parts of an encoder in order: the product of patches, its layers, the projection.

    Layers are recomputed as those of the text model are, unless only some of these are.
    """
    base = shapes(workload, turn=turn)
    modules = recomputed_modules(workload, "none" if workload.training.recompute.layers is not None else None)
    layers = tuple(
        encoder_layer(encoder_shapes(base, encoder, encoder.sees(number)), modules) for number in range(encoder.layers)
    )
    whole = encoder_shapes(base, encoder, encoder.rows)
    return (
        part_of(whole, "encoder input", tuple(_input(whole, encoder))),
        *layers,
        part_of(whole, "encoder projection", tuple(_projection(base, whole, encoder))),
    )


def encoder_shapes(base: FrameworkShapes, encoder: Encoder, seen: int) -> FrameworkShapes:
    """Return the sizes of an encoder's layer, in which a row sees so many rows.

    Of the text model's ``base`` come the layout and the types of numbers. Windows are pieces of an image that do not
    see each other; the last may be smaller, which is neglected. Images of a sequence do not see each other.
    Tensor-parallel ranks have a part of the heads each, and all rows.
    """
    tokens = base.batch * encoder.images * encoder.rows
    heads, head_dim = encoder.heads // base.tp, encoder.hidden // encoder.heads
    return FrameworkShapes(
        **{name: getattr(base, name) for name in _OF_THE_JOB},
        sequence_parallel=False,
        overlaps_tp=False,
        batch=max(1, tokens // seen),
        seq=seen,
        tokens=tokens,
        rows=tokens,
        hidden=encoder.hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        ffn=encoder.ffn_hidden // base.tp,
        activation=encoder.activation,
        norm=encoder.norm,
        position=encoder.position,
        biases=frozenset(("qkv", "o", "mlp") if encoder.bias else ()),
        norm_by_operations=base.norm_by_operations and encoder.norm == "rmsnorm",
        bidirectional=True,
    )


def _input(whole: FrameworkShapes, encoder: Encoder) -> Iterator[Node]:
    """Yield the product of patches, which passes no gradient on, and what is added to its rows."""
    images = whole.tokens // encoder.rows
    patches = replace(whole, tokens=images * encoder.patches_per_image, rows=images * encoder.patches_per_image)
    product = linear(
        patches,
        "encoder",
        "patches",
        encoder.hidden,
        encoder.patch_values,
        split="none",
        saved="encoder.pixels",
        bias=encoder.patch_bias,
    )
    yield replace(product, input_grad=())
    tables: dict[str, tuple[int, ...]] = {"class_token": (encoder.hidden,)} if encoder.class_token else {}
    tables |= {"positions": (encoder.learned_positions, encoder.hidden)} if encoder.learned_positions else {}
    if tables:
        weights = tuple(Weight(f"encoder.{name}", shape, shape, whole.dtype) for name, shape in tables.items())
        added = sum(weight.elements for weight in weights)
        yield Node(
            forward=(memory("F", "encoder.positions", "residual", 2 * whole.row_bytes, whole.row_bytes, whole.dtype),),
            weight_grad=(
                memory("W", "encoder.positions wgrad", "reduce", whole.row_bytes, whole.element * added, whole.dtype),
                *add_gradient(whole, "encoder.positions", added),
            ),
            output_grad_bytes=whole.row_bytes,
            grad_bytes=whole.row_bytes,
            weights=weights,
        )
    if encoder.input_norm:
        yield norm(whole, "encoder.input_norm", saved="encoder.rows", residual=False)


def _projection(base: FrameworkShapes, whole: FrameworkShapes, encoder: Encoder) -> Iterator[Node]:
    """Yield the norm behind the layers, patches that become one row, and the products to the width of the text model.

    Every tensor-parallel rank does all of it. At last rows take the place of those tokens that stand for an image.
    """
    images = whole.tokens // encoder.rows
    tokens = images * encoder.tokens
    merged = replace(whole, tokens=tokens, rows=tokens, hidden=encoder.hidden)
    if encoder.output_norm:
        yield norm(whole, "encoder.output_norm", saved="encoder.output", residual=False)
    means = encoder.merge_by == "mean"
    if means and encoder.patches_per_token > 1:
        yield Node(
            forward=(memory("F", "encoder.means", "reduce", whole.row_bytes, merged.row_bytes, whole.dtype),),
            input_grad=(memory("B", "encoder.means bwd", "copy", merged.row_bytes, whole.row_bytes, whole.dtype),),
            grad_bytes=whole.row_bytes + merged.row_bytes,
        )
    if encoder.merge_norm:
        rows = (
            merged
            if means
            else replace(whole, tokens=images * encoder.patches_per_image, rows=images * encoder.patches_per_image)
        )
        rows = replace(rows, norm="rmsnorm", norm_by_operations=base.norm_by_operations)
        yield norm(rows, "encoder.merged_norm", saved="encoder.unmerged", residual=False)
    widths = (*encoder.widths, base.hidden)
    for number, (k, n) in enumerate(itertools.pairwise(widths)):
        yield linear(
            merged,
            "projector",
            f"fc{number + 1}",
            n,
            k,
            split="none",
            saved=f"projector.input {number + 1}",
            bias=encoder.projector_bias,
        )
        if number < len(encoder.projector):
            yield activation(replace(merged, activation="gelu"), f"projector {number + 1}", tokens * n)
    placed = replace(merged, hidden=base.hidden).row_bytes
    yield Node(
        forward=(memory("F", "encoder.place", "copy", placed, placed, whole.dtype),),
        input_grad=(memory("B", "encoder.place bwd", "copy", placed, placed, whole.dtype),),
        grad_bytes=2 * placed,
    )


def encoder_flops(workload: Workload, encoder: Encoder) -> float:
    """Return the forward FLOPs of a sequence's images: two per weight and row, and both products of attention."""
    first, *layers, last = encoder_parts(workload, encoder)
    patches = _products(first) * encoder.patches_per_image
    rows = sum(_products(part) for part in layers) * encoder.rows
    attended = sum(2 * encoder.rows * encoder.sees(number) * encoder.hidden for number in range(encoder.layers))
    return 2.0 * encoder.images * (patches + rows + _products(last) * encoder.tokens + attended)


def _products(part: Part) -> int:
    return sum(weight.whole_elements for weight in part.weights if weight.gradient_product)

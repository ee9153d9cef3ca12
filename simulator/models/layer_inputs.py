"""A second embedding of which each layer gets a part, as in Gemma 4's E2B and E4B.

Transformers 5.24, modeling_gemma4.py: ``get_per_layer_inputs``, ``project_per_layer_inputs`` and the end of
``Gemma4TextDecoderLayer``. Parts of all layers come from one table, and from a product of the first embedding.
"""

from __future__ import annotations

from dataclasses import replace

from simulator.config import Workload
from simulator.config.model_sections import LayerInputs
from simulator.models.linear import add_gradient, linear, new_gradient_bytes
from simulator.models.norms import norm
from simulator.models.pointwise import activation
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.weights import Weight
from simulator.program import Compute


def inputs_of_layers(shapes: FrameworkShapes, workload: Workload, sizes: LayerInputs) -> tuple[Node, ...]:
    """Return the parts of all layers: looked up, and the normed product of the embedding added.

    The embedding goes to that product and to the first layer: its two gradients are summed.
    """
    width = workload.model.layers * sizes.width
    table = Weight("layer_inputs.table.weight", (sizes.vocab, width), (sizes.vocab, width), shapes.dtype)
    nbytes = float(shapes.element * shapes.tokens * width)
    rows, row = replace(shapes, hidden=width), shapes.row_bytes
    embedded = Node(
        input_grad=(memory("B", "layer_inputs.embedding grad", "residual", 2 * row, row, shapes.dtype),),
        grad_bytes=2 * row,
    )
    lookup = Node(
        forward=(memory("F", "layer_inputs.lookup", "embedding", nbytes, nbytes, shapes.dtype),),
        weight_grad=(
            *(
                replace(op, name=op.name.replace("embedding.", "layer_inputs."))
                for op in shapes.framework.lookup_gradient(rows, table.elements, False)
                if isinstance(op, Compute)
            ),
            *add_gradient(shapes, "layer_inputs.lookup", table.elements),
        ),
        grad_bytes=nbytes + new_gradient_bytes(shapes, table.elements),
        output_grad_bytes=nbytes,
        weight_grad_bytes=new_gradient_bytes(shapes, table.elements),
        weights=(table,),
    )
    product = linear(
        shapes, "layer_inputs", "product", width, shapes.hidden, split="none", saved="layer_inputs.embedding"
    )
    parts = replace(shapes, rows=shapes.rows * workload.model.layers, hidden=sizes.width)
    added = Node(
        forward=(memory("F", "layer_inputs.add", "residual", 2 * nbytes, nbytes, shapes.dtype),),
        saved=(Tensor("layer_inputs.parts", nbytes),),
        grad_bytes=2 * nbytes,
    )
    return embedded, lookup, product, norm(parts, "layer_inputs.norm", saved="layer_inputs.raw", residual=False), added


def layer_end(shapes: FrameworkShapes, entering: str) -> tuple[Node, ...]:
    """Return the end of a layer: its part of the second embedding, weighed by the rows ``entering``, is added to them.

    The gradient of the part goes back with the layer's own.
    """
    width = shapes.layer_input
    elements = shapes.tokens * width
    nbytes = float(shapes.element * elements)
    gate = linear(shapes, "layer_input", "gate", width, shapes.hidden, split="none", saved=entering)
    weigh = activation(replace(shapes, activation="gelu"), "layer_input", elements)
    product = Node(
        forward=(memory("F", "layer_input.weigh", "residual", 2 * nbytes, nbytes, shapes.dtype),),
        input_grad=(memory("B", "layer_input.weigh bwd", "residual", 3 * nbytes, 2 * nbytes, shapes.dtype),),
        saved=(Tensor("layer_input.weights", nbytes),),
        grad_bytes=3 * nbytes,
    )
    back = linear(shapes, "layer_input", "projection", shapes.hidden, width, split="none", saved="layer_input.weighed")
    row = shapes.row_bytes
    add = Node(
        forward=(memory("F", "layer_input.residual", "residual", 2 * row, row, shapes.dtype),),
        input_grad=(memory("B", "layer_input.residual grad", "residual", 2 * row, row, shapes.dtype),),
        grad_bytes=2 * row,
    )
    return gate, weigh, product, back, norm(shapes, "layer_input.norm", saved="layer_input.raw", residual=False), add

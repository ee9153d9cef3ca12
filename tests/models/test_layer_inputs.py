"""Sizes of products and tensors of a second embedding, of which each layer gets a part, derived by hand.

The model is 256 wide, and works on 128 tokens in bf16. Each of 4 layers gets 16 numbers a token, all of them 64. Their
table has 512 rows. Gradients are added up in fp32.
"""

from __future__ import annotations

from simulator.config import load_workload
from simulator.models.layer_inputs import inputs_of_layers, layer_end
from simulator.models.shapes import shapes
from tests.support.jobs import job
from tests.support.layers import products, traffic
from tests.support.pattern_models import EDGE

TOKENS, HIDDEN, PART, TABLE = 128, 256, 16, 512 * 64
#: Bytes of the rows of the model, of all parts, and of one layer's.
ROW, ALL, ONE = 2 * TOKENS * HIDDEN, 2 * TOKENS * 4 * PART, 2 * TOKENS * PART


def test_parts_of_all_layers_are_looked_up_and_a_product_is_added() -> None:
    """Forward the table's rows are copied. The product of the embedding is 64 wide, normed over 16 each, and added to
    what was looked up. Backward the sum hands on its gradient as it is. A norm reads its input and a gradient. The
    table's gradient begins with zeros, of which rows are added to. The embedding itself has two gradients: of the
    product and of the first layer."""
    work = load_workload(job(model=EDGE))
    sizes = work.model.layer_inputs
    assert sizes is not None
    nodes = inputs_of_layers(shapes(work), work, sizes)
    assert [kernel for node in nodes for kernel in traffic(node.forward)] == [
        ("layer_inputs.lookup", ALL, ALL),
        ("layer_inputs.norm", ALL, ALL),
        ("layer_inputs.add", 2 * ALL, ALL),
    ]
    assert [kernel for node in nodes[::-1] for kernel in traffic(node.input_grad)] == [
        ("layer_inputs.norm bwd", 2 * ALL, ALL),
        ("layer_inputs.embedding grad", 2 * ROW, ROW),
    ]
    embedded, lookup, product, norm, added = nodes
    assert products(product.forward) == {"layer_inputs.product": (TOKENS, 64, HIDDEN)}
    assert products(product.input_grad) == {"layer_inputs.product dgrad": (TOKENS, HIDDEN, 64)}
    assert products(product.weight_grad) == {"layer_inputs.product wgrad": (64, HIDDEN, TOKENS)}
    assert traffic(lookup.weight_grad) == [
        ("layer_inputs.lookup zero grad", 0, 2 * TABLE),
        ("layer_inputs.lookup wgrad", ALL, ALL),
        ("layer_inputs.lookup grad add", (2 + 4) * TABLE, 4 * TABLE),
    ]
    # Gradients of what comes out and goes in; of the table that of its rows, and its own.
    held = [2 * ROW, ALL + 2 * TABLE, ALL + ROW, 2 * ALL, 2 * ALL]
    assert [node.grad_bytes for node in (embedded, lookup, product, norm, added)] == held
    assert [(one.name, one.nbytes) for node in nodes for one in node.saved] == [
        ("layer_inputs.embedding", ROW),
        ("layer_inputs.raw", ALL),
        ("layer_inputs.parts", ALL),
    ]


def test_a_layer_ends_with_its_part_weighed_by_its_rows() -> None:
    """Rows become 16 numbers a token through GELU, times the layer's part, and 256 again, normed and added. Of a
    product of two tensors each has a gradient, from the other and the product's own: 3 are read, 2 written."""
    nodes = layer_end(shapes(load_workload(job(model=EDGE))), "rows")
    assert [products(node.forward) for node in nodes if products(node.forward)] == [
        {"layer_input.gate": (TOKENS, PART, HIDDEN)},
        {"layer_input.projection": (TOKENS, HIDDEN, PART)},
    ]
    assert [kernel for node in nodes for kernel in traffic(node.forward)] == [
        ("layer_input.gelu", ONE, ONE),
        ("layer_input.weigh", 2 * ONE, ONE),
        ("layer_input.norm", ROW, ROW),
        ("layer_input.residual", 2 * ROW, ROW),
    ]
    assert [kernel for node in nodes[::-1] for kernel in traffic(node.input_grad)] == [
        ("layer_input.residual grad", 2 * ROW, ROW),
        ("layer_input.norm bwd", 2 * ROW, ROW),
        ("layer_input.weigh bwd", 3 * ONE, 2 * ONE),
        ("layer_input.gelu bwd", 2 * ONE, ONE),
    ]
    gate, gelu, weigh, back, norm, add = nodes
    held = [ONE + ROW, 2 * ONE, 3 * ONE, ROW + ONE, 2 * ROW, 2 * ROW]
    assert [node.grad_bytes for node in (gate, gelu, weigh, back, norm, add)] == held
    assert [(one.name, one.nbytes) for node in nodes for one in node.saved] == [
        ("rows", ROW),
        ("layer_input.pre", ONE),
        ("layer_input.weights", ONE),
        ("layer_input.weighed", ONE),
        ("layer_input.raw", ROW),
    ]

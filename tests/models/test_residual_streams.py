"""Several residual streams: what their kernels read and write, and what is alive, derived by hand.

4 streams of 128 tokens, 256 wide, in bf16. A token has 24 numbers in fp32: 4 to read streams with, 4 to write to them
with, 16 to mix them with. The head has 4.
"""

from __future__ import annotations

import pytest

from simulator.config import load_workload
from simulator.models.residual_streams import first_streams, last_streams, read_streams, write_streams
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.operations.nodes import Node
from tests.support.jobs import job
from tests.support.layers import products, traffic
from tests.support.pattern_models import LLAMA, SEQ, V4

N, HIDDEN = 4, 256
ROW, STREAMS = 2 * SEQ * HIDDEN, N * 2 * SEQ * HIDDEN


def sizes() -> FrameworkShapes:
    return shapes(load_workload(job(model=LLAMA | V4 | {"mixers": ["shared_key"], "residual_streams": N})))


def read(name: str) -> Node:
    return last_streams(sizes()) if name == "head.streams" else read_streams(sizes(), "attn", "attn.input")


@pytest.mark.parametrize(("name", "numbers"), [("attn.streams", 24), ("head.streams", 4)])
def test_a_block_reads_a_weighed_sum(name: str, numbers: int) -> None:
    """One product of all streams makes the numbers; a kernel reads these and their scales and writes them. The sum
    reads streams and numbers, and writes a row. Backward it reads the streams, the gradient of the row, numbers, and
    the streams' own gradient. The product's gradient is added to that. 24 base numbers have a gradient each."""
    node, each = read(name), 4 * SEQ * numbers
    wide = N * HIDDEN
    assert products(node.forward) == {name: (SEQ, numbers, wide)}
    assert products(node.input_grad) == {f"{name} dgrad": (SEQ, wide, numbers)}
    assert products(node.weight_grad) == {f"{name} wgrad": (numbers, wide, SEQ)}
    assert traffic(node.forward) == [
        (f"{name} weigh", 2 * each, each),
        (f"{name} sum", STREAMS + each, ROW),
    ]
    assert traffic(node.input_grad) == [
        (f"{name} sum bwd", 2 * STREAMS + ROW + each, STREAMS),
        (f"{name} weigh bwd", 2 * each, each),
        (f"{name} grad", 2 * STREAMS, STREAMS),
    ]
    assert traffic(node.weight_grad)[0] == (f"{name} base wgrad", each, 4 * numbers)
    # Streams, their gradient, and the product's; the gradient of the row.
    assert (node.grad_bytes, node.output_grad_bytes) == (3 * STREAMS + ROW, each)
    assert [one.nbytes for one in node.saved] == [STREAMS, each]


def test_a_block_writes_to_streams_that_are_mixed() -> None:
    """Streams, the block's output and 4 + 16 numbers a token are read, streams written. Backward gradients of all three
    are written, from the streams' gradient and what was read forward."""
    node, numbers = write_streams(sizes(), "attn"), 4 * SEQ * (4 + 16)
    assert traffic(node.forward) == [("attn.streams mix", STREAMS + ROW + numbers, STREAMS)]
    assert traffic(node.input_grad) == [("attn.streams mix bwd", 2 * STREAMS + ROW + numbers, STREAMS + ROW + numbers)]
    assert (node.grad_bytes, node.output_grad_bytes) == (2 * STREAMS + ROW, STREAMS)
    assert [one.nbytes for one in node.saved] == [ROW, numbers]


def test_streams_begin_as_copies_of_the_embedding() -> None:
    """A row is read and written 4 times; the gradients of all 4 are summed to one."""
    node = first_streams(sizes())
    assert traffic(node.forward) == [("embedding.streams", ROW, STREAMS)]
    assert traffic(node.input_grad) == [("embedding.streams bwd", STREAMS, ROW)]
    assert node.grad_bytes == STREAMS + ROW

"""Several residual streams in place of one: hyper-connections (arXiv 2409.19606, 2512.24880), as in DeepSeek-V4.

A block reads a weighed sum of the streams, and its output is added to all of them as they are mixed. The weights of a
token follow from its streams by one product (transformers 5.24, modeling_deepseek_v4.py,
``DeepseekV4HyperConnection``). Kernels are fused as in arXiv 2512.24880, section 4.3, with every tensor read once. They
are assumed to reach the bandwidth of sums of rows of tokens.
"""

from __future__ import annotations

from simulator.models.linear import add_gradient, product
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Tensor, memory
from simulator.operations.weights import Weight
from simulator.units import FP32_BYTES


def read_streams(shapes: FrameworkShapes, block: str, entering: str) -> Node:
    """Return the sum of the streams that ``block`` reads, and the numbers that weigh and mix streams.

    ``entering`` names the streams. For n streams a token has n numbers to read, n to write and n^2 to mix. The kernel
    that makes the last makes them doubly stochastic.
    """
    n = shapes.streams
    return _read(shapes, f"{block}.streams", entering, n * (n + 2), scales=3)


def write_streams(shapes: FrameworkShapes, block: str) -> Node:
    """Return the mixed streams with the output of ``block`` added to each."""
    row, streams = shapes.row_bytes, shapes.stream_bytes
    numbers = float(FP32_BYTES * shapes.rows * shapes.streams * (shapes.streams + 1))
    return Node(
        forward=(memory("F", f"{block}.streams mix", "combine", streams + row + numbers, streams, shapes.dtype),),
        # Gradients of the streams, of the output, and of the mixing numbers.
        input_grad=(
            memory(
                "B",
                f"{block}.streams mix bwd",
                "combine",
                2 * streams + row + numbers,
                streams + row + numbers,
                shapes.dtype,
            ),
        ),
        saved=(Tensor(f"{block}.block output", row), Tensor(f"{block}.mixing", numbers)),
        grad_bytes=2 * streams + row,
        output_grad_bytes=streams,
    )


def first_streams(shapes: FrameworkShapes) -> Node:
    """Return the copies of the embedding that the streams begin with."""
    row, streams = shapes.row_bytes, shapes.stream_bytes
    return Node(
        forward=(memory("F", "embedding.streams", "copy", row, streams, shapes.dtype),),
        input_grad=(memory("B", "embedding.streams bwd", "combine", streams, row, shapes.dtype),),
        grad_bytes=streams + row,
    )


def last_streams(shapes: FrameworkShapes) -> Node:
    """Return the weighed sum of the streams that the head reads."""
    return _read(shapes, "head.streams", "head.streams input", shapes.streams, scales=1)


def _read(shapes: FrameworkShapes, name: str, entering: str, numbers: int, *, scales: int) -> Node:
    """Return a weighed sum of the streams, and so many ``numbers`` of each token, which a product makes of all streams.

    The product has no norm of its own: each row of its result is divided by the length of the streams.
    """
    rows, width = shapes.rows, shapes.streams * shapes.hidden
    row, streams = shapes.row_bytes, shapes.stream_bytes
    weighing = float(FP32_BYTES * rows * numbers)
    partial = numbers if shapes.sequence_parallel else 0
    shapes_of = {"weight": (numbers, width), "base": (numbers,), "scale": (scales,)}
    weights = tuple(
        Weight(
            f"{name}.{tensor}",
            shape,
            shape,
            shapes.dtype,
            partial_rows=min(partial, shape[0]),
            gradient_product=f"{name} wgrad" if tensor == "weight" else "",
        )
        for tensor, shape in shapes_of.items()
    )
    params = numbers * width
    return Node(
        forward=(
            product(shapes, name, "fwd", rows, numbers, width),
            memory("F", f"{name} weigh", "reduce", 2 * weighing, weighing, "fp32"),
            memory("F", f"{name} sum", "combine", streams + weighing, row, shapes.dtype),
        ),
        input_grad=(
            # The gradient of the sum goes to the streams and to their weights; the streams' own is added to it.
            memory("B", f"{name} sum bwd", "combine", 2 * streams + row + weighing, streams, shapes.dtype),
            memory("B", f"{name} weigh bwd", "reduce", 2 * weighing, weighing, "fp32"),
            product(shapes, name, "dgrad", rows, width, numbers),
            memory("B", f"{name} grad", "residual", 2 * streams, streams, shapes.dtype),
        ),
        weight_grad=(
            product(shapes, name, "wgrad", numbers, width, rows),
            memory("W", f"{name} base wgrad", "reduce", weighing, FP32_BYTES * numbers, "fp32", numbers),
            *add_gradient(shapes, name, params),
        ),
        saved=(Tensor(entering, streams), Tensor(f"{name} numbers", weighing)),
        saved_for_weights=(Tensor(entering, streams),),
        grad_bytes=3 * streams + row,
        output_grad_bytes=weighing,
        weights=weights,
    )

"""FLOPs of PyTorch's operations from the shapes of their tensors, 2 per multiply-add.

The counts are those of ``torch.utils.flop_counter``, which counts attention as if nothing were masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

TensorSizes = Sequence[int]
#: Products that attention's backward pass does for each of the forward pass's two (arXiv 2205.14135, section 3.2).
_BACKWARD = 2.5


def _product(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """The last two shapes are factors; batches stand before rows and columns."""
    a, b = [shape for shape in shapes if len(shape) >= 2][-2:]
    return 2.0 * prod(a) * b[-1]


def _convolution(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """Each output takes the weights of one output channel."""
    weight, out = shapes[1], results[0]
    return 2.0 * prod(out) * prod(weight[1:])


def _convolution_backward(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """Gradients of input and weights take as much as the forward pass each."""
    out, weight = shapes[0], shapes[2]
    return 4.0 * prod(out) * prod(weight[1:])


def _attention(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """Queries times keys, and scores times values; heads stand before tokens."""
    query, key, value = shapes[:3]
    pairs = prod(query[:-1]) * key[-2]
    return 2.0 * pairs * (query[-1] + value[-1])


def _attention_backward(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """The gradient of the output stands before queries, keys and values."""
    return _BACKWARD * _attention(shapes[1:], results)


_COUNTS: dict[str, Callable[[Sequence[TensorSizes], Sequence[TensorSizes]], float]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"), _product),
    **dict.fromkeys(("cudnn_convolution", "miopen_convolution", "convolution", "_convolution", "conv2d"), _convolution),
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        _attention_backward,
    ),
}


def operation_flops(name: str, shapes: Sequence[object], results: Sequence[object]) -> float:
    """Return the FLOPs of an operation; 0 where it does no products, or its shapes are not told.

    >>> operation_flops("aten::mm", [[4, 8], [8, 2]], [[4, 2]])
    128.0
    """
    count = _COUNTS.get(name.removeprefix("aten::"))
    if count is None:
        return 0.0
    try:
        return count([_shape(shape) for shape in shapes], [_shape(shape) for shape in results])
    except (IndexError, TypeError, ValueError):
        return 0.0


def _shape(value: object) -> TensorSizes:
    """Return the sizes of a tensor; none of what is no tensor."""
    is_shape = isinstance(value, list) and all(isinstance(size, int) for size in value)
    return value if is_shape and isinstance(value, list) else ()

"""FLOPs of PyTorch's operations from the shapes of their tensors, 2 per multiply-add.

The counts are those of ``torch.utils.flop_counter``, which counts attention as if nothing were masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

TensorSizes = Sequence[int]
_Count = Callable[[Sequence[TensorSizes], Sequence[TensorSizes]], float]
#: Products that attention's backward pass does for each of the forward pass's two (arXiv 2205.14135, section 3.2).
_BACKWARD = 2.5


def _product(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """The first two shapes are factors, before scales and a buffer of the result; batches stand before rows."""
    a, b = shapes[:2]
    return 2.0 * prod(a) * b[-1]


def _product_and_sum(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """The summand stands before the factors."""
    return _product(shapes[1:], results)


def _convolution(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """Each output takes the weights of one output channel."""
    weight, out = shapes[1], results[0]
    return 2.0 * prod(out) * prod(weight[1:])


def _convolution_backward(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """Gradients of input and weights take as much as the forward pass each; one that is not asked for has no shape."""
    out, weight = shapes[0], shapes[2]
    gradients = sum(bool(shape) for shape in results[:2])
    return 2.0 * gradients * prod(out) * prod(weight[1:])


def _attention(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
    """Queries times keys, and scores times values; heads stand before tokens."""
    query, key, value = shapes[:3]
    pairs = prod(query[:-1]) * key[-2]
    return 2.0 * pairs * (query[-1] + value[-1])


def _tokens_first(lengths: int) -> _Count:
    """Return the count of attention whose tokens stand before heads.

    At the place ``lengths`` are the ends of sequences, where these are packed. Sequences count as equally long.
    """

    def count(shapes: Sequence[TensorSizes], results: Sequence[TensorSizes]) -> float:
        query, key, value = shapes[:3]
        sequences = max(prod(shapes[lengths]) - 1, 1) if len(shapes) > lengths else 1
        pairs = prod(query[:-1]) * key[-3] / sequences
        return 2.0 * pairs * (query[-1] + value[-1])

    return count


def _backward(forward: _Count) -> _Count:
    """Return the count of attention's backward pass, where the gradient of the output stands first."""
    return lambda shapes, results: _BACKWARD * forward(shapes[1:], results)


#: Operation -> its count. Arguments are in the order of pytorch's ``native_functions.yaml``. Attention is an operation
#: for each kind of kernel, and inside it the kernel's own.
_COUNTS: dict[str, _Count] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addmm_", "baddbmm_"), _product_and_sum),
    **dict.fromkeys(("cudnn_convolution", "miopen_convolution", "convolution", "_convolution", "conv2d"), _convolution),
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_cudnn_attention_forward": _attention,
    "_flash_attention_forward": _tokens_first(lengths=3),
    "_efficient_attention_forward": _tokens_first(lengths=4),
    "_scaled_dot_product_flash_attention_backward": _backward(_attention),
    "_scaled_dot_product_efficient_attention_backward": _backward(_attention),
    "_scaled_dot_product_cudnn_attention_backward": _backward(_attention),
    "_cudnn_attention_backward": _backward(_attention),
    "_flash_attention_backward": _backward(_tokens_first(lengths=5)),
    "_efficient_attention_backward": _backward(_tokens_first(lengths=5)),
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

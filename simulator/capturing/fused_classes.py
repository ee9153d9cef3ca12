"""The class of memory-bound kernels that a kernel of Inductor's is of, by the operations that it computes.

Profiles hold speeds of Inductor's kernels by these classes: section ``inductor`` of ``kernels.memory``.
"""

from __future__ import annotations

from collections.abc import Set

from simulator.program import Memory

#: Operation among those of a kernel without sums over rows -> its class forward and backward, the first that is there.
_POINTWISE = {
    **dict.fromkeys(("erf", "tanh"), ("gelu", "gelu_bwd")),
    **dict.fromkeys(("sin", "cos"), ("rope", "rope")),
    **dict.fromkeys(("embedding", "index"), ("embedding", "embedding")),
}
#: Operation among those of a kernel with sums, or that it comes from -> its class forward and backward.
_SUMS = {
    **dict.fromkeys(("_log_softmax", "_log_softmax_backward_data"), ("loss", "loss_bwd")),
    **dict.fromkeys(("_softmax", "_softmax_backward_data"), ("softmax", "softmax_bwd")),
    **dict.fromkeys(("var_mean", "native_layer_norm", "native_layer_norm_backward"), ("norm", "norm_bwd")),
    "rsqrt": ("rms_norm", "rms_norm_bwd"),
    # The gradients of a norm are sums of products; those of a bias are sums alone.
    "mul": ("reduce", "rms_norm_bwd"),
}


#: Operations of which casts to 8 bits are made, with their scales and changes of order.
_CASTS = {
    *("abs", "max", "amax", "clamp", "reciprocal", "mul", "_to_copy", "to", "convert_element_type", "_scaled_mm"),
    *("view", "reshape", "_unsafe_view", "t", "permute", "transpose", "clone", "maximum", "minimum", "clamp_min"),
    *("clamp_max", "expand", "alias", "detach", "div", "log2", "floor", "exp2", "full", "ones", "scalar_tensor"),
}


def fused_kernel(
    operations: Set[str],
    *,
    read: float,
    written: float,
    elements: int,
    row: int,
    dtype: str,
    backward: bool,
    narrow: Set[bool] = frozenset(),
) -> Memory:
    """Return a kernel that computes ``operations``, by their names in ATen before and after they are taken apart.

    ``read`` and ``written``: its bytes. ``elements``: that it works on. ``row``: elements of which it takes a sum or
    the largest; 1 of a kernel without such. ``narrow``: for tensors in 8 bits that it writes, whether their rows and
    columns are changed over.

    >>> fused_kernel({"mul", "silu"}, read=8.0, written=4.0, elements=2, row=1, dtype="bf16", backward=False).op
    'activation'
    >>> fused_kernel({"mul", "sum"}, read=8.0, written=4.0, elements=4, row=2, dtype="bf16", backward=True).op
    'rms_norm_bwd'
    """
    width = row if row > 1 else 0
    if operations & {"inductor_random", "rand"}:
        return Memory("dropout", read, written, dtype=dtype, elements=float(elements))
    if op := _around_products(operations, row > 1, narrow):
        return Memory(op, read, written, dtype=dtype, width=width)
    by_operation, usual = (_SUMS, ("reduce", "reduce")) if row > 1 else (_POINTWISE, ("activation", "activation_bwd"))
    classes = next((pair for name, pair in by_operation.items() if name in operations), usual)
    return Memory(classes[backward], read, written, dtype=dtype, width=width)


def _around_products(operations: Set[str], sums: bool, narrow: Set[bool]) -> str:
    """Return the class of a kernel that finds scales for 8 bits, casts to them, or applies them; empty of any other.

    A norm, its gradient and their largest magnitude in one kernel are a norm.
    """
    alone = operations <= _CASTS
    if sums and operations & {"rsqrt", "sum", "mean"}:
        return ""
    if narrow and sums:
        return "fp8_both_rows" if len(narrow) > 1 else "fp8_rows"
    if narrow:
        return "fp8_both" if len(narrow) > 1 or not alone else "fp8_turned" if True in narrow else "fp8_cast"
    if not sums and alone and "reciprocal" in operations:
        return "fp8_rescale"
    if not sums or not operations & {"max", "amax"} or "abs" not in operations:
        return ""
    if "clamp" in operations:
        return "fp8_scale"
    return "fp8_amax" if alone else "fp8_amax_made"

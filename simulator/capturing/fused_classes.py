"""Which class of memory-bound kernels a kernel of Inductor's is of, by the operations that it computes.

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
    **dict.fromkeys(("_softmax", "_softmax_backward_data", "exp"), ("softmax", "softmax_bwd")),
    **dict.fromkeys(("var_mean", "native_layer_norm", "native_layer_norm_backward"), ("norm", "norm_bwd")),
    "rsqrt": ("rms_norm", "rms_norm_bwd"),
    # The gradients of a norm are sums of products; those of a bias are sums alone.
    "mul": ("reduce", "rms_norm_bwd"),
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
) -> Memory:
    """Return a kernel that computes ``operations``, by their names in ATen before and after they are taken apart.

    ``read`` and ``written``: its bytes. ``elements``: that it works on. ``row``: elements of which it takes a sum; 1 of
    a kernel without sums.

    >>> fused_kernel({"mul", "silu"}, read=8.0, written=4.0, elements=2, row=1, dtype="bf16", backward=False).op
    'activation'
    >>> fused_kernel({"mul", "sum"}, read=8.0, written=4.0, elements=4, row=2, dtype="bf16", backward=True).op
    'rms_norm_bwd'
    """
    if operations & {"inductor_random", "rand"}:
        return Memory("dropout", read, written, dtype=dtype, elements=float(elements))
    known, usual = (_SUMS, ("reduce", "reduce")) if row > 1 else (_POINTWISE, ("activation", "activation_bwd"))
    classes = next((pair for name, pair in known.items() if name in operations), usual)
    return Memory(classes[backward], read, written, dtype=dtype, width=row if row > 1 else 0)

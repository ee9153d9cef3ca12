"""Kernels that an operation of PyTorch launches on a GPU, from the shapes of its tensors.

Operations are ATen's after autograd, as a dispatch mode sees them. Which class of kernels bounds each is that of
PyTorch's CUDA sources (aten/src/ATen/native/cuda).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from simulator.capturing import row_kernels
from simulator.capturing.calls import Call, Launch, any_type, moved_bytes, type_name
from simulator.errors import InputError
from simulator.program import Attention, GroupedMatmul, Kernel, Matmul, Memory


def launches(func: Any, call: Call) -> tuple[Launch, ...]:
    """Return the kernels of ``call``, of PyTorch's operation ``func``; none of one that only allocates.

    Raises `InputError` where the operation computes, and its kernels here do not.
    """
    from torch.utils.flop_counter import flop_registry

    if call.name in _NOTHING:
        return ()
    special = _SPECIAL.get(call.name)
    kernels = special(call) if special else (Launch(_by_memory(call)),)
    counted = flop_registry.get(func.overloadpacket)
    if counted is not None and not any(launch.kernel.flops for launch in kernels):
        flops = counted(*call.args, **call.kwargs, out_val=call.outputs[0])
        if flops:
            raise InputError(
                f"{call.name} computes {flops:.3g} FLOPs, and is not simulated", allowed=", ".join(_SPECIAL)
            )
    return kernels


# Products.


def _mm(call: Call) -> tuple[Launch, ...]:
    a, b = call.inputs[-2:]
    return (Launch(Matmul(a.shape[0], b.shape[1], a.shape[1], dtype=type_name(a))),)


def _scaled(call: Call) -> tuple[Launch, ...]:
    """Return a product in 8 bits, whose operands have a scale each or one for each row."""
    a, b, scale = call.inputs[:3]
    scaling = "tensor" if scale.numel() == 1 else "rows"
    sizes = a.shape[0], b.shape[1], a.shape[1]
    return (Launch(Matmul(*sizes, dtype="fp8", out_dtype=type_name(call.outputs[0]), scaling=scaling)),)


def _bmm(call: Call) -> tuple[Launch, ...]:
    a, b = call.inputs[-2:]
    return (Launch(Matmul(a.shape[1], b.shape[2], a.shape[2], a.shape[0], dtype=type_name(a))),)


def _vector(call: Call) -> tuple[Launch, ...]:
    a, b = call.inputs[-2:]
    return (Launch(Matmul(a.shape[0] if a.dim() == 2 else 1, 1, b.shape[0], dtype=type_name(a))),)


def _grouped(call: Call) -> tuple[Launch, ...]:
    """Return grouped products; every group gets the same share, as no router has chosen."""
    a, b = call.inputs[:2]
    groups = call.outputs[0].shape[0] if call.outputs[0].dim() == 3 else max(a, b, key=lambda one: one.dim()).shape[0]
    if a.dim() == 2 and b.dim() == 2:  # the weight gradient: groups are along k
        total, n, k = a.shape[1], a.shape[0], b.shape[1]
        role = "wgrad"
    else:
        rows, matrix = (a, b) if b.dim() == 3 else (b, a)
        total, n, k = rows.shape[0], matrix.shape[2], matrix.shape[1]
        role = "fwd"
    return (Launch(GroupedMatmul(_shares(total, groups), n, k, dtype=type_name(a), role=role)),)


def _shares(total: int, groups: int) -> tuple[int, ...]:
    each, more = divmod(total, groups)
    return tuple(each + (number < more) for number in range(groups))


class _Convolution(NamedTuple):
    """A convolution as a product per group: one row for each place, one column for each kind of output."""

    m: int
    n: int
    k: int
    groups: int


def _sizes(x: Any, y: Any, weight: Any, transposed: bool, groups: int) -> _Convolution:
    places = x if transposed else y
    per_place = math.prod(places.shape[2:]) * places.shape[0]
    inside = math.prod(weight.shape[2:])
    if transposed:
        return _Convolution(per_place, weight.shape[1] * inside, weight.shape[0] // groups, groups)
    return _Convolution(per_place, weight.shape[0] // groups, weight.shape[1] * inside, groups)


def _convolution(call: Call) -> tuple[Launch, ...]:
    x, weight = call.inputs[:2]
    transposed, groups = call.argument(6, "transposed"), call.argument(8, "groups")
    c = _sizes(x, call.outputs[0], weight, transposed, groups)
    product = Launch(Matmul(c.m, c.n, c.k, c.groups, dtype=type_name(x)))
    if call.argument(2, "bias") is None:
        return (product,)
    nbytes = moved_bytes(call.outputs[0])
    return product, Launch(Memory("bias", nbytes, nbytes, dtype=type_name(x)), label=" bias")


def _convolution_backward(call: Call) -> tuple[Launch, ...]:
    grad, x, weight = call.inputs[:3]
    transposed, groups, mask = (
        call.argument(place, name) for place, name in ((7, "transposed"), (9, "groups"), (10, "output_mask"))
    )
    c, dtype = _sizes(x, grad, weight, transposed, groups), type_name(x)
    kernels = (
        Launch(Matmul(c.m, c.k, c.n, c.groups, dtype=dtype, role="dgrad"), (0,)),
        Launch(Matmul(c.n, c.k, c.m, c.groups, dtype=dtype, role="wgrad"), (1,), " weight"),
        Launch(Memory("reduce", moved_bytes(grad), float(grad.element_size() * weight.shape[0]), dtype=dtype), (2,)),
    )
    return tuple(kernel for kernel, wanted in zip(kernels, mask, strict=True) if wanted)


# Attention.


def _attention(q: Any, k: Any, v: Any, *, causal: bool, dropout: float, bias: bool, backward: bool) -> Launch:
    """Return an attention kernel of tensors of (batch, heads, length, width)."""
    return Launch(
        Attention(
            q.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            k.shape[2],
            q.shape[3],
            causal=causal,
            backward=backward,
            dtype=type_name(q),
            v_head_dim=0 if v.shape[3] == q.shape[3] else v.shape[3],
            dropout=dropout > 0,
            bias=bias,
        )
    )


def _flash(call: Call) -> tuple[Launch, ...]:
    dropout, causal = call.argument(3, "dropout_p", 0.0), call.argument(4, "is_causal", False)
    return (_attention(*call.inputs[:3], causal=causal, dropout=dropout, bias=False, backward=False),)


def _flash_backward(call: Call) -> tuple[Launch, ...]:
    dropout, causal = call.argument(10, "dropout_p", 0.0), call.argument(11, "is_causal", False)
    return (_attention(*call.inputs[1:4], causal=causal, dropout=dropout, bias=False, backward=True),)


def _efficient(call: Call) -> tuple[Launch, ...]:
    bias, dropout = call.argument(3, "attn_bias"), call.argument(5, "dropout_p", 0.0)
    causal = call.argument(6, "is_causal", False)
    q, k, v = call.inputs[:3]
    return (_attention(q, k, v, causal=causal, dropout=dropout, bias=bias is not None, backward=False),)


def _efficient_backward(call: Call) -> tuple[Launch, ...]:
    bias, dropout = call.argument(4, "attn_bias"), call.argument(9, "dropout_p", 0.0)
    causal = call.argument(11, "is_causal", False)
    q, k, v = call.args[1:4]
    return (_attention(q, k, v, causal=causal, dropout=dropout, bias=bias is not None, backward=True),)


# What memory bounds.


def _nll(call: Call) -> tuple[Launch, ...]:
    return (Launch(Memory("loss", 0.0, 0.0, dtype=any_type(call.inputs[0]))),)


def _by_memory(call: Call) -> Kernel:
    """Return the kernel of an operation that reads its tensors once and writes its results once."""
    outputs = [out for out in call.outputs if out is not None]
    if not outputs and not call.inputs:
        return Memory("zero", 0.0, 0.0)
    largest = max((*outputs, *call.inputs), key=lambda tensor: int(tensor.numel()))
    written = sum(map(moved_bytes, outputs))
    read = 0.0 if call.name in _WRITES_ONLY else sum(map(moved_bytes, call.inputs))
    if call.name == "copy_":
        read -= moved_bytes(call.inputs[0])
    kind = _class_of(call, outputs)
    rows = kind in _BY_ROW and largest.dim()
    along = _SOFTMAX_DIMENSION.get(call.name)
    width = largest.shape[-1 if along is None else call.args[along]] if rows else 0
    return Memory(kind, read, written, dtype=any_type(largest), width=width)


def _class_of(call: Call, outputs: Sequence[Any]) -> str:
    name = call.name
    if name in ("_to_copy", "clone", "copy_", "contiguous"):
        return _class_of_copy(call.inputs[-1], outputs[0])
    if name == "gelu" or name == "gelu_backward":
        exact = call.kwargs.get("approximate", "none") == "none"
        return ("gelu" if exact else "activation") + ("_bwd" if name.endswith("backward") else "")
    if name in _CLASSES:
        return _CLASSES[name]
    if name.endswith("_backward"):
        return "activation_bwd"
    out = max((one.numel() for one in outputs), default=0)
    read = [one for one in call.inputs if one.numel() > 1]
    if any(one.numel() > out for one in read):
        return "reduce"
    small = [one for one in read if one.numel() < out]
    if small:
        return _class_of_broadcast(small[0])
    if any(not _is_dense(one) for one in read):
        return "strided"
    return "residual" if len(read) > 1 else "activation"


def _class_of_broadcast(tensor: Any) -> str:
    """Return the class of a kernel that takes ``tensor`` for many elements: a column, a row, or a table of positions.

    None of them has vector loads (aten/src/ATen/native/cuda/Loops.cuh, for operands whose strides differ).
    """
    if tensor.shape[-1] == 1:
        return "strided"
    return "bias" if sum(size > 1 for size in tensor.shape) == 1 else "rope"


def _is_dense(tensor: Any) -> bool:
    """Tell whether a tensor's elements lie side by side, in whatever order."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(extent == tensor.numel())


def _class_of_copy(source: Any, target: Any) -> str:
    """Return the class of a copy: by its types, or by the order of its elements in memory."""
    if source.element_size() != target.element_size():
        return "upcast" if target.element_size() > source.element_size() else "cast"
    if source.is_contiguous() and target.is_contiguous():
        return "copy"
    apart = [one for one in (source, target) if one.dim() and one.shape[-1] > 1 and one.stride(-1) > 1]
    return "transposed" if len(apart) == 1 else "strided"


#: Operations that allocate, or name what is there.
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "lift_fresh", "set_"}
_WRITES_ONLY = {
    *("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"),
    *("fill_", "zero_", "arange", "eye", "scalar_tensor", "rand", "randn", "bernoulli_", "nll_loss_backward"),
}
_BY_ROW = {"softmax", "softmax_bwd", "loss", "loss_bwd", "reduce"}
#: Softmax -> place of the argument that says along which dimension.
_SOFTMAX_DIMENSION = {
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), 1),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 2),
}
#: Operation -> class of memory-bound kernels, where its tensors do not tell.
_CLASSES = {
    **dict.fromkeys(_WRITES_ONLY, "zero"),
    "native_batch_norm_backward": "norm_bwd",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_softmax_backward_data": "softmax_bwd",
    "_log_softmax": "loss",
    "_log_softmax_backward_data": "loss_bwd",
    "native_dropout": "dropout",
    "native_dropout_backward": "dropout_bwd",
    "masked_fill": "mask",
    "masked_fill_": "mask",
    "where": "mask",
    "tril": "mask",
    "triu": "mask",
    "cat": "copy",
    "stack": "copy",
    "repeat": "copy",
    "sum": "reduce",
    "mean": "reduce",
    "topk": "reduce",
    "sort": "reduce",
    "cumsum": "activation",
}
_SPECIAL: dict[str, Callable[[Call], tuple[Launch, ...]]] = {
    "mm": _mm,
    "addmm": _mm,
    "_addmm_activation": _mm,
    "_scaled_mm": _scaled,
    "bmm": _bmm,
    "baddbmm": _bmm,
    "mv": _vector,
    "addmv": _vector,
    "dot": _vector,
    "_grouped_mm": _grouped,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    **dict.fromkeys(
        ("native_layer_norm", "native_group_norm", "native_batch_norm", "fused_rms_norm"), row_kernels.norm
    ),
    **dict.fromkeys(
        ("native_layer_norm_backward", "native_group_norm_backward", "fused_rms_norm_backward"),
        row_kernels.norm_backward,
    ),
    **dict.fromkeys(
        ("embedding", "index", "index_select", "gather", "take"),
        row_kernels.embedding,
    ),
    "embedding_dense_backward": row_kernels.embedding_backward,
    "_unsafe_index_put": row_kernels.rows_written,
    **dict.fromkeys(
        (
            f"{name}{in_place}"
            for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "put")
            for in_place in ("", "_")
        ),
        row_kernels.rows_written,
    ),
    "slice_backward": row_kernels.slice_backward,
    "select_backward": row_kernels.slice_backward,
    "nll_loss_forward": _nll,
    "nll_loss2d_forward": _nll,
}

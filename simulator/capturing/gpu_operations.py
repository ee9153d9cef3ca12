"""Operations as PyTorch runs them on a GPU, for tensors that are on no device.

On tensors without data PyTorch takes attention, dropout and RMSNorm apart, as it does on a CPU. On a GPU each is one
kernel (torch 2.13: aten/src/ATen/native/transformers/attention.cpp, Dropout.cpp, layer_norm.cpp).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Widest heads of PyTorch's flash attention (sdp_utils.cpp, ``check_head_dim_size_flash``).
WIDEST_FLASH_HEAD = 256
#: Namespace of the operations that stand for RMSNorm's kernels.
_NORMS = "llmsim_capture"


@contextmanager
def fused_as_on_gpus() -> Iterator[None]:
    """Have attention, dropout and RMSNorm of tensors without data dispatched as on a GPU, while the context lasts."""
    import torch

    library, norms = torch.library.Library("aten", "IMPL"), torch.library.Library(_NORMS, "DEF")
    try:
        norms.define("fused_rms_norm(Tensor x, int[] shape, Tensor? weight) -> (Tensor, Tensor)")
        norms.define(
            "fused_rms_norm_backward(Tensor grad, Tensor x, int[] shape, Tensor rstd, Tensor? weight, bool[2] mask)"
            " -> (Tensor, Tensor)"
        )
        norms.impl("fused_rms_norm", _normed, "Meta")
        norms.impl("fused_rms_norm_backward", _normed_backward, "Meta")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of PyTorch is replaced
            library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
            library.impl("dropout", _dropout, "AutogradMeta")
            library.impl("rms_norm", _rms_norm, "AutogradMeta")
        yield
    finally:
        library._destroy()
        norms._destroy()


def norms_taken_apart() -> dict[Any, Any]:
    """Return how the operations that stand for RMSNorm's kernels are taken apart: as PyTorch does those of a GPU."""
    import torch

    aten, norms = torch.ops.aten, getattr(torch.ops, _NORMS)
    table = torch._decomp.decomposition_table
    forward, backward = table[aten._fused_rms_norm.default], table[aten._fused_rms_norm_backward.default]
    return {
        norms.fused_rms_norm.default: lambda x, shape, weight=None: forward(x, shape, weight, None),
        norms.fused_rms_norm_backward.default: backward,
    }


def without_copy(func: Any, args: Sequence[Any]) -> Any:
    """Return the operation in place that autograd takes for ``func`` where no dispatch mode watches it.

    Gradients of tables are rows that are added to zeros. Under a mode autograd copies these zeros first (torch 2.13:
    torch/csrc/autograd/FunctionsManual.cpp, aten/src/ATen/TensorSubclassLikeUtils.h).
    """
    import torch

    aten = torch.ops.aten
    if func is aten.index_put.default and len(args) > 3 and args[3]:
        return aten.index_put_.default
    in_place = {aten.index_add.default: aten.index_add_.default, aten.scatter_add.default: aten.scatter_add_.default}
    return in_place.get(func, func)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return attention by the flash kernel where it can, else by the memory-efficient one."""
    import torch

    aten, width = torch.ops.aten, v.shape[-1]
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and narrow and q.dim() == 4 and q.shape[-1] == v.shape[-1] <= WIDEST_FLASH_HEAD:
        padded = [_padded(one) for one in (q, k, v)]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        flash = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)
        return flash[0][..., :width]
    if q.dim() == 3:
        mask = None if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(0)
        q, k, v = (one.unsqueeze(0) for one in (q, k, v))
        return _attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    if enable_gqa and q.shape[1] != k.shape[1]:
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    bias = None
    if attn_mask is not None:
        bias = torch.where(attn_mask, 0.0, float("-inf")) if attn_mask.dtype == torch.bool else attn_mask
        bias = bias.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


def _padded(tensor: Any) -> Any:
    """Return ``tensor`` with a last dimension that is a multiple of 8."""
    from torch.nn.functional import pad

    return pad(tensor, (0, -tensor.shape[-1] % 8)) if tensor.shape[-1] % 8 else tensor


def _dropout(x: Any, p: float, train: bool) -> Any:
    import torch

    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p else x


def _rms_norm(x: Any, shape: list[int], weight: Any = None, eps: float | None = None) -> Any:
    """Return RMSNorm in one kernel each way, which keeps its input and a number for each row."""
    import torch

    class RmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            normed, rstd = getattr(torch.ops, _NORMS).fused_rms_norm(x, shape, weight)
            ctx.save_for_backward(x, rstd, weight)
            return normed

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, rstd, weight = ctx.saved_tensors
            wanted = ctx.needs_input_grad
            return getattr(torch.ops, _NORMS).fused_rms_norm_backward(grad, x, shape, rstd, weight, wanted)

    return RmsNorm.apply(x, weight)


def _normed(x: Any, shape: list[int], weight: Any) -> tuple[Any, Any]:
    import torch

    return torch.empty_like(x), x.new_empty(x.shape[: x.dim() - len(shape)], dtype=torch.float32)


def _normed_backward(grad: Any, x: Any, shape: list[int], rstd: Any, weight: Any, mask: list[bool]) -> tuple[Any, Any]:
    import torch

    return torch.empty_like(x) if mask[0] else None, torch.empty_like(weight) if mask[1] else None

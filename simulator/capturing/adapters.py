"""Adapters beside the linear layers of a module: y = x W + (x A) B, with W and all other weights frozen.

They are put there as Hugging Face's peft does (src/peft/tuners/lora/layer.py, ``Linear.forward``). The input is dropped
out and cast to the adapter's type, passes A and B, is scaled, and is added to the layer's output.

A and B have the type of the layer's weight, as with peft's ``autocast_adapter_dtype=False``. By default peft makes them
fp32 beside weights of 16 bits (src/peft/tuners/tuners_utils.py, ``cast_adapter_dtype``): ``dtype`` fp32 is that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from simulator.capturing.calls import DTYPES
from simulator.errors import InputError
from simulator.input_files import brief, closest

#: Target that means every linear layer but the one that gives the module's output.
ALL = "all-linear"


@dataclass(frozen=True)
class AdapterChoice:
    """Choice of layers that have an adapter, by the ends of their names. ``rank``: columns of A.

    ``dtype``: of A and B; None: of the layer's weight. ``dropout``: probability, of the adapter's input.
    """

    rank: int
    targets: tuple[str, ...]
    dtype: str | None = None
    dropout: float = 0.0

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> AdapterChoice:
        """Return the choice that a mapping with the keys of ``training.adapters`` means. Raises `InputError`."""
        if not isinstance(data, Mapping):
            raise InputError(
                "must be a mapping", key="adapters", found=brief(data), allowed="{rank: 16, targets: [q_proj]}"
            )
        keys = ("rank", "targets", "dtype", "dropout")
        for key in data:
            if key not in keys:
                raise InputError("unknown key", key=f"adapters.{key}", allowed=", ".join(keys))
        rank, targets, dtype, dropout = (data.get(key) for key in keys)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= 1 << 16:
            raise InputError("must be a whole number", key="adapters.rank", found=brief(rank), allowed="1 to 65,536")
        listed = targets if isinstance(targets, list | tuple) else ()
        names = (targets,) if isinstance(targets, str) else tuple(listed)
        if not names or not all(isinstance(name, str) and name for name in names):
            allowed = f"names of layers such as q_proj, or {ALL}"
            raise InputError("must be names", key="adapters.targets", found=brief(targets), allowed=allowed)
        if dtype is not None and dtype not in tuple(DTYPES.values()):
            raise InputError("is no type", key="adapters.dtype", found=brief(dtype), allowed=", ".join(DTYPES.values()))
        chance = 0.0 if dropout is None else dropout
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance < 1:
            raise InputError("is no probability", key="adapters.dropout", found=brief(dropout), allowed=">= 0, < 1")
        return cls(rank, names, dtype, float(chance))


def adapter_weights(module: Any, choice: AdapterChoice, tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return A and B of each layer that has an adapter, on no device: path of the layer -> name -> tensor.

    ``tensors``: the weights of the module by name. Raises `InputError` where a target names no linear layer.
    """
    import torch

    linear = {path: one for path, one in module.named_modules() if _is_linear(one)}
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    paths: list[str] = []
    for target in choice.targets:
        named = [path for path in linear if path == target or path.endswith(f".{target}")]
        if target == ALL:
            named = [path for path, one in linear.items() if one is not head]
        if not named:
            ends = sorted({path.rpartition(".")[2] for path in linear})
            raise InputError(
                "is the name of no linear layer",
                key="adapters.targets",
                found=target,
                allowed=", ".join([*ends, ALL]),
                fix=closest(target, ends),
            )
        paths += named
    kinds: dict[str, Any] = {kind: getattr(torch, name) for name, kind in DTYPES.items()}
    weights: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys(paths):
        weight = tensors[f"{path}.weight"]
        outputs, inputs = reversed(weight.shape) if type(linear[path]).__name__ == "Conv1D" else weight.shape
        options = {"dtype": kinds.get(choice.dtype or "", weight.dtype), "device": "meta", "requires_grad": True}
        weights[path] = {
            f"{path}.lora_A.weight": torch.empty(choice.rank, inputs, **options),
            f"{path}.lora_B.weight": torch.empty(outputs, choice.rank, **options),
        }
    return weights


def _is_linear(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@contextmanager
def beside(module: Any, weights: Mapping[str, Mapping[str, Any]], dropout: float) -> Iterator[None]:
    """Have layers of ``module`` add what their adapters give, while the context lasts."""
    from torch.nn import functional

    def adapted(pair: tuple[Any, Any], x: Any, output: Any) -> Any:
        a, b = pair
        dropped = functional.dropout(x.to(a.dtype), dropout) if dropout else x.to(a.dtype)
        return (output + functional.linear(functional.linear(dropped, a), b) * 1.0).to(output.dtype)

    hooks = []
    for path, one in module.named_modules():
        if path in weights:
            pair = tuple(weights[path].values())
            hook = one.register_forward_hook(lambda _, args, output, pair=pair: adapted(pair, args[0], output))
            hooks.append(hook)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

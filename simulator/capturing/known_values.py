"""Values that are known though tensors have no data, such as positions that the module itself counts.

Modules look at such values to choose their way: whether a mask hides anything, or positions begin anew. What weights
or unknown inputs lead to is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

#: Elements of the largest tensor whose values are worked out.
MOST_ELEMENTS = 1 << 22


class KnownValues:
    """Values of some tensors without data, worked out on the CPU."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self._values: Any = WeakTensorKeyDictionary()
        self._chance: Any = WeakTensorKeyDictionary()

    def set(self, tensor: Any, value: Any) -> None:
        """Note the ``value`` of a tensor."""
        self._values[tensor] = value

    def value_of(self, tensor: Any) -> Any:
        """Return the value of a tensor, None where it is not known."""
        return tensor if tensor.device.type == "cpu" else self._values.get(tensor)

    def follow_chance(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the tensors that are drawn by chance, or worked out from such ones."""
        import torch
        from torch.utils._pytree import tree_leaves

        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or any(one in self._chance for one in tensors):
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor):
                    self._chance[one] = True

    def is_chance(self, tensor: Any) -> bool:
        """Tell whether chance decides what a tensor holds."""
        return tensor in self._chance

    def worked_out(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what ``func`` gives on known values; None where it has other inputs, or another result each time."""
        import torch
        from torch.utils._pytree import tree_leaves, tree_map_only

        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        values = [self.value_of(tensor) for tensor in tensors]
        random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name
        if random or any(value is None for value in values):
            return None
        if not tensors and kwargs.get("device") is None:
            return None
        if max((value.numel() for value in values), default=0) > MOST_ELEMENTS:
            return None
        if not tensors and _elements(func(*args, **{**kwargs, "device": "meta"})) > MOST_ELEMENTS:
            return None
        real_args, real_kwargs = tree_map_only(torch.Tensor, self.value_of, (tuple(args), dict(kwargs)))
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        return func(*real_args, **real_kwargs)

    def note(self, result: Any, value: Any) -> None:
        """Note the values of the tensors that an operation gave, and forget those that have none any more."""
        import torch
        from torch.utils._pytree import tree_leaves

        tensors, values = tree_leaves(result), tree_leaves(value)
        if len(values) != len(tensors):
            values = [None] * len(tensors)
        for tensor, one in zip(tensors, values, strict=True):
            if not isinstance(tensor, torch.Tensor):
                continue
            if isinstance(one, torch.Tensor) and one.numel() <= MOST_ELEMENTS:
                self._values[tensor] = one
            elif tensor in self._values:
                del self._values[tensor]


def _elements(result: Any) -> int:
    """Return the elements of the largest tensor that an operation gave."""
    import torch
    from torch.utils._pytree import tree_leaves

    return max((leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)), default=0)


@contextmanager
def without_device() -> Iterator[KnownValues]:
    """Have PyTorch make tensors without data, while the context lasts; it gives the values that are known of them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    values = KnownValues()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            value = values.worked_out(func, args, kwargs or {})
            result = func(*args, **(kwargs or {}))
            values.note(result, value)
            return result

    with torch.device("meta"), Noting():
        yield values

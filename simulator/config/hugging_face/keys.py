"""A config.json that remembers which of its keys were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from simulator.bounds import MAX_LAYERS, MAX_MODEL_SIZE
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.units import counted

T = TypeVar("T")
Fields = dict[str, Any]
#: Modules of multi-token prediction, as `model.mtp_layers` may have.
MAX_PREDICTIONS = 100

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


#: What `layer_types` says of a layer -> our name of its mixer. What linear layers are is the architecture's to say.
LAYER_TYPES = {
    "full_attention": "attention",
    "attention": "attention",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "deepseek_sparse_attention": "sparse",
}


def mixer_of_layers(linear: str) -> dict[str, str]:
    """Return `LAYER_TYPES` with layers of the mixer ``linear``; without these where it is empty."""
    return LAYER_TYPES | (dict.fromkeys(("linear_attention", "mamba"), linear) if linear else {})


class Keys:
    """The keys of a config.json, over what its class assumes where the file is silent.

    ``file`` is named in errors, with the ``path`` of a section in front of its keys.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], file: object, path: str = "") -> None:
        self.file = file
        self._path = path
        self.read: set[str] = set()
        self._config = {**defaults, **config}

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of ``names`` that is not null, else ``default``."""
        self.read.update(names)
        return next((self._config[name] for name in names if self._config.get(name) is not None), default)

    def has_no_effect(self, *names: str) -> None:
        """Let ``names`` stand in a file without reading them; whoever calls it says why they change nothing."""
        self.read.update(names)

    def need(self, *names: str) -> Any:
        """Return the value of the first of ``names`` that is not null; raise `InputError` where there is none."""
        value = self.get(*names)
        if value is None:
            raise InputError("a required key is missing", file=self.file, key=self._path + names[0])
        return value

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_MODEL_SIZE) -> int:
        """Return the whole number under the first of ``names`` that is not null, else ``default``.

        Raises `InputError` for what is no whole number from ``least`` to ``most``, and where there is no default.
        """
        value = self.need(*names) if default is None else self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(self._present(names), "must be a whole number", allowed=f"{least:,} to {most:,}")
        return value

    def size_or_none(self, *names: str, least: int = 1, most: int = MAX_MODEL_SIZE) -> int | None:
        """Return the whole number under the first of ``names`` that is not null, None where all are.

        Raises `InputError` as `size` does.
        """
        return None if self.get(*names) is None else self.size(*names, least=least, most=most)

    def dropout(self, name: str, default: float = 0.0) -> float:
        """Return the probability under ``name``, below 1. Raises `InputError` for what is none."""
        return self.number(name, default, 0.0, 0.99)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return what is true or false under ``name``, or the ``default`` of null. Raises `InputError` for others."""
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.refuse(name, "must be true or false", allowed="true, false, null")
        return value

    def layers(self, *names: str) -> int:
        """Return the number of layers that stands under one of ``names``."""
        return self.size(*names, most=MAX_LAYERS)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return the number from ``least`` to ``most`` under ``name``. Raises `InputError` for what is none."""
        value = self.get(name, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.refuse(name, "must be a number", allowed=f"{least:g} to {most:g}")
        return float(value)

    def numbers(self, *names: str) -> list[int] | None:
        """Return the whole numbers that the first of ``names`` lists; None where the file has no such list.

        True and false count as 1 and 0. Raises `InputError` for what is no such list.
        """
        values = self.listed(*names)
        if values is not None and not all(isinstance(value, int) and value >= 0 for value in values):
            raise self.refuse(self._present(names), "must be a list of whole numbers")
        return None if values is None else [int(value) for value in values]

    def words(self, *names: str) -> list[str] | None:
        """Return the words that the first of ``names`` lists; None where the file has no such list."""
        values = self.listed(*names)
        if values is not None and not all(isinstance(value, str) for value in values):
            raise self.refuse(self._present(names), "must be a list of words")
        return values

    def listed(self, *names: str) -> list[Any] | None:
        """Return the list under the first of ``names`` that is not null, else None. Raises `InputError` for others."""
        values = self.get(*names)
        if values is not None and not isinstance(values, list | tuple):
            raise self.refuse(self._present(names), "must be a list")
        return None if values is None else list(values)

    def section(self, name: str) -> Keys:
        """Return the keys of the section ``name``, of none where the file has no such section."""
        inner = self.get(name, default={})
        if not isinstance(inner, Mapping):
            raise self.refuse(name, "must be a section of keys")
        return Keys(inner, {}, self.file, f"{self._path}{name}.")

    def _present(self, names: Sequence[str]) -> str:
        return next((name for name in names if self._config.get(name) is not None), names[0])

    def refuse(self, key: str, message: str, **hints: str) -> InputError:
        """Return the error of a ``key`` that says what is not modelled."""
        return InputError(message, file=self.file, key=self._path + key, found=brief(self._config.get(key)), **hints)

    def for_each_layer(self, listed: list[T] | None, layers: int, *names: str) -> list[T] | None:
        """Return what the first of ``names`` has ``listed``. Raises `InputError` where that is not one for a layer."""
        if listed is not None and len(listed) != layers:
            raise self.refuse(
                self._present(names),
                f"is of {counted(len(listed), 'layer')}, and the model has {layers:,}",
                allowed=f"a list of {layers:,}, as many as layers",
            )
        return listed

    def layer_mixers(self, *names: str, linear: str = "") -> list[str] | None:
        """Return the mixers that the first of ``names`` lists layer by layer; None where the file has no such list.

        ``linear``: the mixer of linear attention and of state-space layers, where the architecture has such layers.
        Raises `InputError` for a kind of layer that is not known.
        """
        kinds = self.words(*names)
        if kinds is None:
            return None
        mixer_of = mixer_of_layers(linear)
        if unknown := [kind for kind in kinds if kind not in mixer_of]:
            raise self.refuse(names[0], f"layers of kind {unknown[0]} are not supported here")
        return [mixer_of[kind] for kind in kinds]

    def need_layers(self, *allowed: str) -> None:
        """Raise `InputError` where ``layer_types`` lists a mixer that is none of ``allowed``."""
        if other := [mixer for mixer in self.layer_mixers("layer_types") or () if mixer not in allowed]:
            raise self.refuse("layer_types", f"layers of kind {other[0]} are not supported here")

    def activation(self, names: Mapping[str, str], *keys: str) -> str:
        """Return the activation that the first of ``keys`` means."""
        value = self.need(*keys)
        if not isinstance(value, str) or value not in names:
            raise self.refuse(self._present(keys), "unknown activation", allowed=", ".join(names))
        return names[value]

    def refuse_unread(self, kind: str, effects: Sequence[str]) -> None:
        """Raise `InputError` for a key with an effect in other architectures, which ``kind`` has not read.

        A sliding window that the file itself turns off is let be, and a list of layers that are all plain attention.
        """
        off = set() if self._config.get("use_sliding_window", True) else {"sliding_window"}
        kinds = self._config.get("layer_types")
        if isinstance(kinds, Sequence) and all(kind == "full_attention" for kind in kinds):
            off.add("layer_types")
        for key in effects:
            if key not in self.read and self._config.get(key) and key not in off:
                raise self.refuse(key, f"is not known of the architecture {kind}")


def shortest(kinds: Sequence[str]) -> list[str]:
    """Return the shortest list that, begun anew again and again, gives ``kinds``.

    >>> shortest(["window", "attention", "window", "attention", "window"]), shortest(["a", "b", "b"])
    (['window', 'attention'], ['a', 'b', 'b'])
    """
    for length in range(1, len(kinds) // 2 + 1):
        if all(kind == kinds[number % length] for number, kind in enumerate(kinds)):
            return list(kinds[:length])
    return list(kinds)


def mixers(kinds: Sequence[str]) -> Fields:
    """Return the key `mixers`. Where every layer is of the model's own kind, attention or a window, nothing is said.

    >>> mixers(["attention"] * 4), mixers(["no_rope", "attention"])
    ({}, {'mixers': ['no_rope', 'attention']})
    """
    pattern = shortest(kinds)
    return {} if pattern in (["attention"], ["window"]) else {"mixers": pattern}


def places(kinds: Sequence[bool]) -> tuple[Fields, Fields]:
    """Return keys that say which layers have experts: those of the model, and those of its section `moe`.

    >>> places([False, True, False, True]), places([True, False, False])
    (({}, {'first_dense_layers': 1, 'every': 2}), ({'mlps': ['moe', 'dense', 'dense']}, {}))
    """
    numbers = [number for number, has in enumerate(kinds) if has]
    first = numbers[0] if numbers else 0
    step = numbers[1] - first if len(numbers) > 1 else 1
    if numbers == list(range(first, len(kinds), step)):
        return {}, ({"first_dense_layers": first} if first else {}) | ({"every": step} if step > 1 else {})
    return {"mlps": shortest(["moe" if has else "dense" for has in kinds])}, {}


def biases(*named: str) -> Fields:
    """Return the keys that say which linear layers have biases."""
    return {"biases": list(named)} if named else {"bias": False}

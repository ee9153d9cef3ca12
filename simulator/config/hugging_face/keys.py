"""A config.json that remembers which of its keys were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simulator.errors import InputError
from simulator.input_files import brief

Fields = dict[str, Any]

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


class Keys:
    """The keys of a config.json, over what its class assumes where the file is silent.

    ``file`` is named in errors.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], file: object) -> None:
        self.file = file
        self.read: set[str] = set()
        self._config = {**defaults, **config}

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of ``names`` that is not null, else ``default``."""
        self.read.update(names)
        return next((self._config[name] for name in names if self._config.get(name) is not None), default)

    def need(self, *names: str) -> Any:
        """Return the value of the first of ``names`` that is not null; raise `InputError` where there is none."""
        value = self.get(*names)
        if value is None:
            raise InputError("a required key is missing", file=self.file, key=names[0])
        return value

    def refuse(self, key: str, message: str, **hints: str) -> InputError:
        """Return the error of a ``key`` that says what is not modelled."""
        return InputError(message, file=self.file, key=key, found=brief(self._config.get(key)), **hints)

    def activation(self, names: Mapping[str, str], *keys: str) -> str:
        """Return the activation that the first of ``keys`` means."""
        value = self.need(*keys)
        if not isinstance(value, str) or value not in names:
            raise InputError(
                "unknown activation", file=self.file, key=keys[0], found=brief(value), allowed=", ".join(names)
            )
        return names[value]

    def refuse_unread(self, kind: str, effects: Sequence[str]) -> None:
        """Raise `InputError` for a key with an effect in other architectures, which ``kind`` has not read.

        A sliding window that the file itself turns off is let be.
        """
        for key in effects:
            off = key == "sliding_window" and not self._config.get("use_sliding_window", True)
            if key not in self.read and self._config.get(key) and not off:
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
    """Return the key `mixers`, left out where every layer attends to all tokens, or to those of a window.

    >>> mixers(["attention"] * 4), mixers(["no_rope", "attention"])
    ({}, {'mixers': ['no_rope', 'attention']})
    """
    pattern = shortest(kinds)
    return {} if pattern in (["attention"], ["window"]) else {"mixers": pattern}


def places(kinds: Sequence[bool]) -> tuple[Fields, Fields]:
    """Return the keys of a model, and of its section `moe`, that say which layers have experts.

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

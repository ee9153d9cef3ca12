"""Seconds of the host in backward passes, told by a clock around what calls autograd's engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Self

#: Functions through which passes go: PyTorch's, and Megatron-Core's own, which calls the engine itself.
ENTRANCES = (
    ("torch.autograd", "_engine_run_backward"),
    ("megatron.core.pipeline_parallel.schedules", "custom_backward"),
)


class BackwardClock:
    """Counts the seconds that this process's main thread spends in backward passes, while it is entered.

    A pass inside another counts once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._replaced: list[tuple[ModuleType, str, Callable[..., Any]]] = []

    def __enter__(self) -> Self:
        for module_name, name in ENTRANCES:
            module = sys.modules.get(module_name)
            if module is not None:
                function = getattr(module, name)
                self._replaced.append((module, name, function))
                setattr(module, name, self._around(function))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, function in self._replaced:
            setattr(module, name, function)
        self._replaced.clear()

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def clocked(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began

        return clocked

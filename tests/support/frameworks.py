"""Frameworks that tests run over, as workload files name them."""

from __future__ import annotations

from typing import Any

MEGATRON, PYTORCH, DEEPSPEED = "megatron_core", "pytorch", "deepspeed"
COMPILED = {"name": PYTORCH, "compile": True}
#: Those whose kernels differ.
STACKS: tuple[Any, ...] = (MEGATRON, PYTORCH, COMPILED)

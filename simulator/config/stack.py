"""Stacks: their files read, and checked against the cluster's GPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from simulator.config import catalog
from simulator.config.validation import validated
from simulator.hardware.stack import Stack
from simulator.input_files import as_mapping, parse_yaml


def load_stack(
    reference: str | Path, *, base: Path | None = None, file: object = None, key: str | None = None
) -> Stack:
    """A stack by shipped name or by path; ``base``, ``file`` and ``key`` say where the reference stands.

    Raises `InputError`.
    """
    return catalog.load("stack", reference, _parsed, base=base, file=file, key=key)


@lru_cache(maxsize=64)
def _parsed(text: str, path: Path) -> Stack:
    return validated(Stack, as_mapping(parse_yaml(text, path), path), path)


def check_stack(stack: Stack, gpu: str, *, file: object = None, key: str | None = None) -> None:
    """Raise `InputError` where ``stack`` is not one of the cluster's ``gpu``; ``file`` and ``key`` chose it."""
    catalog.check_gpu("stack", stack.name, stack.gpu, gpu, lambda name: load_stack(name).gpu, file=file, key=key)

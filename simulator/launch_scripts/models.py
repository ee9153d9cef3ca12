"""Shipped models by the names that checkpoints have."""

from __future__ import annotations

import re

from simulator.config.presets import presets
from simulator.launch_scripts.script import ScriptReading

_WORD = re.compile(r"a?\d+x\d+[bmt]|a\d+b|\d+(?:\.\d+)?[bmt](?![a-z])|\d+(?:\.\d+)?|[a-z]+")


def preset_of(name: str) -> str | None:
    """Return the shipped model that a checkpoint is of, by the words of its name, or None.

    Minor versions have the sizes of their major one: Llama 3.1 8B means Llama 3 8B.

    >>> preset_of("meta-llama/Meta-Llama-3.1-8B-Instruct"), preset_of("Qwen/Qwen3-30B-A3B"), preset_of("my/model")
    ('llama3-8b', 'qwen3-30b-a3b', None)
    >>> preset_of("NousResearch/Llama-2-7b-hf"), preset_of("mistralai/Mixtral-8x7B-v0.1")
    ('llama2-7b', 'mixtral-8x7b')
    """
    words = _WORD.findall(name.lower())
    matches = [preset for preset in presets() if _holds(words, _WORD.findall(preset))]
    return max(matches, key=len, default=None)


def put_model(reading: ScriptReading, name: str, *options: str) -> None:
    """Put the shipped model that a checkpoint's ``name`` means, which ``options`` say; none where it is not known."""
    preset = preset_of(name)
    if preset is not None:
        reading.put("model.preset", preset, *options)
        return
    for option in options:
        reading.ignore(option, f"{name} is no shipped model")


def _holds(words: list[str], wanted: list[str]) -> bool:
    starts = range(len(words) - len(wanted) + 1)
    return any(all(map(_stands_for, words[start : start + len(wanted)], wanted)) for start in starts)


def _stands_for(word: str, wanted: str) -> bool:
    return word == wanted or (wanted.isdigit() and word.startswith(f"{wanted}."))

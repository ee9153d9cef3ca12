"""Shipped models by the names that checkpoints have."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simulator.config.presets import presets
from simulator.launch_scripts.script import ScriptReading

_WORD = re.compile(r"a?\d+x\d+[bmt]|a\d+b|\d+(?:\.\d+)?[bmt](?![a-z])|\d+(?:\.\d+)?|[a-z]+")
#: A version, as checkpoints have it behind their name.
_VERSION = re.compile(r"v(\d+\.\d+)(?![\d.])")
#: Family -> minor version -> the major one, whose sizes it has.
_SAME_SIZES = {"llama": {"3.1": "3", "3.3": "3"}, "deepseek": {"2.5": "2", "3.1": "3"}}
#: Checkpoint whose name says no number of parameters -> the shipped model.
_UNSIZED = {"gpt2": "gpt2-124m", "gpt2-medium": "gpt2-355m", "gpt2-large": "gpt2-774m", "gpt2-xl": "gpt2-1.5b"}
#: Word that a checkpoint of other sizes has behind the name of a larger one.
_SMALLER = "lite"


def preset_of(name: str) -> str | None:
    """Return the shipped model that a checkpoint is of, by the words of its name, or None.

    Llama 3.1 8B means Llama 3 8B, for both have the same sizes. A checkpoint of another version than the one that a
    preset is of is not that model: it may have another vocabulary or window.

    >>> preset_of("meta-llama/Meta-Llama-3.1-8B-Instruct"), preset_of("Qwen/Qwen3-30B-A3B"), preset_of("my/model")
    ('llama3-8b', 'qwen3-30b-a3b', None)
    >>> preset_of("NousResearch/Llama-2-7b-hf"), preset_of("mistralai/Mixtral-8x7B-v0.1")
    ('llama2-7b', 'mixtral-8x7b')
    >>> preset_of("mistralai/Mistral-7B-Instruct-v0.1"), preset_of("mistralai/Mistral-7B-Instruct-v0.3")
    ('mistral-7b', None)
    >>> preset_of("openai-community/gpt2-xl")
    'gpt2-1.5b'
    """
    name = name.lower()
    if unsized := _UNSIZED.get(name.rpartition("/")[2]):
        return unsized
    words = _WORD.findall(name)
    if _SMALLER in words:
        return None
    same = next((sizes for family, sizes in _SAME_SIZES.items() if family in words), {})
    matches = [
        preset
        for preset, keys in presets().items()
        if _holds(words, _WORD.findall(preset), same) and not _differ(name, str(keys["source"]).lower())
    ]
    return max(matches, key=len, default=None)


def _differ(name: str, source: str) -> bool:
    """Return whether a checkpoint and the one that a preset is of have different versions.

    >>> _differ("mistral-7b-v0.3", "config.json of mistralai/mistral-7b-v0.1"), _differ("mixtral-v0.1", "table 1")
    (True, False)
    """
    versions = [match[1] for match in map(_VERSION.search, (name, source)) if match]
    return len(set(versions)) > 1


def put_model(reading: ScriptReading, name: str, *options: str) -> None:
    """Put the shipped model that a checkpoint's ``name`` means, which ``options`` say; none where it is not known."""
    preset = preset_of(name)
    if preset is not None:
        reading.put("model.preset", preset, *options)
        return
    for option in options:
        reading.ignore(option, f"{name} is no model known here: give its config.json")


def _holds(words: list[str], wanted: list[str], same: Mapping[str, str]) -> bool:
    """Return whether ``wanted`` words stand in a row in ``words``, or in what is the ``same`` in their place."""
    meant = [same.get(word, word) for word in words]
    starts = range(len(words) - len(wanted) + 1)
    return any(wanted in (words[start : start + len(wanted)], meant[start : start + len(wanted)]) for start in starts)

"""Files of captured models, read and checked."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from simulator.captured import CapturedModel
from simulator.config.captured_checks import check
from simulator.config.misplaced_file import CAPTURED, expecting
from simulator.config.validation import validated
from simulator.errors import InputError, located
from simulator.input_files import read_json


def read_captured(path: str | Path) -> CapturedModel:
    """Return the captured model of a file; as long as the file stays, it is the same object.

    Raises `InputError` where it cannot be read, or is none.
    """
    file = Path(path)
    try:
        state = file.stat()
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}", file=path, allowed="a file that llmsim capture wrote"
        ) from None
    with expecting(CAPTURED, file):
        return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> CapturedModel:
    model = validated(CapturedModel, read_json(path), path)
    with located(lambda key: (path, key)):
        check(model)
    return model


def model_keys(path: str | Path) -> dict[str, Any]:
    """Return the keys of a workload's `model` that a captured model gives."""
    model = read_captured(path)
    return {
        "layers": len(model.layers),
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": max(1, model.hidden // model.heads),
        "vocab": model.vocab,
        "vocab_multiple": 1,
        "tied_embeddings": bool(model.table),
        "position": "none",
    }

"""Files of captured models, read and checked."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from simulator.captured import CapturedModel, CapturedPart
from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.input_files import read_json
from simulator.program import ProgramError, kernel_from_text


def read_captured(path: str | Path) -> CapturedModel:
    """Return the captured model of a file; as long as the file stays, it is the same object.

    Raises `InputError` where it cannot be read, or is none.
    """
    file = Path(path)
    try:
        state = file.stat()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from None
    return _read(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> CapturedModel:
    model = validated(CapturedModel, read_json(path), path)
    for key, place in (("before", model.before), ("after", model.after), *(("layers", one) for one in model.layers)):
        if not 0 <= place < len(model.parts):
            raise InputError(
                "is no number of a part", file=path, key=key, found=place, allowed=f"0 to {len(model.parts) - 1}"
            )
    if not model.layers:
        raise InputError("has no layers", file=path, key="layers", found=[])
    for number, part in enumerate(model.parts):
        _check_kernels(part, path, f"parts[{number}]")
    return model


def _check_kernels(part: CapturedPart, path: Path, key: str) -> None:
    """Raise `InputError` where a kernel of a part cannot be read."""
    for node in part.nodes:
        for kernel in (*node.forward, *node.input_grad, *node.weight_grad):
            try:
                kernel_from_text(kernel.kernel)
            except ProgramError as error:
                raise InputError(f"{kernel.name}: {error}", file=path, key=key, found=kernel.kernel) from None


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

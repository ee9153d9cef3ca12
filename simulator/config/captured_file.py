"""Files of captured models, read and checked."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from simulator.captured import CapturedKernel, CapturedModel, CapturedPart
from simulator.config.validation import validated
from simulator.errors import InputError, located
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
        raise InputError(
            f"cannot be read: {error.strerror or error}", file=path, allowed="a file that llmsim capture wrote"
        ) from None
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
        with located(partial(_place, path, number)):
            _check_part(part, model.widest_split)
    return model


def _place(path: Path, part: int, key: str) -> tuple[object, str]:
    return path, f"parts[{part}].{key}"


def _check_part(part: CapturedPart, widest_split: int) -> None:
    """Raise `InputError` where a kernel cannot be read, or ranks cannot share its sizes or a weight."""
    for node in part.nodes:
        for kernel in (*node.forward, *node.input_grad, *node.weight_grad):
            _check_kernel(kernel, widest_split)
        for weight in node.weights:
            split = weight.split_dimension
            if split >= len(weight.shape) or (split >= 0 and weight.shape[split] % widest_split):
                raise InputError(
                    f"{weight.name}: is no dimension that {widest_split} ranks can share",
                    key="split_dimension",
                    found=split,
                    allowed="-1, or a dimension of the shape",
                )


def _check_kernel(recorded: CapturedKernel, widest_split: int) -> None:
    """Raise `InputError` where a kernel cannot be read, or ``split`` names what ranks cannot share."""
    try:
        kernel = kernel_from_text(recorded.kernel)
    except ProgramError as error:
        raise InputError(f"{recorded.name}: {error}", key="kernel", found=recorded.kernel) from None
    sizes = {field.name: getattr(kernel, field.name) for field in fields(kernel)}
    numbers = {name: size for name, size in sizes.items() if isinstance(size, int | float)}
    below = [name for name, size in numbers.items() if not 0 <= size < math.inf]
    if below:
        raise InputError(f"{recorded.name}: has an impossible {below[0]}", key="kernel", found=recorded.kernel)
    shared = [name for name, size in numbers.items() if not isinstance(size, bool)]
    for name in recorded.split:
        if name not in shared or (isinstance(numbers[name], int) and numbers[name] % widest_split):
            raise InputError(
                f"{recorded.name}: is no size of its kernel that {widest_split} ranks can share",
                key="split",
                found=name,
                allowed=", ".join(shared),
            )


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

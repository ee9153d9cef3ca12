"""Kernels of norms, and of operations on rows of tables and parts of tensors."""

from __future__ import annotations

import math

from simulator.capturing.calls import Call, Launch, any_type, moved_bytes
from simulator.program import Memory


def norm(call: Call) -> tuple[Launch, ...]:
    """Return the kernel of a norm's forward pass."""
    x, outputs = call.inputs[0], [out for out in call.outputs if out is not None]
    kind = "rms_norm" if "rms" in call.name else "norm"
    written = sum(map(moved_bytes, outputs))
    read = sum(map(moved_bytes, call.inputs))
    return (Launch(Memory(kind, read, written, dtype=any_type(x), width=_normed_elements(call))),)


def norm_backward(call: Call) -> tuple[Launch, ...]:
    """Return the gradients of a norm that are wanted: that of its input, and those of its weights in another kernel.

    Each kernel reads both tensors.
    """
    grad, x = call.inputs[:2]
    kind = "rms_norm_bwd" if "rms" in call.name else "norm_bwd"
    kernels = []
    for outputs, label in (((0,), ""), (tuple(range(1, len(call.outputs))), " weight")):
        wanted = tuple(number for number in outputs if call.outputs[number] is not None)
        if wanted:
            written = sum(moved_bytes(call.outputs[number]) for number in wanted)
            read = moved_bytes(grad) + moved_bytes(x)
            kernel = Memory(kind, read, written, dtype=any_type(x), width=_normed_elements(call))
            kernels.append(Launch(kernel, wanted, label))
    return tuple(kernels)


def _normed_elements(call: Call) -> int:
    """Return how many elements, side by side, a norm takes a mean of; 0 of a batch norm, whose means lie across rows.

    Arguments are those of aten/src/ATen/native/native_functions.yaml.
    """
    backward = call.name.endswith("_backward")
    if "group_norm" in call.name:
        channels, pixels, groups = call.args[6:9] if backward else call.args[4:7]
        return int(channels * pixels // groups)
    return 0 if "batch_norm" in call.name else math.prod(call.args[2 if backward else 1])


def embedding(call: Call) -> tuple[Launch, ...]:
    """Return the reading of some rows of a table, and of their numbers."""
    out = call.outputs[0]
    indices = sum(moved_bytes(one) for one in call.inputs[1:])
    return (Launch(Memory("embedding", moved_bytes(out) + indices, moved_bytes(out), dtype=any_type(out))),)


def embedding_backward(call: Call) -> tuple[Launch, ...]:
    """Return the clearing of a table's gradient, and the addition of rows to it."""
    rows = moved_bytes(call.inputs[0])
    return _cleared(call), Launch(Memory("embedding_bwd", rows, rows, dtype=any_type(call.outputs[0])))


def rows_written(call: Call) -> tuple[Launch, ...]:
    """Return the writing of rows, or the addition of them, into a table, of which all else is left or copied before."""
    out, rows = call.outputs[0], call.inputs[-1]
    written = float(rows.numel() * out.element_size())
    kernels = [Launch(Memory("embedding_bwd", moved_bytes(rows), written, dtype=any_type(out)))]
    if not call.name.endswith("_"):
        copied = moved_bytes(out)
        kernels.insert(0, Launch(Memory("copy", copied, copied, dtype=any_type(out)), label=" copy"))
    return tuple(kernels)


def slice_backward(call: Call) -> tuple[Launch, ...]:
    """Return the clearing of a gradient, and the copy of a part of it."""
    part = moved_bytes(call.inputs[0])
    return _cleared(call), Launch(Memory("copy", part, part, dtype=any_type(call.outputs[0])))


def _cleared(call: Call) -> Launch:
    out = call.outputs[0]
    return Launch(Memory("zero", 0.0, moved_bytes(out), dtype=any_type(out)), label=" zero")

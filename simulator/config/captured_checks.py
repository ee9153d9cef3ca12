"""Checks of a captured model: kernels that nothing runs, and keys that contradict each other, are refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from simulator.bounds import MAX_LAYERS
from simulator.captured import INPUT, CapturedKernel, CapturedModel, CapturedNode, CapturedWeight, heads_of, sample_of
from simulator.errors import InputError, located
from simulator.program import Matmul, ProgramError, kernel_from_text


def check(model: CapturedModel) -> None:
    """Raise `InputError` with the key of the first thing in a captured model that cannot be."""
    _check_numbers(model)
    for number, part in enumerate(model.parts):
        for place, node in enumerate(part.nodes):
            with located(partial(_inside, f"parts[{number}].nodes[{place}]")):
                _check_node(node, model.widest_split)
    _check_recording(model)
    _check_weights(model)
    _check_chain(model)


def _inside(section: str, key: str) -> tuple[None, str]:
    """Return the place of a key inside a section; the file is named further out."""
    return None, f"{section}.{key}"


def _check_numbers(model: CapturedModel) -> None:
    """Raise `InputError` where a number of a part is none, or no layer computes."""
    for key, place in (("before", model.before), ("after", model.after), *(("layers", one) for one in model.layers)):
        if not 0 <= place < len(model.parts):
            raise InputError("is no number of a part", key=key, found=place, allowed=f"0 to {len(model.parts) - 1}")
    if not model.layers:
        raise InputError("has no layers", key="layers", found=[])
    if len(model.layers) > MAX_LAYERS:
        raise InputError("has too many layers", key="layers", found=len(model.layers), allowed=f"<= {MAX_LAYERS:,}")
    if not any(model.parts[place].nodes for place in model.layers):
        raise InputError("no layer has an operation", key="layers", found=list(dict.fromkeys(model.layers)))


def _check_node(node: CapturedNode, widest_split: int) -> None:
    """Raise `InputError` where a kernel cannot be read, ranks cannot share a size, or a gradient has another size."""
    products: dict[str, Any] = {}
    for field in ("forward", "input_grad", "weight_grad"):
        for number, one in enumerate(getattr(node, field)):
            with located(partial(_inside, f"{field}[{number}]")):
                products[one.name] = _checked_kernel(one, widest_split)
    for number, weight in enumerate(node.weights):
        with located(partial(_inside, f"weights[{number}]")):
            _check_weight(weight, products, widest_split)


def _check_weight(weight: CapturedWeight, products: dict[str, Any], widest_split: int) -> None:
    """Raise `InputError` where ranks cannot share a weight, or the product of its gradient has another size."""
    split = weight.split_dimension
    if split >= len(weight.shape) or (split >= 0 and weight.shape[split] % widest_split):
        raise InputError(
            f"{weight.name}: is no dimension that {widest_split} ranks can share",
            key="split_dimension",
            found=split,
            allowed="-1, or a dimension of the shape",
        )
    if not weight.gradient:
        return
    product = products.get(weight.gradient)
    if not isinstance(product, Matmul):
        names = ", ".join(name for name, one in products.items() if isinstance(one, Matmul))
        raise InputError(
            f"{weight.name}: is no product beside it", key="gradient", found=weight.gradient, allowed=names or None
        )
    elements = {weight.gradient: product.batch * product.m * product.n}
    forward = [name for name, one in products.items() if isinstance(one, Matmul) and one.role == "fwd"]
    for name in forward if len(forward) == 1 else ():
        elements[name] = products[name].batch * products[name].n * products[name].k
    for name, number in elements.items():
        if number != math.prod(weight.shape):
            raise InputError(
                f"{weight.name}: {name} is a product with a weight of {number:,} elements",
                key="shape",
                found=list(weight.shape),
            )


def _checked_kernel(recorded: CapturedKernel, widest_split: int) -> Any:
    """Return a kernel. Raises `InputError` where it cannot be read, or ``split`` names what ranks cannot share."""
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
    return kernel


def _check_recording(model: CapturedModel) -> None:
    """Raise `InputError` where sizes of the recorded inputs, or of attention, are others than the model's."""
    for number, one in enumerate(model.inputs):
        sizes = len(one.shape)
        if not sizes or (one.tokens and sizes != 2):
            raise InputError(
                "is no input of this kind",
                key=f"inputs[{number}].shape",
                found=list(one.shape),
                allowed="a row of tokens for each sequence" if one.tokens else "a size or more",
            )
    if model.inputs:
        samples, tokens = sample_of(model.inputs)
        if model.micro_batch != samples:
            raise InputError(
                "is not that of the recorded inputs", key="micro_batch", found=model.micro_batch, allowed=samples
            )
        if model.seq != tokens and any(one.tokens for one in model.inputs):
            raise InputError("is not that of the recorded inputs", key="seq", found=model.seq, allowed=tokens)
    for key, seen in zip(("heads", "kv_heads"), heads_of(model.parts), strict=True):
        if getattr(model, key) != seen:
            raise InputError("is not that of the first attention", key=key, found=getattr(model, key), allowed=seen)


def _check_weights(model: CapturedModel) -> None:
    """Raise `InputError` where the vocabulary is no table's, the type not most weights', or a tie leads nowhere."""
    weights = list(_all_weights(model))
    rows = {weight.shape[0] for weight in weights if len(weight.shape) > 1}
    if model.vocab not in {1, *rows}:
        raise InputError("is no number of rows of a weight", key="vocab", found=model.vocab)
    elements: Counter[str] = Counter()
    for weight in weights:
        elements[weight.dtype] += 0 if weight.tied_to else math.prod(weight.shape)
    if weights and elements[model.dtype] < max(elements.values()):
        most = elements.most_common(1)[0][0]
        raise InputError("is not the type of most weights", key="dtype", found=model.dtype, allowed=most)
    first = {weight.name for node in model.parts[model.before].nodes for weight in node.weights}
    if not model.one_piece and model.table not in {"", *first}:
        raise InputError(
            "the last part reads a weight that the first has not", key="after", found=model.table, allowed=sorted(first)
        )


def _all_weights(model: CapturedModel) -> Iterator[CapturedWeight]:
    for place in (model.before, *model.layers, model.after):
        for node in model.parts[place].nodes:
            yield from node.weights


def _check_chain(model: CapturedModel) -> None:
    """Raise `InputError` where layers of a chain pass on, or keep of their input, what cannot be."""
    if model.one_piece:
        return
    if model.passed_bytes % model.hidden:
        raise InputError(f"is no multiple of {model.hidden} elements", key="passed_bytes", found=model.passed_bytes)
    moved = sum(
        kernel_from_text(one.kernel).bytes
        for place in (model.before, *model.layers)
        for node in model.parts[place].nodes
        for one in node.forward
    )
    if model.passed_bytes > moved:
        raise InputError(
            "is more than the forward pass moves before the last layer ends",
            key="passed_bytes",
            found=model.passed_bytes,
            allowed=f"<= {moved:,.0f}",
        )
    for place in dict.fromkeys(model.layers[1:]):
        kept = sum(one.nbytes for node in model.parts[place].nodes for one in node.saved if one.name == INPUT)
        if kept > model.passed_bytes:
            raise InputError(
                f"layers of part {place} keep {kept:,.0f} bytes of what passes between them",
                key="passed_bytes",
                found=model.passed_bytes,
                allowed=f">= {kept:,.0f}",
            )

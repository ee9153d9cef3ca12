"""A captured model as plain data: operations of a module's parts, with the tensors that autograd keeps.

All sizes are those of the recorded micro-batch on a single GPU. ``split`` marks what tensor-parallel ranks share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from simulator.bounds import ModelSize
from simulator.errors import InputError
from simulator.program import Attention, Matmul, kernel_from_text

#: Types of weights that are simulated.
CapturedType = Literal["bf16", "fp16", "fp32"]
#: Bytes of one tensor, or of several together: no GPU holds a pebibyte.
TensorBytes = Annotated[float, Ge(0), Le(2.0**50)]
#: Name of kept tensors that the layer before passes on.
INPUT = "input"


@dataclass(frozen=True, kw_only=True)
class CapturedKernel:
    """One kernel."""

    name: str
    """the module and the operation of PyTorch"""
    kernel: str
    """its kind and sizes in the text form of programs, such as ``matmul m=4 n=8 k=4``"""
    split: tuple[str, ...] = ()
    """sizes that tensor-parallel ranks share"""
    summed_bytes: TensorBytes = 0.0
    """of a result that tensor-parallel ranks then sum; 0: none"""
    gathered_bytes: TensorBytes = 0.0
    """of a result of which tensor-parallel ranks have parts, and then gather all; 0: none"""


@dataclass(frozen=True, kw_only=True)
class CapturedTensor:
    """An activation that is kept from the forward to the backward pass."""

    name: str
    """`INPUT`, or else a number in its part"""
    nbytes: TensorBytes
    """of the storage"""
    split: bool = False
    """whether tensor-parallel ranks hold a part each"""


@dataclass(frozen=True, kw_only=True)
class CapturedWeight:
    """A weight that an operation reads."""

    name: str
    """counted from the part that has it"""
    shape: tuple[Annotated[int, Ge(0)], ...]
    """in elements"""
    dtype: CapturedType
    """of its elements"""
    gradient: str = ""
    """name of the product that computes its gradient; norms, biases and embeddings have none"""
    split_dimension: Annotated[int, Ge(-1)] = -1
    """dimension that tensor-parallel ranks share; -1: all hold the whole"""
    tied_to: str = ""
    """weight before it that is the same"""
    trainable: bool = True
    """false of weights without gradients"""


@dataclass(frozen=True, kw_only=True)
class CapturedNode:
    """One differentiable operation, as autograd recorded it."""

    forward: tuple[CapturedKernel, ...] = ()
    """kernels of the forward pass"""
    input_grad: tuple[CapturedKernel, ...] = ()
    """kernels of the backward pass on which gradients of activations depend"""
    weight_grad: tuple[CapturedKernel, ...] = ()
    """kernels that only gradients of weights depend on"""
    saved: tuple[CapturedTensor, ...] = ()
    """what is kept for the backward pass"""
    weights: tuple[CapturedWeight, ...] = ()
    """weights that it reads"""
    forward_bytes: TensorBytes = 0.0
    """alive in its forward pass, beside what is kept"""
    grad_bytes: TensorBytes = 0.0
    """alive in its backward pass, beside what is kept and gradients of weights"""
    output_grad_bytes: TensorBytes = 0.0
    """of the gradient of its output"""


@dataclass(frozen=True, kw_only=True)
class CapturedPart:
    """A layer, or what runs before or after all layers. Equal layers are one part."""

    nodes: tuple[CapturedNode, ...]
    """in the order of the forward pass"""


@dataclass(frozen=True, kw_only=True)
class CapturedInput:
    """A tensor that the module was called with."""

    shape: tuple[Annotated[int, Ge(1)], ...]
    """in elements"""
    tokens: bool = False
    """whether it holds numbers of tokens, a row for each sequence"""


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """A model that was captured from a PyTorch module.

    ``parts`` are different from each other; ``before``, ``layers`` and ``after`` are their numbers.
    """

    format: Literal[1]
    """version of the file"""
    name: str
    """class of the module"""
    torch: str
    """version of PyTorch that recorded it"""
    micro_batch: ModelSize
    """sequences, or samples, that were recorded"""
    seq: ModelSize
    """tokens of each; 1 where the module does not read tokens"""
    dtype: CapturedType
    """of most weights"""
    hidden: ModelSize
    """elements of a token that pass from a layer to the next"""
    heads: ModelSize
    """heads of attention that were seen, 1 without attention"""
    kv_heads: ModelSize
    """heads of keys and values that were seen"""
    vocab: ModelSize
    """tokens of the vocabulary, 1 without an embedding of tokens"""
    passed_bytes: TensorBytes
    """of the tensors that pass from a layer to the next"""
    one_piece: str
    """why a pipeline cannot split the layers; empty where it can"""
    unsplit: str
    """why tensor-parallel ranks cannot share its products; empty where they can"""
    widest_split: ModelSize
    """largest number of tensor-parallel ranks of which all shared sizes are a multiple: their common divisor"""
    parts: tuple[CapturedPart, ...]
    """distinct parts"""
    before: int
    """part before the first layer"""
    layers: tuple[int, ...]
    """part of each layer"""
    after: int
    """part after the last layer, with the loss"""
    inputs: tuple[CapturedInput, ...] = ()
    """what the module was called with"""
    layer_list: str = ""
    """list of modules that the layers are of; empty where the whole module is one layer"""
    compiled: bool = False
    """whether layers were recorded under torch.compile"""

    @property
    def recorded(self) -> dict[str, object]:
        """Keys of a workload's ``training`` that are as they were recorded, with their values."""
        return {"seq": self.seq, "micro_batch": self.micro_batch, "precision": self.dtype}

    def part_of_layer(self, number: int) -> int:
        """Return the part of a layer; after those that were recorded the last of them comes again."""
        return self.layers[min(number, len(self.layers) - 1)]

    def attention_share(self, layers: int) -> float:
        """Return attention's part of the FLOPs of so many layers: fused kernels, and products without a weight."""
        parts = [self.parts[self.part_of_layer(number)] for number in range(layers)]
        total = sum(part_flops(part, causal=False) for part in parts)
        weighted = sum(part_flops(_with_weights(part), causal=False) for part in parts)
        return (total - weighted) / total if total else 0.0

    @property
    def table(self) -> str:
        """Name of the weight of the first part that the last one reads too; empty where there is none."""
        names = [weight.tied_to for node in self.parts[self.after].nodes for weight in node.weights if weight.tied_to]
        return names[0] if names else ""

    @property
    def parameters(self) -> int:
        """Elements of all weights, each counted once."""
        numbers = (self.before, *self.layers, self.after)
        return sum(_elements(weight) for number in numbers for weight in _weights(self.parts[number]))

    @property
    def trained_parameters(self) -> int:
        """Elements of the weights that have gradients, each counted once."""
        numbers = (self.before, *self.layers, self.after)
        weights = (weight for number in numbers for weight in _weights(self.parts[number]))
        return sum(_elements(weight) for weight in weights if weight.trainable)

    @property
    def scales_of_8_bits(self) -> frozenset[str]:
        """How operands of products in 8 bits are scaled (``tensor``, ``rows``); empty where there are none."""
        nodes = (node for part in self.parts for node in part.nodes)
        texts = (one.kernel for node in nodes for one in (*node.forward, *node.input_grad, *node.weight_grad))
        products = (kernel_from_text(text) for text in texts if " dtype=fp8" in text)
        return frozenset(one.scaling for one in products if isinstance(one, Matmul))

    def save(self, path: str | Path) -> None:
        """Write the file ``path``, which ``model: {captured: PATH}`` in a workload file names.

        Raises `InputError` where it cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(_without_defaults(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", file=path) from None


def heads_of(parts: Sequence[CapturedPart]) -> tuple[int, int]:
    """Return the heads of the first attention in the ``parts``, and those of its keys and values; 1 without any."""
    kernels = (one for part in parts for node in part.nodes for one in node.forward)
    for text in (one.kernel for one in kernels if one.kernel.startswith("attention ")):
        attention = kernel_from_text(text)
        assert isinstance(attention, Attention)
        return attention.heads, attention.kv_heads
    return 1, 1


@lru_cache(maxsize=256)
def part_flops(part: CapturedPart, *, causal: bool) -> float:
    """Return the FLOPs of products and attention of a part, forward and backward.

    Attention that has a backward pass counts three times its forward pass. It counts in full where it is not
    ``causal``, as in other models.
    """
    total = 0.0
    for node in part.nodes:
        passes = 3 if node.input_grad else 1
        for one in (*node.forward, *node.input_grad, *node.weight_grad):
            kernel = kernel_from_text(one.kernel)
            if not isinstance(kernel, Attention):
                total += kernel.flops
            elif not kernel.backward:
                whole = kernel if causal else replace(kernel, causal=False)
                total += passes * whole.flops
    return total


@lru_cache(maxsize=256)
def _with_weights(part: CapturedPart) -> CapturedPart:
    return CapturedPart(nodes=tuple(node for node in part.nodes if node.weights))


def sample_of(inputs: Sequence[CapturedInput]) -> tuple[int, int]:
    """Return the number of samples of ``inputs``, and the tokens of each; 1 where none has tokens."""
    tokens = [one for one in inputs if one.tokens]
    first = (tokens or inputs)[0]
    return first.shape[0], first.shape[1] if tokens else 1


def _weights(part: CapturedPart) -> list[CapturedWeight]:
    return [weight for node in part.nodes for weight in node.weights if not weight.tied_to]


def _elements(weight: CapturedWeight) -> int:
    elements = 1
    for size in weight.shape:
        elements *= size
    return elements


def _without_defaults(value: Any) -> Any:
    """Return a dataclass as data without the fields that have their default."""
    if isinstance(value, tuple):
        return [_without_defaults(entry) for entry in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    present = [field for field in fields(value) if getattr(value, field.name) != field.default]
    return {field.name: _without_defaults(getattr(value, field.name)) for field in present}

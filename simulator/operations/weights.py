"""Weights: what a rank holds of each tensor of a model, which ranks hold the same, and which tensors are trained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from simulator.program import Axis
from simulator.units import DTYPE_BYTES, FP32_BYTES

#: The axis of the ranks that hold the same values: outside experts, and of experts.
DENSE_AXIS, EXPERT_AXIS = Axis.DP, Axis.EDP
#: Elements of a 4-bit NormalFloat block, which share a scale of one byte, and scales that share one in fp32
#: (arXiv 2305.14314, section 3, double quantization).
NF4_BLOCK, NF4_SCALES = 64, 256
SCALE_BYTES = FP32_BYTES
#: 4 bits an element and 0.127 bits of scales. A row of ``int8`` has a scale in fp32 (arXiv 2208.07339, section 2.1).
NF4_BYTES = 0.5 + (1 + SCALE_BYTES / NF4_SCALES) / NF4_BLOCK


@dataclass(frozen=True)
class Weight:
    """One tensor of a model's weights, as one rank holds it.

    ``name`` counts from the part of the model that has the weight: ``attention.qkv.weight`` of a layer.
    ``shape`` is this rank's, ``whole`` the model's own: not split over ranks, not padded, without redundant experts.
    ``sharded_over`` are the axes of ranks between which the tensor is split, however many ranks these have.
    ``partial_rows``: so many rows (of dimension 0) all tensor-parallel ranks hold alike, and each computes only a part
    of their gradient. Examples are norms under sequence parallelism, KV heads that ranks share, and routers.
    ``gradient_product`` is the product that computes the gradient; norms, biases and embeddings have none.
    ``trainable`` is False of frozen weights, which have no gradients and no states. ``storage`` is the type that the
    values are stored in, such as ``nf4``, where it is not ``dtype``.
    ``in_low_precision``: its products read copies in 8 bits. ``gathered_in_8_bits``: ZeRO-3 gathers these.
    ``tensors``: tensors of the software that make up this one, such as those of each expert.
    ``tied_to`` is the weight whose values these are. Both are one tensor, unless ``copied``: then the rank holds these
    values a second time, as the other tensor is on another rank.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: str
    sharded_over: tuple[str, ...] = ()
    partial_rows: int = 0
    gradient_product: str = ""
    tied_to: str = ""
    copied: bool = False
    trainable: bool = True
    storage: str = ""
    in_low_precision: bool = False
    gathered_in_8_bits: bool = False
    tensors: int = 1

    @cached_property
    def elements(self) -> int:
        """Elements of this rank's tensor."""
        return math.prod(self.shape)

    @property
    def whole_elements(self) -> int:
        """Elements of the model's tensor."""
        return math.prod(self.whole)

    @property
    def partial_elements(self) -> int:
        """Elements of this rank's tensor whose gradients tensor-parallel ranks have to sum."""
        return self.partial_rows * math.prod(self.shape[1:])

    @cached_property
    def axis(self) -> Axis:
        """Axis of the ranks that hold the same values: ``edp`` for experts, else ``dp``.

        >>> [Weight("w", (8,), (8,), "bf16", sharded_over=axes).axis.value for axes in ((), ("tp",), ("ep", "etp"))]
        ['dp', 'dp', 'edp']
        """
        return EXPERT_AXIS if "ep" in self.sharded_over else DENSE_AXIS

    @property
    def is_stored(self) -> bool:
        """True unless the tensor is that of the weight it is tied to."""
        return self.copied or not self.tied_to

    @property
    def nbytes(self) -> float:
        """Bytes of this rank's tensor as it is stored.

        >>> [Weight("w", (64, 1024), (64, 1024), "bf16", storage=form).nbytes for form in ("", "int8", "nf4")]
        [131072.0, 65792.0, 33808.0]
        """
        if self.storage == "nf4":
            return self.elements * NF4_BYTES
        if self.storage == "int8":
            return float(self.elements + SCALE_BYTES * self.elements // self.shape[-1])
        return float(DTYPE_BYTES[self.dtype] * self.elements)

    @property
    def gathered_nbytes(self) -> float:
        """Bytes of the whole tensor as ZeRO-3 gathers it."""
        return float(self.elements) if self.gathered_in_8_bits else self.nbytes


def tie(weight: Weight, other: str, *, copied: bool = False) -> Weight:
    """Return ``weight`` tied to the one named ``other``."""
    return replace(weight, tied_to=other, copied=copied)


def prefixed(weights: Iterable[Weight], prefix: str) -> tuple[Weight, ...]:
    """Return ``weights`` with names that count from the whole model; ``prefix`` is the name of their part.

    >>> [weight.name for weight in prefixed([Weight("fc1.weight", (8, 2), (8, 2), "bf16")], "layers.3")]
    ['layers.3.fc1.weight']
    """
    return tuple(replace(weight, name=f"{prefix}.{weight.name}") for weight in weights)


def by_axis(weights: Iterable[Weight]) -> dict[str, tuple[Weight, ...]]:
    """Return the ``weights`` that have tensors of their own by their axis, in order of first mention."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        if weight.is_stored:
            groups.setdefault(weight.axis, []).append(weight)
    return {axis: tuple(group) for axis, group in groups.items()}


def trained(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Return the ``weights`` that have tensors of their own which are trained."""
    return tuple(weight for weight in weights if weight.is_stored and weight.trainable)


def stored_elements(weights: Iterable[Weight]) -> int:
    """Return the elements of the tensors that a rank holds for ``weights``, frozen ones among them."""
    return sum(weight.elements for weight in weights if weight.is_stored)


def elements(weights: Iterable[Weight]) -> int:
    """Return the elements of the `trained` tensors of ``weights``: of their gradients, and of each state."""
    return sum(weight.elements for weight in trained(weights))


def elements_by_axis(weights: Iterable[Weight]) -> dict[str, int]:
    """Return `elements` of ``weights`` by their axis, in order of first mention."""
    counts: dict[str, int] = {}
    for weight in trained(weights):
        counts[weight.axis] = counts.get(weight.axis, 0) + weight.elements
    return counts


def gathered_weight_bytes(weights: Iterable[Weight]) -> float:
    """Return the bytes of ``weights`` as ZeRO-3 gathers them."""
    return float(sum(weight.gathered_nbytes for weight in weights if weight.is_stored))


def weight_bytes(weights: Iterable[Weight]) -> float:
    """Return the bytes of the tensors that a rank holds for ``weights``."""
    return float(sum(weight.nbytes for weight in weights if weight.is_stored))

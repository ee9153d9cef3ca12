"""Trained weights of a model: adapters beside frozen weights, and how the frozen ones are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class AdapterPlan:
    """Pairs of thin matrices beside products (LoRA, arXiv 2106.09685): y = x W + s (x A) B.

    A takes the input to ``rank`` columns, B takes these to the columns of a target. ``dropout``: the probability, of
    each adapter's input. ``kind``: of what kind they are (`simulator.adapters`).
    """

    rank: int
    targets: tuple[str, ...]
    dtype: str
    dropout: float = 0.0
    kind: str = "lora"


@dataclass(frozen=True)
class Tuning:
    """Weights that are trained in one part of a model.

    ``frozen``: kinds of weights that are not, such as ``norms``. ``storage``: type that frozen matrices are stored in,
    where it is not the working precision. ``reached``: the part gives back a gradient of its input.
    """

    adapters: AdapterPlan | None = None
    frozen: tuple[str, ...] = ()
    storage: str = ""
    reached: bool = True


class ThinProducts(NamedTuple):
    """The products of an adapter: of ``rows`` with A, to ``rank`` columns, and with B, which is ``outer`` x ``rank``.

    ``name`` begins the names of its kernels; ``inner`` is the width of the rows.
    """

    name: str
    rows: int
    inner: int
    rank: int
    outer: int


#: Training of every weight.
ALL_TRAINED = Tuning()

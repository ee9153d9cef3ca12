"""Facts of a mixer: the operation of a layer in which tokens of a sequence act on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from simulator.operations.nodes import Node
from simulator.operations.shapes import Shapes

#: Masks beside the causal one. ``window`` leaves the last ``sliding_window`` tokens, ``chunk`` those of the query's own
#: piece of ``attention_chunk``, ``top_k`` those that an indexer has chosen.
Mask = Literal["", "window", "chunk", "top_k"]


@dataclass(frozen=True)
class Attends:
    """Softmax attention from queries to keys and values. ``rotates``: queries and keys have rotary positions."""

    mask: Mask = ""
    rotates: bool = True


@dataclass(frozen=True)
class MixerProduct:
    """A linear layer of a mixer, from ``k`` to ``n`` columns as this rank has them.

    ``split``: over tensor-parallel ranks by ``column`` or by ``row``, or held whole by each (``none``), which works on
    its rows. ``saved`` names the input. ``rows`` are those of the model's own weight. ``detached``: no gradient
    passes on to its input.
    """

    name: str
    n: int
    k: int
    split: Literal["column", "row", "none"]
    saved: str
    rows: int
    bias: bool = False
    detached: bool = False


Operations = tuple[MixerProduct | Node, ...]


class Refusal(NamedTuple):
    """A key of a workload with which a mixer cannot run, why, and what it may be."""

    key: str
    value: object
    message: str
    allowed: str


class Split(NamedTuple):
    """Ranks that a workload splits a mixer over."""

    tp: int
    cp: int


@dataclass(frozen=True)
class Mixer:
    """One kind of mixer.

    ``attends`` where it is softmax attention; its products are then those of all attention of the model. ``sizes`` is
    the dataclass of what else it needs, a section of a workload's ``model`` by the name of ``section``. ``operations``
    are all of its own, from normed rows to its output or, of attention, those beside it. ``flops`` of a token are those
    of its mathematics beside products with weights, given the tokens that a token sees on average. ``refusals`` are
    asked of every workload.
    """

    name: str
    about: str
    attends: Attends | None = None
    section: str = ""
    sizes: type | None = None
    operations: Callable[[Shapes, Any], Operations] | None = None
    flops: Callable[[Any, float], float] | None = None
    refusals: Callable[[Any, Split], Iterator[Refusal]] | None = None

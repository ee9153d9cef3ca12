"""A kind of adapters: the operations that it puts beside a frozen product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.frameworks import Framework
from simulator.operations.nodes import Node, Ops
from simulator.operations.shapes import Shapes
from simulator.operations.tuning import ThinProducts
from simulator.operations.weights import Weight


class AdaptedProduct(Protocol):
    """A frozen product y = x W of a layer, and the targets in it, each a part of the columns of y."""

    @property
    def shapes(self) -> Shapes:
        """The shapes of a rank."""

    @property
    def software(self) -> Framework:
        """The framework that runs the adapters."""

    @property
    def targets(self) -> Sequence[ThinProducts]:
        """Targets with the sizes of their products on a rank."""

    @property
    def storage(self) -> str:
        """The type that W is stored in, where it is not the working precision."""

    def factors(self) -> tuple[Node, Node]:
        """Return the products with A and those with B of all targets, both trained."""

    def made_whole(self) -> Ops:
        """Return the kernels that make W whole in working precision, none where it is."""

    def column_weights(self, tensor: str) -> tuple[Weight, ...]:
        """Return a trained weight for each target, with a number per column, by the name of the ``tensor``."""


@dataclass(frozen=True)
class AdapterKind:
    """A kind of adapters.

    ``title``: how people call it. ``nodes``: the operations beside a product, in their order, with trained weights.
    ``splits``: tensor-parallel ranks can each have a part. ``takes_dropout``: its input can be dropped in part.
    """

    name: str
    title: str
    nodes: Callable[[AdaptedProduct], tuple[Node, ...]]
    splits: bool = True
    takes_dropout: bool = True

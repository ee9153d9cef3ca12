"""Kernels around the travel of tokens to their experts, by the software that sends them."""

from __future__ import annotations

from typing import NamedTuple

from simulator.operations.experts import Experts
from simulator.operations.nodes import Ops


class RowChunks(NamedTuple):
    """Chunks of rows, by expert and rank, that are put in order.

    ``places``: kernels of a forward pass that find where they go; ``parts``: so many are cut and joined one by one.
    """

    places: Ops
    parts: int


def cut_and_joined(experts: Experts) -> RowChunks:
    """Return chunks that are cut and joined one by one."""
    return RowChunks((), len(experts.loads) * experts.ep * experts.etp)


class Surroundings(NamedTuple):
    """Work of a library that sends a token once to each rank, around its transfers.

    ``before`` and ``behind``: kernels on the two sides of the dispatch, before rows are permuted. ``gradients_before``:
    those before the gradients of outputs travel. ``gradients_behind``: those between the gradients of permuted rows and
    their travel; ``gradients_last``: those behind that. ``beside_bytes`` travel with the tokens of the dispatch,
    ``gradients_beside_bytes`` with the gradients of these. ``summed_bytes`` are written by the kernel that sums
    gradients of rows, beside these.
    """

    before: Ops
    behind: Ops
    gradients_before: Ops
    gradients_behind: Ops
    gradients_last: Ops
    beside_bytes: float
    gradients_beside_bytes: float
    summed_bytes: float

"""A rank's share of a layer with experts: sizes, and how many copies of tokens come and go."""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of an index or a count (int64), of a probability (fp32), and of an entry of the map of choices (bool).
INDEX, PROBABILITY, CHOICE = 8, 4, 1


@dataclass(frozen=True)
class Experts:
    """One rank's share of a layer with experts.

    ``tokens`` are routed by the rank to ``top_k`` of ``experts``: its rows, or without sequence parallelism its part of
    the rows that tp ranks share. ``sent`` and ``received`` are the copies that leave and reach it, ``loads`` the copies
    for each expert of the rank. Rows ``travelling`` to other ranks and ``arriving`` are as many, or fewer where the
    ``dispatcher`` sends a token once to each rank. ``ffn`` and ``shared_ffn`` are the rank's own widths.
    ``received_shares`` and ``per_node`` are the dispatch's (see `Comm`). ``nodes``: those that the group is on.
    ``shared_gate``: a gate weighs what the shared experts give. ``overlaps``: the shared experts compute beside it and
    the combine. ``hidden_by_others``: another micro-batch computes beside both. ``beside_dense``: a dense MLP works on
    the same rows. ``permutes_by_operations``: PyTorch's own kernels permute. ``balanced``: a loss balances the experts.
    """

    tokens: int
    experts: int
    top_k: int
    sent: float
    received: float
    loads: tuple[int, ...]
    received_shares: tuple[float, ...]
    dispatcher: str
    travelling: float
    arriving: float
    per_node: float
    ep: int
    etp: int
    ffn: int
    shared_ffn: int
    shared_gate: bool
    counted: bool
    router_dtype: str
    overlaps: bool
    hidden_by_others: bool
    beside_dense: bool = False
    permutes_by_operations: bool = False
    balanced: bool = False
    nodes: int = 1

    @property
    def worked_on(self) -> int:
        """Copies that pass the rank's experts."""
        return sum(self.loads)

"""Facts of a machine that one command's output holds, as keys of a cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuFacts:
    """GPUs of a node. ``types``: type -> number, in order.

    ``generation`` and ``lanes``: of the PCIe link that most have; None where the file does not say it.
    """

    types: Mapping[str, int]
    generation: int | None = None
    lanes: int | None = None

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return sum(self.types.values())


@dataclass(frozen=True)
class NicFacts:
    """Network cards that training uses: ``names`` of their devices, bit/s of each, and the transport over them.

    ``unused``: names of cards that are slower, or down.
    """

    names: tuple[str, ...]
    bandwidth_bps: float
    transport: str
    unused: tuple[str, ...]


@dataclass(frozen=True)
class MachineFacts:
    """Facts of one file. ``form``: the command that wrote it. ``assumed`` and ``left_out``: as `Imported` has them."""

    form: str
    gpus: GpuFacts | None = None
    nics: NicFacts | None = None
    nodes: int | None = None
    assumed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

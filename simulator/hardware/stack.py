"""A stack: how collectives run on one GPU, fabric and software, in at most eight physical parameters.

A profile of a GPU says how its links carry collectives in as much detail as was measured on it. A stack says it for a
whole installation: NCCL or RCCL version, network plugin, adapters. Its numbers are few enough for a person to compare,
and for a curve of nccl-tests to fit. `simulator.costs.stack` is the one rule that turns them into transports.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Gt

from simulator.bounds import Fraction, NotNegative, Positive, Text
from simulator.errors import InputError
from simulator.hardware.transport import ProtocolName

#: A stack with more would be a table of its measurements.
MAX_PARAMETERS = 8


@dataclass(frozen=True, kw_only=True)
class StackParameters:
    """Parameters that are told apart; one that is left out has the value in brackets."""

    start_s: NotNegative
    """starting and ending a collective, whatever its ranks"""
    nvlink_hop_s: NotNegative = 0.0
    """software per hop inside a node with LL; LL128 and simple take NCCL's multiples of it [0]"""
    network_hop_s: NotNegative = 0.0
    """the same between nodes [0]"""
    nvlink_efficiency: Fraction = 1.0
    """share of the NVLinks' line rate that large rings and sends reach [1]"""
    network_efficiency: Fraction = 1.0
    """share of the network cards' line rate that large messages reach [1]"""
    nvls_efficiency: Fraction | None = None
    """share of the NVLinks' line rate where the switches add and multicast [nvlink_efficiency]"""
    ll_fraction: Fraction = 0.5
    """of simple's bandwidth that LL reaches [1/2: half of what it sends is flags]"""
    ll128_most_bytes: Positive | None = None
    """what a link carries at most with LL128, be simple faster or not: where NCCL's tuner leaves it [none]"""
    half_bytes: NotNegative = 0.0
    """a flow of x bytes takes 1 + sqrt(half_bytes / x) times its time at full bandwidth, as its pipeline fills [0]"""
    full_bytes: Positive | None = None
    """flow from which on chunks have their largest size, and filling takes no longer [none]"""
    copy_Bps: Positive = 1e30
    """bytes/s at which a rank handles its own part of the message, which crosses no link [not told apart]"""
    peer_latency_s: NotNegative = 0.0
    """per peer of an all-to-all [0]"""

    def told_apart(self) -> dict[str, float]:
        """Return the parameters that differ from the values in brackets, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {one.name: values[one.name] for one in fields(self) if values[one.name] != one.default}


@dataclass(frozen=True, kw_only=True)
class FitErrors:
    """Errors of times: exp(mean |ln(predicted / measured)|) - 1."""

    n: Annotated[int, Gt(0)]
    """rows"""
    geometric_mean: NotNegative


@dataclass(frozen=True, kw_only=True)
class StackFit:
    """The rows that the parameters were fitted to, and their errors."""

    n_gpus: Annotated[int, Gt(1)]
    """the number of GPUs whose rows were fitted"""
    rows: FitErrors
    """those rows"""
    held_out: FitErrors | None = None
    """rows of other numbers of GPUs, which were only predicted"""
    begun: StackParameters
    """where the search begins and is held near: what a profile has for the same GPU, a data sheet, or else a first look
    at the curves, those of other numbers of GPUs among them"""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A versioned set of parameters. Raises `InputError` where it sets more than `MAX_PARAMETERS`."""

    schema_version: Literal[1]
    name: Text
    gpu: Text
    """name of the GPU, as cluster files give it"""
    fabric: Text
    """what joins GPUs and nodes, in words"""
    software: Text
    """NCCL, RCCL, plugins and their versions, as far as the source says"""
    source: Text
    """where the measurements are from"""
    note: Text = ""
    protocols: tuple[ProtocolName, ...] = ("ll", "ll128", "simple")
    """those of NCCL's that the software uses"""
    pat: bool = True
    """whether it chooses PAT, as NCCL does from 2.23 on, and RCCL does not"""
    parameters: StackParameters
    fitted: StackFit | None = None

    def __post_init__(self) -> None:
        names = list(self.parameters.told_apart())
        if len(names) > MAX_PARAMETERS:
            allowed = f"at most {MAX_PARAMETERS}"
            raise InputError("sets too many", key="parameters", found=", ".join(names), allowed=allowed)
        if "simple" not in self.protocols:
            raise InputError("lacks simple", key="protocols", found=", ".join(self.protocols))

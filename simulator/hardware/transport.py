"""How links of one kind carry collectives: the ``transports`` of a calibration profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simulator.bounds import Fraction, NotNegative, Positive
from simulator.errors import InputError
from simulator.hardware.figures import Cited

TransportKind = Literal["nvlink", "pcie", "infiniband", "roce", "tcp", "nvme", "memory"]
ProtocolName = Literal["ll", "ll128", "simple"]
#: What carries bytes: the keys of `Transport` that list protocols, and PAT, which has rings' simple alone.
Way = Literal["protocols", "p2p", "in_switch", "pat"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One of NCCL's ways to hand over data: LL and LL128 send flags with it (quick start), simple synchronises chunks
    (full bandwidth)."""

    base_latency_s: NotNegative
    """starting and ending a collective"""
    hop_latency_s: NotNegative
    """software per hop, beside the latency of the links"""
    bandwidth_fraction: Fraction
    """of what simple reaches"""
    half_bytes: NotNegative = 0.0
    """h of the filling of the pipeline: a flow of x bytes takes 1 + sqrt(h / x) times its time at full bandwidth"""
    head_bytes: Positive | None = None
    """of in_switch: what h grows by with every head of NVLink SHARP, as its kernel loops over a chunk of each [none]"""
    full_bytes: Positive | None = None
    """flow from which on chunks have their largest size, so that filling takes no longer [none: they grow on]"""
    most_bytes: Positive | None = None
    """NCCL's tuner leaves the protocol where a link would carry more, be it faster or not"""


@dataclass(frozen=True, kw_only=True)
class Transport(Cited):
    """Constants of the timing model of `simulator.network.collectives`."""

    efficiency: Fraction
    """share of the line rate that very large transfers reach"""
    copy_Bps: Positive
    """bytes/s at which a rank of a ring or a tree handles its own part of the message, which crosses no link"""
    p2p_copy_Bps: Positive
    """the same of an all-to-all"""
    peer_latency_s: NotNegative
    """per peer of an all-to-all"""
    protocols: dict[ProtocolName, Protocol]
    """of rings and trees"""
    p2p: dict[ProtocolName, Protocol]
    """of sends and receives, all-to-all included: a kernel of its own, that sums nothing up"""
    in_switch: Protocol | None = None
    """of what switches sum up and multicast (NVLS, SHARP), which is simple's alone [as simple of rings and trees]"""
    pat: bool = True
    """whether the software chooses PAT, as NCCL does from 2.23 on, and RCCL does not"""

    def ways(self, way: Way) -> Mapping[ProtocolName, Protocol]:
        """Return the protocols of one way to carry bytes."""
        if way == "in_switch":
            return {"simple": self.in_switch or self.protocols["simple"]}
        if way == "pat":
            return {"simple": self.protocols["simple"]}
        return self.p2p if way == "p2p" else self.protocols

    def __post_init__(self) -> None:
        for key, protocols in (("protocols", self.protocols), ("p2p", self.p2p)):
            if "simple" not in protocols:
                raise InputError("lacks simple", key=key, found=", ".join(protocols))
            if protocols["simple"].most_bytes is not None:
                raise InputError("simple carries any size", key=f"{key}.simple.most_bytes", fix="remove the key")
            for name, protocol in protocols.items():
                if protocol.head_bytes:
                    raise InputError("only in_switch has heads", key=f"{key}.{name}.head_bytes", fix="remove the key")

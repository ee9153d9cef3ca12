"""How links of one kind carry collectives: the ``transports`` of a calibration profile."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from simulator.config.cited import Cited, Fraction, NotNegative, Positive
from simulator.config.files import Section
from simulator.errors import InputError

TransportKind = Literal["nvlink", "pcie", "infiniband", "roce", "tcp", "nvme", "memory"]
ProtocolName = Literal["ll", "ll128", "simple"]


class Protocol(Section):
    """One of NCCL's ways to hand over data: LL and LL128 send flags with it (quick start), simple synchronises chunks
    (full bandwidth)."""

    base_latency_s: NotNegative
    """starting and ending a collective"""
    hop_latency_s: NotNegative
    """software per hop, beside the latency of the links"""
    bandwidth_fraction: Fraction
    """of what simple reaches"""
    half_bytes: NotNegative = 0.0
    """h of the filling of the pipeline: a part of x bytes takes 1 + sqrt(h / x) times its time at full bandwidth"""


class Transport(Cited):
    """Constants of the timing model of `simulator.network.collectives`."""

    efficiency: Fraction
    """share of the line rate that very large transfers reach"""
    copy_Bps: Positive
    """bytes/s at which a rank handles its own part of the message, which crosses no link"""
    p2p_latency_s: NotNegative
    """what sends and receives, all-to-all included, take longer to start than a ring"""
    peer_latency_s: NotNegative
    """per peer of an all-to-all"""
    protocols: dict[ProtocolName, Protocol]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "simple" not in self.protocols:
            raise InputError("lacks simple", key="protocols", found=", ".join(self.protocols))
        return self

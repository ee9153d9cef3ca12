"""Section `interference` of a calibration profile: what NCCL's kernels take from others on their GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from simulator.bounds import Fraction
from simulator.errors import InputError
from simulator.hardware.figures import Cited


@dataclass(frozen=True, kw_only=True)
class MemorySpeeds(Cited):
    """Speeds of kernels that memory bounds, relative to what they reach alone."""

    norm: Fraction
    """bound by arithmetic too"""
    other: Fraction


@dataclass(frozen=True, kw_only=True)
class MemoryShares(Cited):
    """Share of its memory's time that kernels of each class leave to communication."""

    matmul: Fraction
    attention: Fraction
    norm: Fraction
    other: Fraction


@dataclass(frozen=True, kw_only=True)
class HeldSms:
    """SMs that NCCL's kernels hold."""

    collective: Annotated[int, Ge(0)]
    """0: not known, and communication takes nothing from kernels"""
    p2p: Annotated[int, Ge(0)]
    """by sends and receives alone"""

    def __post_init__(self) -> None:
        if self.p2p and not self.collective:
            raise InputError(
                "sends and receives hold SMs where collectives hold none",
                key="interference.sms.p2p",
                found=self.p2p,
                allowed="0, as interference.sms.collective is",
                fix="collective: 24, what they hold of an H100, or p2p: 0: communication takes nothing from kernels",
            )


@dataclass(frozen=True, kw_only=True)
class Interference(Cited):
    """Losses of kernels beside NCCL's on their GPU, while these wait for their peers or move bytes."""

    sms: HeldSms
    """streaming multiprocessors that it holds, a thread block each for NCCL's channels"""
    matmul_sms: Annotated[int, Ge(0)]
    """those that matrix products lose: their thread blocks run in clusters of two, which need two free neighbours"""
    memory_speed: MemorySpeeds
    """while bytes move"""
    waiting_speed: MemorySpeeds
    """while peers are waited for"""
    leaves: MemoryShares
    """what kernels leave to communication, which is slowed where it would take more; 1: all"""

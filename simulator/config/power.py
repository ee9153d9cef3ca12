"""Section `power` of a calibration profile: what kernels draw, and what the power limit leaves of the clock."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import model_validator

from simulator.config.cited import Cited, NotNegative, Positive, need_all
from simulator.config.section import Section
from simulator.errors import InputError

#: What differs in what it draws and in how far the clock matters to it.
LoadClass = Literal["matmul", "attention", "arithmetic", "norm", "memory", "communication"]


class Load(Section):
    """What a class of kernels draws, and how its speed follows the clock of the SMs (the GPU's, below)."""

    watts: Positive
    """of a GPU that does nothing else, at ``clock_hz``"""
    clock_hz: Positive
    """where the power limit then leaves the clock, or the highest one"""
    priced_at_hz: Positive
    """clock that the class's times hold at"""
    highest_clock_hz: Positive
    """above which the class is no faster and draws no more, whatever clock the GPU reports"""
    speed_exponent: NotNegative
    """speed goes with this power of the clock: caches and memory have clocks of their own"""
    power_exponent: NotNegative
    """what is drawn above an idle GPU goes with this power of the clock"""


class Power(Cited):
    """The power limit as a budget: clocks fall until a running mean keeps to it."""

    limit_w: Positive
    """what a GPU draws that the limit holds back, mean over seconds"""
    averaged_s: Positive
    """time constant of the running mean that keeps to the limit"""
    idle_w: NotNegative
    """at the highest clock with nothing to do"""
    highest_clock_hz: Positive
    loads: dict[LoadClass, Load]
    """arithmetic, norm: streams that arithmetic bounds too (GELU; norms); communication: while NCCL moves bytes"""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        need_all("power.loads", self.loads, get_args(LoadClass))
        if self.idle_w >= self.limit_w:
            raise InputError("is not below the limit", key="power.idle_w", found=self.idle_w, allowed=self.limit_w)
        return self

"""Section `power` of a calibration profile: what kernels draw, and what the power limit leaves of the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Le

from simulator.bounds import NotNegative, Positive
from simulator.errors import InputError
from simulator.hardware.figures import Cited, need_all

#: What differs in what it draws and in how far the clock matters to it.
LoadClass = Literal["matmul", "attention", "arithmetic", "norm", "memory", "communication"]
#: Dynamic power goes with the clock and the square of a voltage that follows it at most; with more it is a slip.
Exponent = Annotated[float, Ge(0), Le(5)]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Power of a class of kernels, and how its speed follows the clock of the SMs (the GPU's, below)."""

    watts: Positive
    """of a GPU that does nothing else, at ``clock_hz``"""
    clock_hz: Positive
    """where the power limit then leaves the clock, or the highest one"""
    priced_at_hz: Positive
    """clock that the class's times hold at; above the highest where they are shorter than any that was seen in use"""
    highest_clock_hz: Positive
    """above which the class is no faster and draws no more, whatever clock the GPU reports"""
    speed_exponent: Exponent
    """speed goes with this power of the clock: caches and memory have clocks of their own"""
    power_exponent: Exponent
    """what is drawn above an idle GPU goes with this power of the clock"""


@dataclass(frozen=True, kw_only=True)
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

    def __post_init__(self) -> None:
        need_all("power.loads", self.loads, get_args(LoadClass))
        if self.idle_w >= self.limit_w:
            raise InputError("is not below the limit", key="power.idle_w", found=self.idle_w, allowed=self.limit_w)
        for kind, load in self.loads.items():
            key = f"power.loads.{kind}"
            if load.watts < self.idle_w:
                raise InputError("is below an idle GPU's", key=f"{key}.watts", found=load.watts, allowed=self.idle_w)
            highest_hz = load.highest_clock_hz
            if highest_hz > self.highest_clock_hz:
                allowed = f"up to {self.highest_clock_hz:.4g}"
                raise InputError("is above the GPU's", key=f"{key}.highest_clock_hz", found=highest_hz, allowed=allowed)
            if load.clock_hz > highest_hz:
                raise InputError(
                    "is above the highest that does anything for the class",
                    key=f"{key}.clock_hz",
                    found=load.clock_hz,
                    allowed=f"up to {highest_hz:.4g}",
                )

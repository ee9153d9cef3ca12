"""The power limit as a budget: what kernels draw at a clock, and the clock that keeps their mean at the limit.

A GPU lowers its clock until it draws what it may. That is no property of a kernel: products alone run at three quarters
of the highest clock, but faster in a step, where kernels that draw less and waiting for others save for them. The
driver's controller settles within tens of milliseconds, less than a step, so that one clock per rank is taken, at which
the mean over the step is at the limit (`simulator.engine.clocks`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from simulator.config.power import LoadClass, Power
from simulator.program import Attention, GroupedMatmul, Kernel, Matmul, Memory

#: Streams that arithmetic or the issue of instructions bounds too, so that their speed follows the clock.
ARITHMETIC = frozenset(
    ("norm", "norm_bwd", "rms_norm", "rms_norm_bwd", "gelu", "gelu_bwd", "bias", "strided", "rope", "upcast", "reduce")
)
_CLASSES: dict[type, LoadClass] = {Matmul: "matmul", GroupedMatmul: "matmul", Attention: "attention"}
#: A GPU is not throttled below this share of its highest clock.
LEAST = 0.3


def load_class(kernel: Kernel) -> LoadClass | None:
    """What a kernel draws power as; None: it is of no class, as one whose length is given."""
    if isinstance(kernel, Memory):
        return "arithmetic" if kernel.op in ARITHMETIC else "memory"
    return _CLASSES.get(type(kernel))


@dataclass
class Loads:
    """What kernels of each class add up to: ``seconds`` that they last, and ``drawing_s`` that they draw what their
    class does, which is less where they leave units idle (see `simulator.costs.Costs.intensity`)."""

    seconds: dict[LoadClass, float] = field(default_factory=dict)
    drawing_s: dict[LoadClass, float] = field(default_factory=dict)

    def add(self, kind: LoadClass, seconds: float, drawing_s: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        self.drawing_s[kind] = self.drawing_s.get(kind, 0.0) + drawing_s

    def add_all(self, more: Loads, times: int = 1) -> None:
        for kind, seconds in more.seconds.items():
            self.add(kind, times * seconds, times * more.drawing_s[kind])


@dataclass(frozen=True)
class PowerBudget:
    """Clocks in Hz, of the SMs."""

    model: Power

    @property
    def highest_hz(self) -> float:
        return self.model.highest_clock_hz

    def slowness(self, kernel: Kernel, clock_hz: float, intensity: float = 1.0) -> float:
        """Seconds of a kernel at a clock, relative to its price: (clock of its price / clock) ^ exponent.

        ``intensity``: what the kernel drew relative to its class when it was measured alone; where that was less, its
        price holds at the higher clock at which it was at the limit too.
        """
        kind = load_class(kernel)
        if kind is None:
            return 1.0
        load = self.model.loads[kind]
        least = (load.priced_at_hz / self.highest_hz) ** self.model.exponent  # what draws less is not held down
        own_hz = load.priced_at_hz * max(intensity, least) ** (-1 / self.model.exponent)
        return float((own_hz / clock_hz) ** load.speed_exponent)

    def drawn_w(self, kind: LoadClass, clock_hz: float) -> float:
        """Watts above those of an idle GPU while kernels of a class run."""
        load = self.model.loads[kind]
        return (load.watts - self.model.idle_w) * float((clock_hz / load.clock_hz) ** self.model.exponent)

    def clock_hz(self, loads: Loads, total_s: float, at_hz: float) -> float:
        """The clock at which the mean over ``total_s`` is at the limit, or the highest where it stays below.

        ``loads``: at the clock ``at_hz``, side by side or not. At another clock kernels last longer or shorter, and so
        does the whole; waiting stays. To 1 MHz, so that it does not turn on how sums were rounded.
        """

        def over_j(clock_hz: float) -> float:
            joules, whole_s = 0.0, total_s
            for kind, seconds in loads.seconds.items():
                longer = float((at_hz / clock_hz) ** self.model.loads[kind].speed_exponent)
                joules += longer * loads.drawing_s[kind] * self.drawn_w(kind, clock_hz)
                whole_s += (longer - 1) * seconds
            return joules - (self.model.limit_w - self.model.idle_w) * whole_s

        low, high = LEAST * self.highest_hz, self.highest_hz
        if over_j(high) <= 0:
            return high
        while high - low > 1e3:
            middle = (low + high) / 2
            low, high = (low, middle) if over_j(middle) > 0 else (middle, high)
        return math.floor(low / 1e6 + 0.5) * 1e6

"""The power limit as a budget: what kernels draw at a clock, and the clock that keeps a running mean at the limit.

A GPU lowers its clock until it draws what it may. That is no property of a kernel. Products alone run at three quarters
of the highest clock, but faster in a step, where kernels that draw less, and waiting, save for them. Savings last for
tens of milliseconds: after a pause the highest clock holds until the running mean is at the limit. A step that repeats
thus has a clock for each of its pieces. A rank plays at the one clock that makes the step last as long
(`simulator.engine.gpu_clocks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simulator.arrays import Floats
from simulator.hardware.power import Load, LoadClass, Power
from simulator.program import Attention, GroupedMatmul, Kernel, Matmul, Memory, Tiled

#: Streams that arithmetic or the issue of instructions bounds too, so that their speed follows the clock.
STREAMS: Mapping[str, LoadClass] = {
    **dict.fromkeys(("norm", "norm_bwd", "rms_norm", "rms_norm_bwd"), "norm"),
    **dict.fromkeys(("gelu", "gelu_bwd", "bias", "strided", "rope", "weigh", "combine", "upcast"), "arithmetic"),
}
_CLASSES: dict[type, LoadClass] = {
    Matmul: "matmul",
    GroupedMatmul: "matmul",
    Attention: "attention",
    Tiled: "attention",
}
#: A GPU is not throttled below this share of its highest clock.
LEAST = 0.3
#: Clocks between which what a piece draws and how long it takes is interpolated.
CLOCKS = 64
#: A step is cut into pieces of half the time over which the limit averages, or into so many. Clocks do not follow turns
#: of 30 ms (an H200's `shared` products).
PER_AVERAGE, MOST_PIECES = 2, 512
#: Time constants after which nothing is left of how a running mean began.
FORGOTTEN = 8

#: Clocks of SMs in Hz, one or several.
Clock = TypeVar("Clock", float, Floats)


def load_class(kernel: Kernel) -> LoadClass | None:
    """Return the class of a kernel's power; None: it has none, as a kernel of fixed length."""
    if isinstance(kernel, Memory):
        return STREAMS.get(kernel.op, "memory")
    return _CLASSES.get(type(kernel))


def useful_hz(clock_hz: Clock, highest_hz: float) -> Clock:
    """Return the part of a clock, in Hz, that kernels of a class make use of.

    Above ``highest_hz`` (`Load.highest_clock_hz`) they are no faster and draw no more."""
    return np.minimum(clock_hz, highest_hz) if isinstance(clock_hz, np.ndarray) else min(clock_hz, highest_hz)


def longer(load: Load, clock_hz: Clock, than_hz: float) -> Clock:
    """Return how many times as long kernels of a class take at ``clock_hz`` as at ``than_hz``."""
    then_hz = useful_hz(than_hz, load.highest_clock_hz)
    ratio: Clock = (then_hz / useful_hz(clock_hz, load.highest_clock_hz)) ** load.speed_exponent
    return ratio


@dataclass
class Loads:
    """Sums over the kernels of each class: ``seconds`` that they last, and ``drawing_s`` that they draw power.

    While they draw, they draw what their class does. That is less time where they leave units idle (see
    `simulator.costs.Costs.intensity`)."""

    seconds: dict[LoadClass, float] = field(default_factory=dict)
    drawing_s: dict[LoadClass, float] = field(default_factory=dict)

    def add(self, kind: LoadClass, seconds: float, drawing_s: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        self.drawing_s[kind] = self.drawing_s.get(kind, 0.0) + drawing_s

    def add_all(self, more: Loads, times: int = 1) -> None:
        for kind, seconds in more.seconds.items():
            self.add(kind, times * seconds, times * more.drawing_s[kind])


class Drawn(NamedTuple):
    """Kernels that run from ``start_s`` to ``end_s``, spread evenly, on each of ``ranks`` ranks that are alike, and
    what they add up to, as `Loads`. Of one such span or of several, an array each."""

    start_s: float | Floats
    end_s: float | Floats
    seconds: Mapping[LoadClass, float | Floats]
    drawing_s: Mapping[LoadClass, float | Floats]
    ranks: float | NDArray[np.int64] = 1

    def only(self, some: NDArray[np.bool_]) -> Drawn:
        """Return some of several spans."""
        return Drawn(
            np.asarray(self.start_s)[some],
            np.asarray(self.end_s)[some],
            {kind: np.asarray(seconds)[some] for kind, seconds in self.seconds.items()},
            {kind: np.asarray(seconds)[some] for kind, seconds in self.drawing_s.items()},
            np.asarray(self.ranks)[some],
        )


@dataclass(frozen=True)
class Trace:
    """A step that repeats, cut into pieces in a row; all in seconds and at one clock, each an array [pieces].

    ``pieces_s``: the length of each. ``seconds`` and ``drawing_s``: sums over the kernels of each class in it, side by
    side or not, as in `Loads`. The rest of a piece is waiting."""

    pieces_s: Floats
    seconds: Mapping[LoadClass, Floats]
    drawing_s: Mapping[LoadClass, Floats]


@dataclass(frozen=True)
class PowerBudget:
    """Clocks in Hz, of the SMs."""

    model: Power

    @property
    def highest_hz(self) -> float:
        return self.model.highest_clock_hz

    def slowness(self, kernel: Kernel, clock_hz: float, intensity: float = 1.0) -> float:
        """Return the seconds of a kernel at a clock, relative to its price: (clock of its price / clock) ^ exponent.

        ``intensity``: power that the kernel drew relative to its class when it was measured alone. Where that was less,
        its price holds at the higher clock at which it was at the limit too.
        """
        kind = load_class(kernel)
        if kind is None:
            return 1.0
        load = self.model.loads[kind]
        price_hz = load.priced_at_hz
        if load.power_exponent:
            # What draws less than at the highest clock is not held down.
            least = (useful_hz(price_hz, load.highest_clock_hz) / load.highest_clock_hz) ** load.power_exponent
            price_hz *= max(intensity, least) ** (-1 / load.power_exponent)
        return float((price_hz / useful_hz(clock_hz, load.highest_clock_hz)) ** load.speed_exponent)

    def drawn_w(self, kind: LoadClass, clock_hz: Clock) -> Clock:
        """Return the watts above those of an idle GPU while kernels of a class run."""
        load = self.model.loads[kind]
        relative: Clock = useful_hz(clock_hz, load.highest_clock_hz) / load.clock_hz
        watts: Clock = (load.watts - self.model.idle_w) * relative**load.power_exponent
        return watts

    def clock_hz(self, trace: Trace, at_hz: float) -> float:
        """Return the one clock at which a step takes as long as with the clocks that the limit leaves its pieces.

        ``trace``: the step at the clock ``at_hz``. At another clock kernels last longer or shorter, and so does the
        whole; waiting stays. Each piece has the highest clock after which the running mean is not above the limit.
        The clock is rounded to 1 MHz, so that rounding of sums does not change it.
        """
        clocks = np.linspace(LEAST * self.highest_hz, self.highest_hz, CLOCKS)
        lengths_s, joules = self._at(clocks, trace, at_hz)
        some = lengths_s[:, -1] > 0
        lengths_s, joules = lengths_s[some], joules[some]
        room_w = self.model.limit_w - self.model.idle_w
        if not np.any(joules[:, -1] > room_w * lengths_s[:, -1]):
            return self.highest_hz
        left = np.exp(-lengths_s / self.model.averaged_s)
        added_w = joules / lengths_s * -np.expm1(-lengths_s / self.model.averaged_s)
        began_w = self._running_means_w(left, added_w, float(lengths_s[:, -1].sum()), room_w)
        reached_w = began_w[:, None] * left + added_w
        places = np.array([_crossing(rising, room_w) for rising in reached_w])
        below = np.minimum(places.astype(int), CLOCKS - 2)
        rows, beyond = np.arange(len(places)), places - below
        lasted_s = lengths_s[rows, below] * (1 - beyond) + lengths_s[rows, below + 1] * beyond
        steps_s = lengths_s.sum(axis=0)
        clock_hz = float(np.interp(-lasted_s.sum(), -steps_s, clocks))
        if math.isclose(lasted_s.sum(), steps_s[0], rel_tol=1e-9):  # at the lowest clock the step is no longer
            clock_hz = float(np.average(np.interp(places, np.arange(CLOCKS), clocks), weights=lasted_s))
        return math.floor(clock_hz / 1e6 + 0.5) * 1e6

    def _running_means_w(self, left: Floats, added_w: Floats, length_s: float, room_w: float) -> Floats:
        """Return the running mean with which each piece begins, above the power of an idle GPU.

        ``left``: the share of it that is left after a piece, and ``added_w`` what the piece adds, each
        [pieces, clocks]. A piece ends at the limit, ``room_w``, where one of the clocks leads there. The step of
        ``length_s`` is gone through until its end is as its beginning.
        """
        slowest = list(zip(left[:, 0].tolist(), added_w[:, 0].tolist(), strict=True))
        fastest = list(zip(left[:, -1].tolist(), added_w[:, -1].tolist(), strict=True))
        mean_w, means_w = room_w, list[float]()
        for _ in range(math.ceil(FORGOTTEN * self.model.averaged_s / length_s) + 1):
            means_w = []
            for (most_left, least_w), (least_left, most_w) in zip(slowest, fastest, strict=True):
                means_w.append(mean_w)
                mean_w = min(max(mean_w * most_left + least_w, room_w), mean_w * least_left + most_w)
            if math.isclose(means_w[0], mean_w, rel_tol=1e-9):
                break
        return np.array(means_w)

    def trace(self, spans: Sequence[Drawn], length_s: float, ranks: int = 1) -> Trace:
        """Return the mean over ``ranks`` ranks of a step of ``length_s``, in pieces as short as the controller acts."""
        pieces = math.ceil(PER_AVERAGE * length_s / self.model.averaged_s)
        edges = np.linspace(0.0, length_s, min(max(pieces, 1), MOST_PIECES) + 1)

        def column(values: Iterable[float | Floats | NDArray[np.int64]]) -> Floats:
            each = [np.broadcast_to(value, np.shape(span.start_s)) for value, span in zip(values, spans, strict=True)]
            return np.concatenate([np.ravel(value) for value in each], dtype=float) if each else np.zeros(0)

        start, end = column(span.start_s for span in spans), column(span.end_s for span in spans)
        lasts = end > start
        start, end = start[lasts], end[lasts]
        weight = column(span.ranks for span in spans)[lasts] / ranks / (end - start)
        times = np.concatenate([start, end])
        order = np.argsort(times, kind="stable")
        passed_s = np.diff(times[order], prepend=0.0)

        def between(kind: LoadClass, by_class: Iterable[Mapping[LoadClass, float | Floats]]) -> Floats:
            rate = weight * column(classes.get(kind, 0.0) for classes in by_class)[lasts]
            changes = np.concatenate([rate, -rate])[order]
            before = np.cumsum(changes) - changes
            return np.diff(np.interp(edges, times[order], np.cumsum(before * passed_s)))

        kinds: dict[LoadClass, None] = {kind: None for span in spans for kind in span.seconds}
        return Trace(
            np.diff(edges),
            {kind: between(kind, (span.seconds for span in spans)) for kind in kinds},
            {kind: between(kind, (span.drawing_s for span in spans)) for kind in kinds},
        )

    def _at(self, clocks: Floats, trace: Trace, at_hz: float) -> tuple[Floats, Floats]:
        """Return seconds, and joules above those of an idle GPU, of a trace at other clocks, each [pieces, clocks]."""
        lengths_s = np.repeat(trace.pieces_s[:, None], len(clocks), axis=1)
        joules = np.zeros_like(lengths_s)
        for kind, seconds in trace.seconds.items():
            load = self.model.loads[kind]
            times = longer(load, clocks, at_hz)
            lengths_s += seconds[:, None] * (times - 1)
            joules += trace.drawing_s[kind][:, None] * (times * self.drawn_w(kind, clocks))
        return lengths_s, joules


def _crossing(rising: Floats, limit: float) -> float:
    """Return the last place, in steps of the array, at which it is not above the limit; 0 where it always is."""
    above = int(np.searchsorted(rising, limit, side="right"))
    if above in (0, len(rising)):
        return float(max(above - 1, 0))
    return above - 1 + float((limit - rising[above - 1]) / (rising[above] - rising[above - 1]))

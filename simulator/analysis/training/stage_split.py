"""Split of the layers over pipeline stages that makes a step faster, by the seconds of each layer on each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.arrays import Floats
from simulator.config import Workload
from simulator.models import Part, embedding, head, layer, predictor
from simulator.program import Kernel, kernels_of

#: A split is simulated where its slowest stage, and proposed where its step, is faster by this share.
WORTH = 0.01
#: Most splits that are simulated. Each tells more of what a layer takes on each stage.
TRIALS = 3
#: Splits closer than this share are as good: rounding, which exact shortcuts may change, must not decide.
TIE = 1e-7


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a micro-batch's passes through each layer, if that layer were on a given stage.

    ``layers``: by stage and layer. ``ends``: by stage, what is no layer, such as the embedding and the head.
    """

    layers: Floats
    ends: Floats

    def by_stage(self, split: Sequence[int]) -> Floats:
        """Return the seconds of every stage where the layers are split so."""
        last = np.cumsum(split)
        rows = zip(self.layers, last - np.array(split), last, strict=True)
        seconds: Floats = self.ends + np.array([row[first:end].sum() for row, first, end in rows])
        return seconds

    def as_simulated(self, split: Sequence[int], stage_s: Floats) -> LayerSeconds:
        """Return the same seconds, scaled on each stage to what a simulation of ``split`` took there.

        A stage without a price takes the mean scale of the others.
        """
        priced = self.by_stage(split)
        usable = (priced > 0) & (stage_s > 0)
        scale = np.divide(stage_s, priced, out=np.zeros(len(priced)), where=usable)
        scale[~usable] = scale[usable].mean() if usable.any() else 1.0
        return LayerSeconds(self.layers * scale[:, None], self.ends * scale)


@dataclass(frozen=True)
class SimulatedSplit:
    """A simulated split: its ``layers`` per stage, seconds of the step, and seconds of a micro-batch on each stage."""

    layers: tuple[int, ...]
    step_s: float
    stage_s: Floats


def priced_layers(workload: Workload, price_s: Callable[[int, Part], float]) -> LayerSeconds:
    """Return the seconds of a workload's layers on each of its stages.

    ``price_s``: the seconds of a part of the model on the GPU of a stage.
    """
    model, stages = workload.model, range(workload.parallelism.n_stages)
    layers = [layer(workload, number=number) for number in range(model.layers)]
    kinds = list({id(part): part for part in layers}.values())  # equal layers are one object
    place = {id(part): at for at, part in enumerate(kinds)}
    by_kind = np.array([[price_s(stage, part) for part in kinds] for stage in stages])
    closing = (head(workload), *(part for number in range(model.mtp_layers) for part in predictor(workload, number)))
    ends = np.zeros(len(stages))
    ends[0] += price_s(0, embedding(workload))
    ends[-1] += sum(price_s(stages[-1], part) for part in closing)
    return LayerSeconds(by_kind[:, [place[id(part)] for part in layers]], ends)


def split_setting(workload: Workload, split: Sequence[int]) -> dict[str, Any]:
    """Return the dotted keys that split the layers so; keys that ask for an even split cannot stand beside it."""
    layout = workload.parallelism
    even = [key for key in ("account_for_embedding", "account_for_loss") if getattr(layout, key)]
    return {"parallelism.layers_per_stage": list(split)} | {f"parallelism.{key}": False for key in even}


def passed_kernels(part: Part) -> list[Kernel]:
    """Return the kernels of a part's forward and backward pass, with those of recomputation."""
    return [one.kernel for op in (*part.forward, *part.recompute, *part.backward) for one in kernels_of(op)]


def most_even(seconds: LayerSeconds) -> tuple[int, ...]:
    """Return the split into consecutive layers whose slowest stage is fastest.

    Of several, the one with the least sum of squares, and of these the one whose later stages begin earliest.
    Stages between the first and the last have a layer at least.
    Empty where there are too few layers for that. A dynamic program over (stage, layers so far).
    """
    slowest = _best_split(seconds, np.maximum, np.inf)
    limit = max(seconds.by_stage(slowest)) * (1 + TIE) if slowest else 0.0
    return _best_split(seconds, np.add, limit) if slowest else ()


def _best_split(seconds: LayerSeconds, joined: np.ufunc, limit: float) -> tuple[int, ...]:
    """Return the split with the least ``joined`` load: `numpy.maximum` of seconds, or `numpy.add` of their squares.

    No stage takes longer than ``limit``.
    """
    n_stages, n_layers = seconds.layers.shape
    before, after = np.meshgrid(range(n_layers + 1), range(n_layers + 1), indexing="ij")
    least = np.full(n_layers + 1, np.inf)
    least[0] = 0.0
    chosen = []
    for stage in range(n_stages):
        until = np.concatenate(([0.0], np.cumsum(seconds.layers[stage])))
        load = until[after] - until[before] + seconds.ends[stage]
        inner = 0 < stage < n_stages - 1
        legal = (after >= before + inner) & (load <= limit)
        total = joined(least[:, None], load if joined is np.maximum else load**2)
        total = np.where(legal, total, np.inf)
        least = total.min(axis=0)
        chosen.append((total <= least * (1 + TIE)).argmax(axis=0))
    if not np.isfinite(least[-1]):
        return ()
    split, end = [], n_layers
    for first in reversed(chosen):
        split.append(end - int(first[end]))
        end = int(first[end])
    return tuple(reversed(split))


def better_split(
    now: SimulatedSplit, prices: LayerSeconds, simulated: Callable[[tuple[int, ...]], SimulatedSplit | None]
) -> SimulatedSplit | None:
    """Return a split whose simulated step is at least `WORTH` faster than that of ``now``; None where none was seen.

    ``prices``: see `priced_layers`. ``simulated`` plays the job with another split; None where that is no legal job or
    does not fit. Every simulation corrects the prices for the next split, up to `TRIALS` of them.
    """
    best, latest, tried = now, now, {now.layers}
    for _ in range(TRIALS):
        seconds = prices.as_simulated(latest.layers, latest.stage_s)
        split = most_even(seconds)
        hopeless = not split or max(seconds.by_stage(split)) >= (1 - WORTH) * max(best.stage_s)
        if hopeless or split in tried:
            break
        trial = simulated(split)
        if trial is None:
            break
        tried.add(split)
        latest = trial
        if trial.step_s < (1 - TIE) * best.step_s:
            best = trial
    return best if best.step_s < (1 - WORTH) * now.step_s else None

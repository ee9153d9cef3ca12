"""Prediction interval of a step's time: where measured steps like it lay, beside their simulation.

Rows of one source err together, so that sources are counted and not rows. A source has the likeness of its most alike
row, and its error is the mean over its rows, each by its likeness. The interval lies around the sources' median, and is
a multiple of their spread to either side. The spread is larger for kinds of jobs whose steps scatter more (`scatter`).
With this multiple `LEVEL` of the rows lie inside when their source is left out, as `simulator.validation.coverage`
shows. It is wider for a family of GPUs of which no step was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simulator.validation.likeness import Array, Evidence
from simulator.validation.traits import SOFTWARE_YEAR, StepTraits

#: Share of measured times that lie inside.
LEVEL = 0.9
#: Sources, each by its likeness, below which nothing is comparable.
LEAST = 0.3
#: The middle of all sources, and the spreads below, count as much as so many sources that are like the job.
PRIOR = 1.0
#: Mean distance of sources from their median, and of rows from their source's mean: of logarithms of measured over
#: simulated time.
BETWEEN, WITHIN = 0.1, 0.05
#: Distance from the median that a source has at most in their spread, so that none stretches the interval alone.
FARTHEST = 0.3
#: What a family of GPUs of which no step was measured adds to these spreads. An RTX 4090 is priced as an A100. Of two
#: steps on it one takes 4 % less than simulated and one 27 % more. These are of Llama 3.1 8B (torchtune's README):
#: LoRA at 3,083 tokens/s; all weights at 1,650, with an optimizer in the backward pass, which is not simulated.
UNSEEN = 0.15
#: How far steps scatter: logarithm of the factor for each year that their software is older, and for parameters that
#: are gathered for each pass (ZeRO-3). By regression of steps' distances, each source left out in turn and counted
#: once: `coverage.fitted_scatter`.
PER_YEAR, SHARDED = 0.080, 0.422
#: Spreads to either side.
MULTIPLE = 0.86


@dataclass(frozen=True)
class PredictionInterval:
    """Interval of the logarithm of measured over simulated time.

    ``likeness``: of each measured step. ``rows``: weight of each; their sum is that of ``sources``. ``sources``:
    likeness of each source. ``means``: its mean of these logarithms. ``middle``: that of all sources, alike or not.
    """

    low: float
    high: float
    likeness: Array
    rows: Array
    sources: Array
    means: Array
    middle: float

    def seconds(self, step_time_s: float) -> tuple[float, float]:
        """Return the ends for a step that takes ``step_time_s`` by simulation."""
        return step_time_s * math.exp(self.low), step_time_s * math.exp(self.high)


def scatter(traits: StepTraits) -> float:
    """Return how many times as far as current software without sharded parameters steps with ``traits`` scatter."""
    return math.exp(PER_YEAR * (SOFTWARE_YEAR - traits.year) + SHARDED * traits.sharded)


def prediction_interval(
    evidence: Evidence, traits: StepTraits, *, without: int | None = None
) -> PredictionInterval | None:
    """Return the interval of a job with ``traits``; None where nothing is comparable.

    ``without``: number of a source that is left out.
    """
    likeness = evidence.likeness(traits)
    if without is not None:
        likeness[evidence.sources == without] = 0.0
    numbers, ratios, count = evidence.sources, evidence.log_ratios, len(evidence.names)
    total = np.bincount(numbers, likeness, count)
    sources = np.zeros(count)
    np.maximum.at(sources, numbers, likeness)
    if sources.sum() < LEAST:
        return None
    share = likeness / np.where(total > 0, total, 1.0)[numbers]
    means: Array = np.bincount(numbers, share * ratios, count).astype(float)
    distances = np.bincount(numbers, share * np.abs(ratios - means[numbers]), count)
    weight = sources.sum() + PRIOR
    middle = _middle(evidence, without)
    centre = _weighted_median(np.append(means, middle), np.append(sources, PRIOR))
    between = (sources @ np.minimum(np.abs(means - centre), FARTHEST) + PRIOR * BETWEEN) / weight
    within = (sources @ distances + PRIOR * WITHIN) / weight
    # The median of few sources is itself uncertain, by their spread over the root of their number.
    unseen = UNSEEN if evidence.compared_family(traits) != traits.family else 0.0
    half = MULTIPLE * scatter(traits) * math.hypot(between * math.sqrt(1 + 1 / weight), within, unseen)
    return PredictionInterval(centre - half, centre + half, likeness, share * sources[numbers], sources, means, middle)


def _weighted_median(values: Array, weights: Array) -> float:
    """Return the value that halves the weight, between two values in proportion."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(weights.sum() / 2, below, values[order]))


def _middle(evidence: Evidence, without: int | None) -> float:
    """Return the median over sources of the median of their rows."""
    return float(np.median([middle for number, middle in enumerate(evidence.medians) if number != without]))

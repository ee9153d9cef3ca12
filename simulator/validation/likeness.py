"""Likeness of a job to measured steps: 1 for a step that is like it in all traits, less by a factor per difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.validation.measured_steps import MeasuredStep, by_source, measured_steps
from simulator.validation.traits import KERNELS_LIKE, LONG_LAYER_s, SHORT_LAYER_s, StepTraits

Array = npt.NDArray[np.float64]

#: A step that differs in one of these says nothing of a job.
DECISIVE = ("family", "links", "precision_bits", "trained", "gradients", "offloaded", "mixers", "parts")
#: Trait -> likeness of a step that differs in it alone.
KINDS: Mapping[str, float] = {
    "framework": 0.5,
    "compiled": 0.7,
    "architecture": 0.5,
    "gpu": 0.7,
    "experts": 0.1,
    "sharded": 0.5,
}
#: Trait -> the same for a difference of one. That is a layer or a number of GPUs ten times as large, a whole step, all
#: FLOPs, or a year of software.
SIZES: Mapping[str, float] = {
    "layer_s": 0.1,
    "n_gpus": 0.2,
    "communication_share": 0.03,
    "host_share": 0.2,
    "attention_share": 0.5,
    "year": 0.9,
}
#: Likeness of a step on a GPU of the family that stands in for the job's, of which none was measured. It takes the
#: place of the factors of architecture and GPU.
STAND_IN = 0.5
#: A step less alike is not comparable.
LEAST_ALIKE = 0.1


@dataclass(frozen=True)
class Evidence:
    """Measured steps as columns.

    ``log_ratios``: logarithms of measured over simulated time. ``sources``: number of each row's source in ``names``.
    ``medians``: of the rows of each source. ``kinds`` and ``figures``: traits of all rows.
    """

    steps: tuple[MeasuredStep, ...]
    names: tuple[str, ...]
    sources: npt.NDArray[np.int64]
    log_ratios: Array
    medians: Array
    kinds: Mapping[str, npt.NDArray[Any]]
    figures: Mapping[str, Array]

    @classmethod
    def from_steps(cls, steps: Sequence[MeasuredStep]) -> Evidence:
        """Return the columns of ``steps``."""
        places = by_source(steps)
        numbers = {name: number for number, name in enumerate(places)}
        ratios = np.array([step.log_ratio for step in steps])
        traits = [step.traits for step in steps]
        figures = [_figures(one) for one in traits]
        return cls(
            tuple(steps),
            tuple(places),
            np.array([numbers[step.source] for step in steps], dtype=np.int64),
            ratios,
            np.array([np.median(ratios[rows]) for rows in places.values()]),
            {name: np.array([getattr(one, name) for one in traits]) for name in (*DECISIVE, *KINDS)},
            {name: np.array([one[name] for one in figures]) for name in SIZES},
        )

    def compared_family(self, traits: StepTraits) -> str:
        """Return the family of GPUs that a job is compared with.

        It is the job's own where any of it was measured, else the one whose kernels stand in for its own.
        """
        if np.any(self.kinds["family"] == traits.family):
            return traits.family
        return KERNELS_LIKE.get(traits.family, traits.family)

    def likeness(self, traits: StepTraits, least: float = LEAST_ALIKE) -> Array:
        """Return the likeness of each row to a job with ``traits``, 0 where it is below ``least``."""
        family = self.compared_family(traits)
        stands_in = family != traits.family
        alike = np.full(len(self.steps), STAND_IN if stands_in else 1.0)
        for name in DECISIVE:
            alike[self.kinds[name] != (family if name == "family" else getattr(traits, name))] = 0.0
        for name, factor in KINDS.items():
            if stands_in and name in ("architecture", "gpu"):
                continue
            alike[self.kinds[name] != getattr(traits, name)] *= factor
        figures = _figures(traits)
        for name, factor in SIZES.items():
            alike *= factor ** np.abs(self.figures[name] - figures[name])
        alike[alike < least] = 0.0
        return alike


@lru_cache
def evidence() -> Evidence:
    """Return all measured steps, as last recorded."""
    return Evidence.from_steps(measured_steps())


def _figures(traits: StepTraits) -> dict[str, float]:
    """Return sizes on scales where a difference of one matters: times and numbers of GPUs in powers of ten."""
    return {
        "layer_s": math.log10(min(max(traits.layer_s, SHORT_LAYER_s), LONG_LAYER_s)),
        "n_gpus": math.log10(traits.n_gpus),
        "communication_share": traits.communication_share,
        "host_share": traits.host_share,
        "attention_share": traits.attention_share,
        "year": traits.year,
    }

"""Accuracy of a simulated step: the interval in which its measured time would lie, and the steps that this rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.config import Workload
from simulator.units import format_time
from simulator.validation.likeness import DECISIVE, LEAST_ALIKE, Array, Evidence, evidence
from simulator.validation.prediction_interval import LEAST, LEVEL, PredictionInterval, prediction_interval
from simulator.validation.traits import StepTraits, traits_of

#: Rows that are listed, the most alike first.
MOST_ROWS = 20


@dataclass(frozen=True)
class Label:
    """Words for a trait: its ``name``, how a value of it is ``written``, and whether values are sizes with a range."""

    name: str
    written: Callable[[Any], str] = str
    is_size: bool = False


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


#: Words for traits, in the order in which differences are told.
LABELS: Mapping[str, Label] = {
    "family": Label("kind of GPU"),
    "links": Label("links in a node"),
    "precision_bits": Label("precision", "{} bits".format),
    "trained": Label("trained"),
    "gradients": Label("data parallelism"),
    "mixers": Label("layers of"),
    "parts": Label("further parts"),
    "offloaded": Label("offloading", lambda value: "to the host" if value else "none"),
    "framework": Label("framework"),
    "architecture": Label("architecture"),
    "gpu": Label("GPU"),
    "experts": Label("model", lambda value: "with experts" if value else "dense"),
    "sharded": Label("parameters", lambda value: "gathered for each pass" if value else "kept whole"),
    "compiled": Label("compiled", lambda value: "yes" if value else "no"),
    "n_gpus": Label("GPUs", "{:,}".format, is_size=True),
    "layer_s": Label("time of a layer and micro-batch", format_time, is_size=True),
    "communication_share": Label("exposed communication", _percent, is_size=True),
    "host_share": Label("waiting for the host", _percent, is_size=True),
    "attention_share": Label("attention's part of the FLOPs", _percent, is_size=True),
    "year": Label("year of the software", is_size=True),
}


def accuracy(workload: Workload, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the report says of a step's accuracy, under the names of the JSON output.

    ``figures``: those by which jobs are compared. ``accuracy``: the interval of the measured time, and what it rests
    on; None where nothing is comparable, for the reasons in ``nothing_comparable``.
    """
    measured, traits = evidence(), traits_of(workload, figures)
    interval = prediction_interval(measured, traits)
    if interval is None:
        return {"accuracy": None, "nothing_comparable": why_nothing_counts(measured, traits)}
    return {"accuracy": _basis(measured, interval, traits, figures["step_time_s"]), "nothing_comparable": []}


def interval_figures(workload: Workload, figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the ends of the interval as figures by which jobs are compared; none where nothing is comparable."""
    interval = prediction_interval(evidence(), traits_of(workload, figures))
    if interval is None:
        return {}
    low, high = interval.seconds(figures["step_time_s"])
    return {"step_time_low_s": low, "step_time_high_s": high}


def _basis(measured: Evidence, interval: PredictionInterval, traits: StepTraits, step_time_s: float) -> dict[str, Any]:
    """Return an interval and what it rests on.

    ``bias``: error of the simulated time against the middle of the interval, stated and not corrected. ``n_rows``:
    number of comparable steps, of which ``rows`` are the most alike. ``sources``: whose they are, each with its error.
    ``all_sources``: the middle of all, which counts as one more.
    """
    alike, unlike = _compared(measured, interval, traits)
    return {
        "interval_s": list(interval.seconds(step_time_s)),
        "level": LEVEL,
        "bias": math.exp(-(interval.low + interval.high) / 2) - 1,
        "n_rows": int(np.count_nonzero(interval.rows)),
        "rows": _rows(measured, interval.likeness),
        "sources": _sources(measured, interval),
        "all_sources": {"n_sources": len(measured.names), "error": math.exp(-interval.middle) - 1},
        "alike": alike,
        "unlike": unlike,
    }


def why_nothing_counts(measured: Evidence, traits: StepTraits) -> list[str]:
    """Return why no measured step is comparable."""
    wanted = replace(traits, family=measured.compared_family(traits))
    unseen = [name for name in DECISIVE if not np.any(measured.kinds[name] == getattr(wanted, name))]
    if unseen:
        return [_unlike(name, traits, [getattr(step.traits, name) for step in measured.steps]) for name in unseen]
    likeness = measured.likeness(traits, least=0.0)
    shared = sum(measured.kinds[name] == getattr(wanted, name) for name in DECISIVE)
    # The step that shares the most decisive traits; of equals, as a likeness is at most 1, the one most alike.
    place = int(np.argmax(shared + likeness))
    nearest, most = measured.steps[place], likeness[place]
    if most > 0:
        differing = [name for name in LABELS if _differs(name, traits, nearest.traits)]
    else:
        differing = [name for name in DECISIVE if getattr(wanted, name) != getattr(nearest.traits, name)]
    step = f"The nearest measured step, {nearest.id} of {nearest.source}"
    likeness_text = f"{step}, is {100 * most:.2g} % like this job"
    if most < LEAST_ALIKE:
        why = f"{likeness_text}; below {100 * LEAST_ALIKE:.2g} % a step says nothing of it"
    else:
        why = f"{likeness_text}; all sources together come to less than the {100 * LEAST:.2g} % that an interval needs"
    return [f"{why}. It differs in:", *(_unlike(name, traits, [getattr(nearest.traits, name)]) for name in differing)]


def _rows(measured: Evidence, likeness: Array) -> list[dict[str, Any]]:
    """Return the most alike rows."""
    order = np.argsort(-likeness, kind="stable")[:MOST_ROWS]
    return [
        {
            "id": measured.steps[row].id,
            "suite": measured.steps[row].suite,
            "source": measured.steps[row].source,
            "likeness": float(likeness[row]),
            "error": measured.steps[row].error,
        }
        for row in order
        if likeness[row] > 0
    ]


def _sources(measured: Evidence, interval: PredictionInterval) -> list[dict[str, Any]]:
    """Return the sources of comparable rows, the most alike first; errors are of their rows by likeness."""
    order = [int(source) for source in np.argsort(-interval.sources, kind="stable") if interval.sources[source] > 0]
    return [
        {
            "source": measured.names[source],
            "n_rows": int(np.count_nonzero(interval.rows[measured.sources == source])),
            "likeness": float(interval.sources[source]),
            "error": math.exp(-float(interval.means[source])) - 1,
        }
        for source in order
    ]


def _compared(measured: Evidence, interval: PredictionInterval, traits: StepTraits) -> tuple[list[str], list[str]]:
    """Return in what comparable steps are like the job, and in what most of them are not, by weight."""
    weights = interval.rows / interval.rows.sum()
    alike, unlike = [], []
    for name, label in LABELS.items():
        mine = getattr(traits, name)
        values = [getattr(step.traits, name) for step, weight in zip(measured.steps, weights, strict=True) if weight]
        if label.is_size:
            ends = min(values), max(values)
            differs = not ends[0] <= mine <= ends[1] and label.written(mine) not in map(label.written, ends)
        else:
            same = sum(w for w, step in zip(weights, measured.steps, strict=True) if getattr(step.traits, name) == mine)
            differs = same < 0.5
        if differs:
            unlike.append(_unlike(name, traits, values))
        elif not label.is_size:
            alike.append(f"{label.name} {label.written(mine)}")
    return alike, unlike


def _differs(name: str, traits: StepTraits, other: StepTraits) -> bool:
    mine, theirs = getattr(traits, name), getattr(other, name)
    return bool(LABELS[name].written(mine) != LABELS[name].written(theirs))


def _unlike(name: str, traits: StepTraits, values: Sequence[Any]) -> str:
    """Write a trait of the job beside that of measured steps."""
    label, mine = LABELS[name], getattr(traits, name)
    if label.is_size:
        ends = [label.written(end) for end in dict.fromkeys((min(values), max(values)))]
        range_or_kinds = " to ".join(ends)
    else:
        range_or_kinds = " or ".join(dict.fromkeys(label.written(value) for value in values if value != mine))
    return f"{label.name} {label.written(mine)}: measured with {range_or_kinds}"

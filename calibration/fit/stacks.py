"""Fit the parameters of a stack to curves of collectives."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from calibration.fit.part import Constants, rounded, search
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.hardware.stack import Stack, StackParameters
from simulator.network.pattern import Pattern
from simulator.network.timing import timed
from simulator.validation.collective_scores import geometric_mean
from simulator.validation.collectives import Case
from simulator.validation.record import patterns_of

#: The search goes down into the nearest valley: it begins at the file's own values, and at the best so many of many
#: others, whose values are those multiplied at random by e^-SPREAD to e^SPREAD.
STARTS, TRIED, SPREAD = 6, 400, 2.0
#: What a parameter's distance from where it began costs, per unit of its logarithm, so that what rows do not show
#: stays: rows of one number of GPUs tell little of what a start takes and what a hop. Of 0.001, 0.003 and 0.01
#: the one that leaves both fitted curves and the other numbers of GPUs of a100-vtrain near.
STAYS = 0.003


def fit(stack: Stack, measured: Sequence[tuple[Case, float]]) -> Stack:
    """The stack with the parameters moved from where ``stack.fitted.begun`` has them to where rows of
    ``stack.fitted.n_gpus`` GPUs are met best, and how far it is from them and, apart, from the others. ``measured``:
    cases and their seconds."""
    assert stack.fitted is not None
    n_gpus, begun = stack.fitted.n_gpus, stack.fitted.begun
    own = [(case, seconds) for case, seconds in measured if len(case.ranks) == n_gpus]
    others = [(case, seconds) for case, seconds in measured if len(case.ranks) != n_gpus]
    candidates = [patterns_of(case) for case, _ in own]
    given = {name: float(value) for name, value in begun.told_apart().items()}
    limits = {name: (0.0, 1.0) for name in given if name.endswith(("efficiency", "fraction"))}

    def loss(constants: Constants) -> float:
        errors = errors_of(changed(stack, constants), own, candidates)
        moved = sum([abs(math.log(constants[name] / value)) for name, value in given.items()])
        return statistics.fmean(map(abs, errors)) + STAYS * moved

    draw = random.Random(0)
    tried: list[Constants] = []
    for _ in range(TRIED):
        moved = {name: value * math.exp(draw.uniform(-SPREAD, SPREAD)) for name, value in given.items()}
        tried.append({name: min(value, limits.get(name, (0.0, math.inf))[1]) for name, value in moved.items()})
    starts = [given, *sorted(tried, key=loss)[:STARTS]]
    found = min([search(start, loss, limits=limits, sweeps=60) for start in starts], key=loss)
    best = changed(stack, {name: rounded(value, 3) for name, value in found.items()})
    sets = {"rows": own, "others": others}
    errors = {key: errors_of(best, some, [patterns_of(case) for case, _ in some]) for key, some in sets.items()}
    fitted = {"n_gpus": n_gpus} | {
        key: {"n": len(some), "geometric_mean": rounded(geometric_mean(some) or 0.0, 2)}
        for key, some in errors.items()
        if some
    }
    fitted["begun"] = as_data(begun, defaults=False)
    return validated(Stack, {**as_data(best, defaults=False), "fitted": fitted})


def errors_of(
    stack: Stack, measured: Sequence[tuple[Case, float]], candidates: Sequence[Sequence[Pattern]]
) -> list[float]:
    """ln(predicted / measured) of every case; ``candidates``: what its algorithms do to the links."""
    costs = Costs.of_stack(stack)
    return [
        math.log(min([timed(pattern, case.nbytes, costs)[0] for pattern in some]) / seconds)
        for (case, seconds), some in zip(measured, candidates, strict=True)
    ]


def changed(stack: Stack, constants: Mapping[str, float]) -> Stack:
    """The stack with these parameters."""
    return replace(stack, parameters=validated(StackParameters, constants))

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
from simulator.validation.collectives import CollectiveCase
from simulator.validation.record import patterns_of

#: The search goes down into the nearest valley. It begins at the file's own values, and at the best STARTS of TRIED
#: random ones: the file's values, each multiplied by e^-SPREAD to e^SPREAD.
STARTS, TRIED, SPREAD = 6, 400, 2.0
#: Cost of a parameter's distance from where it began, per unit of its logarithm, so that parameters that rows do not
#: show stay. Rows of one number of GPUs tell little of the seconds of a start and of a hop. Of 0.001, 0.003 and 0.01 it
#: is the one that leaves both fitted curves and the other numbers of GPUs of a100-vtrain near.
STAYS = 0.003


def fit(stack: Stack, measured: Sequence[tuple[CollectiveCase, float]]) -> Stack:
    """Return the stack with parameters that meet the rows of ``stack.fitted.n_gpus`` GPUs best, and its errors.

    The search begins at ``stack.fitted.begun``. Errors are of these rows and, apart, of rows of other numbers of GPUs.
    ``measured``: cases and their seconds.
    """
    assert stack.fitted is not None
    n_gpus, begun = stack.fitted.n_gpus, stack.fitted.begun
    rows = [(case, seconds) for case, seconds in measured if len(case.ranks) == n_gpus]
    rest = [(case, seconds) for case, seconds in measured if len(case.ranks) != n_gpus]
    candidates = [patterns_of(case) for case, _ in rows]
    start = {name: float(value) for name, value in begun.told_apart().items()}
    limits = {name: (0.0, 1.0) for name in start if name.endswith(("efficiency", "fraction"))}

    def loss(constants: Constants) -> float:
        errors = errors_of(changed(stack, constants), rows, candidates)
        moved = sum([abs(math.log(constants[name] / value)) for name, value in start.items()])
        return statistics.fmean(map(abs, errors)) + STAYS * moved

    draw = random.Random(0)
    tried: list[Constants] = []
    for _ in range(TRIED):
        moved = {name: value * math.exp(draw.uniform(-SPREAD, SPREAD)) for name, value in start.items()}
        tried.append({name: min(value, limits.get(name, (0.0, math.inf))[1]) for name, value in moved.items()})
    starts = [start, *sorted(tried, key=loss)[:STARTS]]
    constants = min([search(begin, loss, limits=limits, sweeps=60) for begin in starts], key=loss)
    best = changed(stack, {name: rounded(value, 3) for name, value in constants.items()})
    sets = {"rows": rows, "held_out": rest}
    errors = {key: errors_of(best, some, [patterns_of(case) for case, _ in some]) for key, some in sets.items()}
    fitted = {"n_gpus": n_gpus} | {
        key: {"n": len(some), "geometric_mean": rounded(geometric_mean(some) or 0.0, 2)}
        for key, some in errors.items()
        if some
    }
    fitted["begun"] = as_data(begun, defaults=False)
    return validated(Stack, {**as_data(best, defaults=False), "fitted": fitted})


def errors_of(
    stack: Stack, measured: Sequence[tuple[CollectiveCase, float]], candidates: Sequence[Sequence[Pattern]]
) -> list[float]:
    """ln(predicted / measured) of every case; ``candidates``: what its algorithms do to the links."""
    costs = Costs.from_stack(stack)
    return [
        math.log(min([timed(pattern, case.nbytes, costs)[0] for pattern in some]) / seconds)
        for (case, seconds), some in zip(measured, candidates, strict=True)
    ]


def changed(stack: Stack, constants: Mapping[str, float]) -> Stack:
    """The stack with these parameters."""
    return replace(stack, parameters=validated(StackParameters, constants))

"""Fit the parameters of a stack to curves of collectives."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from calibration.fit.part import Constants, rounded, search
from simulator.config.cited import Fraction
from simulator.config.stack import Parameters, Stack
from simulator.costs import Costs
from simulator.network.collectives import choose
from simulator.network.pattern import Pattern
from simulator.network.timing import timed
from simulator.validation.collective_scores import geometric_mean
from simulator.validation.collectives import Case
from simulator.validation.record import patterns_of

#: The search goes down into the nearest valley: it begins at the file's own values and at so many others, each value
#: multiplied at random by e^-SPREAD to e^SPREAD.
STARTS, SPREAD = 6, 1.5


def fit(stack: Stack, measured: Sequence[tuple[Case, float]]) -> Stack:
    """The stack with the parameters that it sets moved to where rows of ``stack.fitted.n_gpus`` GPUs are met best, and
    how far it is from them and, apart, from the others. ``measured``: cases and their seconds."""
    assert stack.fitted is not None
    n_gpus = stack.fitted.n_gpus
    own = [(case, seconds) for case, seconds in measured if len(case.ranks) == n_gpus]
    others = [(case, seconds) for case, seconds in measured if len(case.ranks) != n_gpus]
    candidates = [patterns_of(case) for case, _ in own]
    given = {name: float(getattr(stack.parameters, name)) for name in sorted(stack.parameters.model_fields_set)}
    limits = {name: (0.0, 1.0) for name, field in Parameters.model_fields.items() if field.metadata == Fraction}

    def loss(constants: Constants) -> float:
        errors = errors_of(changed(stack, constants), own, candidates)
        return statistics.fmean(map(abs, errors))

    draw = random.Random(0)
    starts = [given]
    for _ in range(STARTS):
        starts.append({name: value * math.exp(draw.uniform(-SPREAD, SPREAD)) for name, value in given.items()})
    found = min([search(start, loss, limits=limits, sweeps=60) for start in starts], key=loss)
    best = changed(stack, {name: rounded(value, 3) for name, value in found.items()})
    sets = {"rows": own, "others": others}
    errors = {key: errors_of(best, some, [patterns_of(case) for case, _ in some]) for key, some in sets.items()}
    fitted = {"n_gpus": n_gpus} | {
        key: {"n": len(some), "geometric_mean": rounded(geometric_mean(some) or 0.0, 2)}
        for key, some in errors.items()
        if some
    }
    return Stack.model_validate({**best.model_dump(exclude_unset=True), "fitted": fitted})


def errors_of(
    stack: Stack, measured: Sequence[tuple[Case, float]], candidates: Sequence[Sequence[Pattern]]
) -> list[float]:
    """ln(predicted / measured) of every case; ``candidates``: what its algorithms do to the links."""
    costs = Costs.of_stack(stack)
    return [
        math.log(timed(choose(case.op, some, case.nbytes, costs), case.nbytes, costs)[0] / seconds)
        for (case, seconds), some in zip(measured, candidates, strict=True)
    ]


def changed(stack: Stack, constants: Mapping[str, float]) -> Stack:
    """The stack with parameters replaced."""
    parameters = {**stack.parameters.model_dump(exclude_unset=True), **constants}
    return stack.model_copy(update={"parameters": Parameters.model_validate(parameters)})

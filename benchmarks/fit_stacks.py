"""Fit shipped stacks anew, or stacks in files of one's own.

    python benchmarks/fit_stacks.py [NAME or FILE.yaml ...] [--rows FILE.csv]

The parameters that a stack's key `fitted.begun` lists are moved to rows of `validate collectives`, or of FILE.csv. Rows
count that name the stack and have as many GPUs as `fitted.n_gpus` says. The file is then written anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from calibration.fit import stacks
from calibration.fit.writer import as_yaml
from simulator.config import catalog
from simulator.config.section import as_data
from simulator.config.stack import load_stack
from simulator.errors import InputError
from simulator.hardware.stack import Stack
from simulator.network.collectives import bus_factor
from simulator.validation import collectives
from simulator.validation.collectives import CollectiveCase
from simulator.validation.rows import Row, UnsupportedError

#: A busbw is printed to 0.01 or 0.1 GB/s.
CLEAR_GBps = 10.0
HEADER = """\
# How collectives run on one installation, in a few physical parameters (`simulator.hardware.stack` says what each is,
# and what one that is left out is taken for). Written by benchmarks/fit_stacks.py from rows of `validate collectives`.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Return exit status 0, or 2 where a stack that is asked for is not known or cannot be fitted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", nargs="*", help="shipped stacks, or files [all that were fitted]")
    parser.add_argument("--rows", type=Path, default=collectives.TABLE, help="measurements [those of the suite]")
    arguments = parser.parse_args(words)
    try:
        cases = by_stack(arguments.rows)
        chosen = {name: load_stack(name) for name in arguments.stacks or catalog.names("stack")}
        for name, stack in chosen.items():
            if arguments.stacks and (why := unfitted(stack, cases)):
                raise InputError(why, file=name)
    except InputError as problem:
        print(problem, file=sys.stderr)
        return 2
    for name, stack in chosen.items():
        if unfitted(stack, cases):
            continue
        fitted = stacks.fit(stack, cases[stack.name])
        data = as_data(fitted, defaults=False)
        if fitted.fitted:  # what was searched is told, be it as by default
            data["parameters"] = {key: getattr(fitted.parameters, key) for key in fitted.fitted.begun.told_apart()}
        catalog.find("stack", name).write_text(HEADER + as_yaml(data))
        errors = fitted.fitted and (fitted.fitted.rows, fitted.fitted.held_out)
        print(name, errors, flush=True)
    return 0


def unfitted(stack: Stack, cases: Mapping[str, Sequence[tuple[CollectiveCase, float]]]) -> str:
    """Why a stack cannot be fitted; empty where it can."""
    if stack.fitted is None:
        return "says nothing of what is to be fitted: it has no key fitted.begun"
    gpus = sorted({len(case.ranks) for case, _ in cases.get(stack.name, ())})
    if stack.fitted.n_gpus not in gpus:
        counts = f"those that do have {', '.join(map(str, gpus))}" if gpus else "nor of another number"
        return f"no row of {stack.fitted.n_gpus} GPUs names it, {counts}"
    return ""


def by_stack(table: Path) -> dict[str, list[tuple[CollectiveCase, float]]]:
    """The rows that can be simulated and have a time, by the stack that they name; of a stack all of whose rows have a
    busbw alone, those."""
    timed: dict[str, list[tuple[CollectiveCase, float]]] = {}
    untimed: dict[str, list[tuple[CollectiveCase, float]]] = {}
    for row in collectives.measurements(table):
        has_time = bool(row["latency_us"] or row["algbw"])
        try:
            case = collectives.case_of(row)
            seconds = collectives.measured_s(row) if has_time else by_busbw(row, case)
        except UnsupportedError:
            continue
        if case.stack is not None and case.part in collectives.PARTS[:2]:
            (timed if has_time else untimed).setdefault(case.stack.name, []).append((case, seconds))
    return untimed | timed


def by_busbw(row: Row, case: CollectiveCase) -> float:
    """Seconds by a printed busbw, where that says enough. Raises `UnsupportedError`."""
    busbw = float(row["busbw"] or 0)
    if busbw < CLEAR_GBps:
        raise UnsupportedError("its busbw is mostly rounding")
    return case.nbytes * bus_factor(case.op, len(case.ranks)) / (busbw * 1e9)


if __name__ == "__main__":
    sys.exit(main())

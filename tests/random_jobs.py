"""``python -m tests.random_jobs``: play random legal jobs in several ways, and print the smallest that differ.

Every job is drawn from the seed and its number alone. A problem is printed with a workload file that shows it: the job
without whatever it can do without.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from copy import deepcopy

import yaml

from simulator.errors import InputError
from tests.support.random_checks import CHECKS, Check, Problem, problems
from tests.support.random_jobs import Job, drawn, load


def main() -> int:
    """Return 1 where any job has a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_jobs", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many jobs [100]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw [0]")
    parser.add_argument("--first", type=int, default=0, help="number of the first job [0]")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="which [all]")
    parser.add_argument("--whole", action="store_true", help="print jobs as they were drawn, without making them small")
    options = parser.parse_args()
    checks = {name: CHECKS[name] for name in options.checks}
    failed, began = 0, time.process_time()
    for number in range(options.first, options.first + options.cases):
        job = drawn(options.seed, number)
        found = problems(job, checks)
        for name in dict.fromkeys(problem.check for problem in found):
            failed += 1
            of_check = [problem for problem in found if problem.check == name]
            _print(number, of_check, job if options.whole else smallest(job, checks[name], name))
    print(f"{options.cases} jobs, {failed} problems, {time.process_time() - began:.0f} s of processor time")
    return int(failed > 0)


def _print(number: int, found: list[Problem], job: Job) -> None:
    print(f"--- job {number}: {found[0].check}")
    for problem in found[:5]:
        print(f"    {problem.text}")
    if len(found) > 5:
        print(f"    and {len(found) - 5} more")
    print(yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=160), flush=True)


def smallest(job: Job, check: Check, name: str) -> Job:
    """Return the job without the keys, one after the other, that it needs not for the check to fail."""
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(job):
            try:
                load(smaller)
            except (InputError, KeyError):
                continue
            if problems(smaller, {name: check}):
                job, shrunk = smaller, True
                break
    return job


def _smaller(job: Job) -> Iterator[Job]:
    """Yield the job without one key, and with one number halved."""
    for path, value in list(_leaves(job)):
        yield _with(job, path, None)
        if isinstance(value, int) and value > 1 and value % 2 == 0 and not isinstance(value, bool):
            yield _with(job, path, value // 2)


def _leaves(section: Job, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for key, value in section.items():
        if path or key in ("model", "training", "parallelism", "cluster"):
            yield (*path, key), value
            if isinstance(value, dict):
                yield from _leaves(value, (*path, key))


def _with(job: Job, path: tuple[str, ...], value: object) -> Job:
    changed = deepcopy(job)
    section = changed
    for key in path[:-1]:
        section = section[key]
    if value is None:
        del section[path[-1]]
    else:
        section[path[-1]] = value
    return changed


if __name__ == "__main__":
    sys.exit(main())

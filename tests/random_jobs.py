"""``python -m tests.random_jobs``: play random legal jobs in several ways, and print the smallest that differ.

Every job is drawn from the seed and its number alone. A problem is printed with a workload file that shows it: the job
without whatever it can do without.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool

import yaml

from simulator.errors import InputError
from tests.support.random_checks import CHECKS, RARE, Check, Problem, problems
from tests.support.random_features import coverage, features, table
from tests.support.random_jobs import Job, drawn, load

#: Jobs between two lines of progress.
PROGRESS = 20


@dataclass(frozen=True)
class Options:
    """Choice of jobs by a ``seed`` and of ``checks``. ``whole``: jobs that differ are not made small."""

    seed: int
    checks: tuple[str, ...]
    whole: bool


@dataclass(frozen=True)
class CaseReport:
    """Outcome for a job: its features, a text for each check that failed, and seconds of processor time."""

    number: int
    features: Mapping[str, list[str]]
    failures: tuple[str, ...]
    processor_s: float


def main() -> int:
    """Return 1 where any job has a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_jobs", description=__doc__)
    parser.add_argument("--cases", type=int, default=100, help="how many jobs [100]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw [0]")
    parser.add_argument("--first", type=int, default=0, help="number of the first job, to go on from [0]")
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="which [all]")
    parser.add_argument("--whole", action="store_true", help="print jobs as they were drawn, without making them small")
    options = parser.parse_args()
    one = partial(report, Options(options.seed, tuple(options.checks), options.whole))
    reports: list[CaseReport] = []
    numbers = range(options.first, options.first + options.cases)
    with suppress(KeyboardInterrupt), closing(_reports(one, numbers, options.jobs)) as coming:
        for case in coming:
            reports.append(case)
            print("".join(case.failures), end="", flush=True)
            _tell_progress(reports, options)
    failed, seconds = sum(len(case.failures) for case in reports), sum(case.processor_s for case in reports)
    print(table(coverage(case.features for case in reports)))
    print(f"{len(reports)} jobs, {failed} problems, {seconds:.0f} s of processor time")
    if len(reports) < options.cases:
        print(f"stopped; go on with --first {options.first + len(reports)}", file=sys.stderr)
        return 130
    return int(failed > 0)


def _reports(one: Callable[[int], CaseReport], numbers: Sequence[int], processes: int) -> Iterator[CaseReport]:
    """Yield the reports of jobs in order, made by so many processes."""
    if processes == 1:
        yield from map(one, numbers)
        return
    with Pool(processes, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap(one, numbers)


def _tell_progress(reports: Sequence[CaseReport], options: argparse.Namespace) -> None:
    if len(reports) % PROGRESS == 0:
        failed = sum(len(case.failures) for case in reports)
        last = f"the last was number {reports[-1].number}"
        print(f"{len(reports)} of {options.cases} jobs, {failed} problems; {last}", file=sys.stderr, flush=True)


def report(options: Options, number: int) -> CaseReport:
    """Return what came of one job."""
    began_s = time.process_time()
    job = drawn(options.seed, number)
    checks = {name: CHECKS[name] for name in options.checks if number % RARE.get(name, 1) == 0}
    by_check: dict[str, list[Problem]] = {}
    for problem in problems(job, checks):
        by_check.setdefault(problem.check, []).append(problem)
    failures = [
        _text(number, seen, job if options.whole else smallest(job, checks[name], name))
        for name, seen in by_check.items()
    ]
    return CaseReport(number, features(job), tuple(failures), time.process_time() - began_s)


def _text(number: int, seen: Sequence[Problem], job: Job) -> str:
    lines = [f"--- job {number}: {seen[0].check}", *(f"    {problem.text}" for problem in seen[:5])]
    if len(seen) > 5:
        lines.append(f"    and {len(seen) - 5} more")
    return "\n".join([*lines, yaml.safe_dump(job, sort_keys=False, default_flow_style=None, width=160), ""])


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

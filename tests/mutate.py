"""``python -m tests.mutate PACKAGE``: change one thing at a time in a package, and see whether its tests notice.

Mutations are cosmic-ray's, a random sample of them; each is tried in a copy of the tree, one after the other. Type
annotations are left as they are, for no test can tell. A mutant that lives is printed as a diff: write the test that
it fails, or say beside the code why the change is none.

Tests run in forks of a process that has the libraries already. Those of files that name the changed module come first,
and quick ones before slow ones; the first failure ends the run.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from random import Random

import pytest
from cosmic_ray.commands.init import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
#: Package of simulator -> paths of tests that are to notice.
PACKAGES = {
    "engine": (
        "engine",
        "program",
        "network/test_flows.py",
        "network/test_flows_in_time.py",
        "schedules/test_played.py",
    ),
    "network": (
        "network",
        "engine/test_traffic.py",
        "engine/test_contention.py",
        "engine/test_contention_in_line.py",
    ),
    "lowering": (
        "lowering",
        "engine/test_periods.py",
        "frameworks/test_hugging_face_deepspeed.py",
        "precisions/test_recipes.py",
        "schedules/test_played.py",
    ),
    "models": ("models", "capturing", "frameworks", "losses", "mixers", "precisions", "lowering/test_feature_pairs.py"),
    "operations": ("operations", "models", "lowering/test_feature_pairs.py"),
    "costs": ("costs", "engine/test_exact_sms.py", "engine/test_memory.py", "engine/test_power.py"),
}
#: Built beside its sources, and unknown to git.
COMPILED_LOOP = "simulator/engine/compiled/loop.so"
#: Imported once, before forks; what is changed, and what tests it, is imported in each fork.
LIBRARIES = (
    "numpy",
    "pandas",
    "networkx",
    "simpy",
    "pydantic",
    "yaml",
    "matplotlib.pyplot",
    "rich",
    "typer",
)
CHANGING = ("simulator", "tests", "calibration")
#: Of what tests print that fail without any change, so many lines are shown.
LINES = 30
#: A test that takes longer hangs, seconds of processor time.
LONGEST_s = 40


def main() -> int:
    """Print the mutants that live, and how many died."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("package", choices=PACKAGES, help="of simulator")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants [60]")
    parser.add_argument("--seed", type=int, default=0, help="of the sample [0]")
    parser.add_argument("--first", type=int, default=0, help="of the sample, to go on from [0]")
    parser.add_argument("--tests", nargs="+", help="paths of tests [those of the package]")
    parser.add_argument(
        "--slowest", type=float, default=2.0, help="processor time of a test that is still run, seconds [2]"
    )
    options = parser.parse_args()
    tests = options.tests or [f"tests/{path}" for path in PACKAGES[options.package]]
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as directory:
        copy(Path(directory))
        os.chdir(directory)
        sys.path.insert(0, directory)
        seconds = {test: took for test, took in seconds_of(tests).items() if took <= options.slowest}
        mutants = sample(Path("simulator") / options.package, options.sample, options.seed)[options.first :]
        died = 0
        for number, mutant in enumerate(mutants, 1):
            died += try_one(mutant, tests, seconds)
            print(f"{died} of {number} died", file=sys.stderr, flush=True)
        os.chdir(ROOT)
    print(f"{options.package}: {died} of {len(mutants)} mutants died")
    return 0


def copy(directory: Path) -> None:
    """Copy what git knows of the tree, as it is, and the compiled event loop where it was built."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, [*listed.stdout.decode().split("\0"), COMPILED_LOOP]):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def seconds_of(tests: Sequence[str]) -> dict[str, float]:
    """Return the processor time of each test without any change. Raises RuntimeError where one fails."""
    compileall.compile_dir("simulator", quiet=1)
    times, printed = Path("times.json"), Path("printed.txt")
    if run_tests(tests, [StopWatch(times)], printed):
        last = printed.read_text(encoding="utf-8").splitlines()[-LINES:]
        raise RuntimeError("\n".join(["the tests fail without any change:", *last]))
    seconds: dict[str, float] = json.loads(times.read_text(encoding="utf-8"))
    return seconds


class StopWatch:
    """Plugin of pytest that writes into a file the processor time of each test, with what it starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began_s = processor_s()
        outcome = yield
        self._seconds[item.nodeid] = processor_s() - began_s
        return outcome

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._seconds), encoding="utf-8")


def processor_s() -> float:
    """Return the processor time of this process and its finished children, seconds."""
    return sum(os.times()[:4])


class HangGuard:
    """Plugin of pytest that ends the process where one test takes `LONGEST_s` of processor time."""

    def pytest_runtest_setup(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, LONGEST_s)  # its signal ends a process that has no handler for it


class QuickestFirst:
    """Plugin of pytest that runs the tests of ``seconds`` alone: first those of files that name ``module``."""

    def __init__(self, seconds: Mapping[str, float], module: Path) -> None:
        self._seconds = seconds
        self._name = ".".join(module.with_suffix("").parts)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        far = {path: self._name not in path.read_text(encoding="utf-8") for path in {item.path for item in items}}
        kept = [item for item in items if item.nodeid in self._seconds]
        items[:] = sorted(kept, key=lambda item: (far[item.path], self._seconds[item.nodeid]))


def run_tests(arguments: Sequence[str], plugins: Sequence[object], printed: Path = Path(os.devnull)) -> int:
    """Return the status with which pytest ends in a fork for these ``arguments``; 0 where all tests pass.

    What it prints goes into the file ``printed``.
    """
    child = os.fork()
    if not child:
        output = os.open(printed, os.O_RDWR | os.O_CREAT)
        for stream in (0, 1, 2):
            os.dup2(output, stream)
        for module in [name for name in sys.modules if name.partition(".")[0] in CHANGING]:
            del sys.modules[module]
        signal.setitimer(signal.ITIMER_PROF, LONGEST_s)
        options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*options, *arguments], plugins=[HangGuard(), *plugins]))
    return os.waitpid(child, 0)[1]


def sample(package: Path, size: int, seed: int) -> list[MutationSpec]:
    """Return at most ``size`` mutations of a package, drawn at random."""
    modules = sorted(package.rglob("*.py"))
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init(modules, database, {})
        mutations = [mutation for item in database.work_items for mutation in item.mutations]
    skipped = {module: annotated(module) for module in modules}
    mutations = [one for one in mutations if not within(one, skipped[Path(one.module_path)])]
    mutations.sort(key=lambda one: (str(one.module_path), one.start_pos, one.operator_name, one.occurrence))
    return Random(seed).sample(mutations, min(size, len(mutations)))


def annotated(module: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where type annotations begin and end: (line, column) each."""
    places = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if isinstance(part, ast.expr):
                assert part.end_lineno is not None
                assert part.end_col_offset is not None
                places.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return places


def within(mutation: MutationSpec, places: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    """Return True where a mutation begins in one of these places."""
    return any(begin <= mutation.start_pos < end for begin, end in places)


def try_one(mutation: MutationSpec, tests: Sequence[str], seconds: Mapping[str, float]) -> bool:
    """Return True where the tests notice; print the diff where they do not."""
    module = Path(mutation.module_path)
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    with use_mutation(module, operator, mutation.occurrence) as (before, after):
        status = run_tests(tests, [QuickestFirst(seconds, module)])
    if status == 0:
        print(f"--- lives: {module}:{mutation.start_pos[0]}, {mutation.operator_name}")
        print("".join(unified_diff(before.splitlines(True), after.splitlines(True), n=2)), flush=True)
    return status != 0


if __name__ == "__main__":
    sys.exit(main())

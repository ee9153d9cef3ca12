"""``python -m tests.mutate PACKAGE``: change one thing at a time in a package, and see whether its tests notice.

Mutations are cosmic-ray's, a random sample of them; each is tried in a copy of the tree, one after the other. Type
annotations are left as they are, for no test can tell. A mutant that lives is printed as a diff: write the test that
it fails, or say beside the code why the change is none.
"""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
#: Package of simulator -> folders of tests that are to notice.
PACKAGES = {
    "engine": ("engine",),
    "network": ("network",),
    "lowering": ("lowering",),
    "models": ("models", "lowering/test_feature_pairs.py"),
    "operations": ("operations", "models", "lowering/test_feature_pairs.py"),
    "costs": ("costs",),
}
#: A mutant that takes so many times as long as the tests do, and so many seconds, hangs.
SLOWER, SLACK_s = 4, 30


def main() -> int:
    """Print the mutants that live, and how many died."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("package", choices=PACKAGES, help="of simulator")
    parser.add_argument("--sample", type=int, default=60, help="how many mutants [60]")
    parser.add_argument("--seed", type=int, default=0, help="of the sample [0]")
    parser.add_argument("--tests", nargs="+", help="paths of tests [those of the package]")
    options = parser.parse_args()
    tests = options.tests or [f"tests/{folder}" for folder in PACKAGES[options.package]]
    command = shlex.join([sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests])
    with tempfile.TemporaryDirectory() as directory:
        copy(Path(directory))
        os.chdir(directory)
        seconds = seconds_of(command)
        mutants = sample(Path("simulator") / options.package, options.sample, options.seed)
        died = sum(try_one(mutant, command, SLOWER * seconds + SLACK_s) for mutant in mutants)
        os.chdir(ROOT)
    print(f"{options.package}: {died} of {len(mutants)} mutants died")
    return 0


def copy(directory: Path) -> None:
    """Copy what git knows of the tree, as it is."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def seconds_of(command: str) -> float:
    """Return how long the tests take as they are. Raises `subprocess.CalledProcessError` where they fail."""
    began = time.monotonic()
    subprocess.run(shlex.split(command), check=True, capture_output=True)
    return time.monotonic() - began


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
    found = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if isinstance(part, ast.expr):
                assert part.end_lineno is not None
                assert part.end_col_offset is not None
                found.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
    return found


def within(mutation: MutationSpec, places: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    """Return True where a mutation begins in one of these places."""
    return any(begin <= mutation.start_pos < end for begin, end in places)


def try_one(mutation: MutationSpec, command: str, timeout_s: float) -> bool:
    """Return True where the tests notice; print the diff where they do not."""
    result = mutate_and_test([mutation], command, timeout_s)
    if not result.is_killed:
        print(f"--- lives: {mutation.module_path}:{mutation.start_pos[0]}, {mutation.operator_name}")
        print(result.diff, flush=True)
    return bool(result.is_killed)


if __name__ == "__main__":
    sys.exit(main())

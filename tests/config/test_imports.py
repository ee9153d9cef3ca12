"""Reading and checking a workload must not need what a bare GPU machine lacks."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("simpy", "matplotlib", "networkx", "numpy", "pandas", "rich", "typer", "torch")


def test_reading_a_workload_imports_nothing_heavy() -> None:
    code = f"""
import sys
from simulator.config import load_workload, warnings
warnings(load_workload("gpt175b_3d"))
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_neither_the_engine_nor_plots() -> None:
    code = f"""
import sys
from simulator.cli.app import main
try:
    main(["run", "--help"])
except SystemExit as done:
    assert done.code == 0
print([name for name in {HEAVY[:5]} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")

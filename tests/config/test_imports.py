"""What is loaded when: a bare GPU machine lacks most packages, and each costs a command a tenth of a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Packages, and the configuration of this one.
HEAVY = (
    *("simulator.config", "simpy", "networkx", "numpy", "pandas", "scipy", "matplotlib", "bokeh", "pyarrow", "rich"),
    *("typer", "torch"),
)
COMMAND = """
import contextlib, io
from simulator.cli.app import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({arguments})
"""


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        pytest.param("import simulator", [], id="import simulator"),
        pytest.param(
            "from simulator.config import load_workload, warnings\nwarnings(load_workload('gpt175b_3d'))",
            ["simulator.config"],
            id="reading a workload",
        ),
        pytest.param(COMMAND.format(arguments=["--help"]), ["typer"], id="--help"),
        pytest.param(COMMAND.format(arguments=["run", "--help"]), ["typer"], id="run --help"),
        pytest.param(
            COMMAND.format(arguments=["run", "gpt22b_tp8"]),
            ["simulator.config", "simpy", "numpy", "rich", "typer"],
            id="run",
        ),
    ],
)
def test_heavy_packages_are_loaded_where_they_are_used(code: str, loaded: list[str]) -> None:
    """Tables (pandas), pictures (matplotlib, bokeh) and graphs (networkx) are of calls that ask for them alone."""
    check = f"{code}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(loaded)

"""A wheel in an environment of its own, outside of the tree: `python -m tests.support.clean_install WHEEL`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

#: Commands that a wheel must be able to run, each of which needs files that ship with it.
COMMANDS = (
    ["--version"],
    ["list", "models"],
    ["check", "gpt175b_3d"],
    ["topology", "dgx_h100", "--nodes", "2"],
    ["run", "llama2_7b_zero2", "--set", "training.global_batch=8", "--json", "step.json"],
    ["validate", "megatron-2022", "--row", "korthikanti-t5-001"],
    ["calibrate", "fit", "--help"],
)


def check_wheel(wheel: Path, folder: Path) -> list[str]:
    """Install a wheel with what it depends on into a new environment in ``folder``, and return what is wrong with it.

    Neither this tree nor this environment's packages can be imported there.
    """
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    binaries = environment / ("Scripts" if sys.platform == "win32" else "bin")
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def problems_of(*command: object) -> list[str]:
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        return [] if done.returncode == 0 else [f"{' '.join(map(str, command[1:]))}: {done.stderr or done.stdout}"]

    install = [binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if wrong := problems_of(*install, wheel.resolve()):
        return wrong
    wrong = [problem for command in COMMANDS for problem in problems_of(binaries / "llmsim", *command)]
    where = "import simulator, sys; sys.exit(not simulator.__file__.startswith(sys.prefix))"
    wrong += problems_of(binaries / "python", "-c", where)
    if not wrong and json.loads((folder / "step.json").read_text(encoding="utf-8"))["step_time_s"] <= 0:
        wrong.append("run: a step takes no time")
    return wrong


def main() -> int:
    """Check the wheel that is named on the command line; exit status 1 where something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        wrong = check_wheel(Path(sys.argv[1]), Path(folder))
    print("\n".join(wrong) or f"{sys.argv[1]} runs in a clean environment")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

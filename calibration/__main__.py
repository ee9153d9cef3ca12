"""`python -m calibration COMMAND`: measure GPUs, fit profiles to that, and hold simulated runs against real ones.

A command's packages are imported when it is called: `measure` needs only torch and the standard library, and torch only
when it runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from simulator.errors import InputError

#: Command -> its task, as the help shows it.
COMMANDS = {
    "measure": "measure this machine's GPUs",
    "fit": "fit a profile to what was measured",
    "train": "really train workload files",
    "predict": "write predictions of runs, to be committed before they are made",
    "compare": "simulated beside measured: table and pictures",
}

#: Those that have ranks, and go on where they stopped.
RANKED = ("measure", "train")

#: The extra of pyproject.toml that brings torch.
INSTALL = "pip install '.[calibration]' in a checkout; docs/how-to/measure.md has the line for CPUs"


class Help(argparse.HelpFormatter):
    """Paragraphs as wide as the terminal, but for those with indented lines, which stay as they are; no option is cut
    in two."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(one if "\n " in one else "\n".join(self._split_lines(one, width)) for one in paragraphs)


#: What calls a command, unless it is ``llmsim calibrate``.
PROGRAM = "python -m calibration"


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run one command; its exit status: 0 done, 1 something could not be measured, 2 bad input, 130 interrupted.

    ``program``: how the help calls it.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(words, program)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # of several ranks one says so
            kept = "; what is finished is kept, and the same command goes on there" if words[0] in RANKED else ""
            print(f"interrupted{kept}", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(words: Sequence[str], program: str) -> int:
    parser = argparse.ArgumentParser(prog=program, description="Measure GPUs for the simulator.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        if name not in words[:1]:
            commands.add_parser(name, help=help_text)
            continue
        command = import_module(f"calibration.{name}.command")
        sub = commands.add_parser(
            name,
            help=help_text,
            description=str(command.__doc__).replace(PROGRAM, program),
            epilog=command.EXAMPLE.replace(PROGRAM, program),
            formatter_class=Help,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, command=name)
    chosen = parser.parse_args(words)
    try:
        return int(chosen.run(chosen))
    except InputError as error:
        problem = error
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        problem = InputError(f"{chosen.command} needs PyTorch, which is not installed", fix=INSTALL)
    # Of a machine's ranks, which all meet it, one says so.
    if chosen.command not in RANKED or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

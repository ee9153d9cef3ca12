"""`python -m calibration COMMAND`: what is done on a machine with GPUs. Imports only torch and the standard library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from calibration.measure import command as measure
from simulator.errors import InputError

COMMANDS = {"measure": measure}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0 done, 1 something could not be measured, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m calibration", description="Measure GPUs for the simulator.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=command.__doc__,
            epilog=command.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    chosen = parser.parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

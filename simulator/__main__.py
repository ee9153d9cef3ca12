"""The command ``llmsim``, and ``python -m simulator``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run one command and exit. An interrupt ends it without a traceback from the first import on."""
    try:
        from simulator.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()

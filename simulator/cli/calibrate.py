"""``calibrate``: the commands of `python -m calibration` under the same roof.

Their options are read by argparse, as `measure` and `train` also run where only PyTorch is installed.
"""

from __future__ import annotations

from typing import Annotated

import typer

#: The command has no options of its own: all are those of the calibration command, --help too.
SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND ...", help="measure, fit, train, predict or compare, and its options."),
    ] = None,
) -> None:
    """Measure GPUs, fit profiles, compare runs.

    Commands and options are those of `python -m calibration`, which needs less to be installed.
    `llmsim calibrate COMMAND --help` lists them.

    \b
    Examples:
      llmsim calibrate measure --gpus 4 --out h100 --full
      llmsim calibrate fit h100 --base h100-sxm-80gb --out mine.yaml
      llmsim calibrate compare job.yaml --measured runs --out compared
    """
    from calibration.__main__ import main

    raise typer.Exit(main(words or ["--help"], "llmsim calibrate"))

"""The commands, and what becomes of their errors.

A command is a typer function. Its docstring is the help, and ends with an example. The function imports what it needs
when it runs, so that ``--help`` is quick. Bad input ends in exit status 2 and a message, never in a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from simulator import __version__
from simulator.cli import (
    calibrate,
    capture,
    check,
    collective,
    importing,
    init,
    listing,
    plan,
    run,
    schedule,
    search,
    sweep,
    topology,
    trace,
    validate,
)
from simulator.cli.options import APP_SETTINGS, Command
from simulator.cli.streams import complain, flushed, open_streams, signals_raise
from simulator.errors import DeadlockError, InputError
from simulator.garbage import rarely_searched

#: Name -> the function of a command, or the application of a group of commands.
COMMANDS: dict[str, Callable[..., Any] | typer.Typer] = {
    "run": run.command,
    "search": search.command,
    "plan": plan.command,
    "sweep": sweep.command,
    "check": check.command,
    "list": listing.command,
    "schedule": schedule.command,
    "collective": collective.command,
    "topology": topology.command,
    "import": importing.command,
    "init": init.command,
    "capture": capture.command,
    "validate": validate.command,
    "trace": trace.app,
    "calibrate": calibrate.command,
}

app = typer.Typer(
    help="How fast will a language model train on a cluster? Simulates one training step, event by event.",
    epilog="Example: llmsim run gpt175b_3d --set parallelism.dp=8 --gantt step.png",
    **APP_SETTINGS,
)


def _print_version(asked: bool) -> None:
    if asked:
        from simulator.engine.compiled.library import why_missing

        reason = why_missing()
        print(f"llmsim {__version__}, {f'engine in Python: {reason}' if reason else 'compiled engine'}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


#: Commands with an option that takes several values, the further ones of which arrive as extra arguments.
_SEVERAL = {"schedule"}
#: Commands whose help says more than their docstring.
_CLASSES = {"collective": collective.CommandWithAlgorithms}
for _name, _command in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
        continue
    settings = calibrate.SETTINGS if _name == "calibrate" else {"allow_extra_args": _name in _SEVERAL}
    app.command(_name, cls=_CLASSES.get(_name, Command), context_settings=settings)(_command)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit.

    Exit status 0 means done, and 1 that a check failed which the user asked for. It is 2 for bad input or output that
    cannot be written, and 128 + n where signal n ended the command.
    """
    open_streams()
    with signals_raise(), rarely_searched():
        status = _status(lambda: app(arguments))
        sys.exit(flushed() or status)


def _status(command: Callable[[], object]) -> int:
    try:
        command()
    except (InputError, DeadlockError) as error:
        complain(str(error))
        return 2
    except OSError as error:  # files are read and written under `InputError`; what remains is standard output
        complain(f"standard output cannot be written: {error.strerror or error}")
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0

"""The page of commands, from typer's own description of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperArgument, TyperOption

from documentation.tables import table
from simulator.cli.app import COMMANDS, app

HEAD = """\
# Commands

<!-- Written by `python -m documentation`. -->

`llmsim` and `python -m simulator` are the same command. Exit status: 0 done, 1 a check that you asked for failed, 2 bad
input or output that cannot be written, 128 + n where signal n ended the command.

`llmsim --version` tells the version, and whether the engine's event loop is compiled.
"""


def commands_page() -> str:
    """Return a section for each command with its purpose, examples, arguments and options."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="llmsim")
    sections = []
    for name in COMMANDS:
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        if inner := getattr(command, "commands", None):
            sections.append(f"## llmsim {name}\n\n{_about(command.help or '')}")
            sections += [_section(f"### llmsim {name} {word}", one) for word, one in inner.items()]
        else:
            sections.append(_section(f"## llmsim {name}", command))
    return "\n".join([HEAD, *sections])


def _section(title: str, command: Any) -> str:
    return f"{title}\n\n{_about(command.help or '')}\n{_parameters(command.params)}"


def _about(text: str) -> str:
    """Return a docstring in Markdown: what stands behind ``\\b`` is kept line by line."""
    parts = []
    for part in inspect.cleandoc(text).split("\n\n"):
        if part.startswith("\b"):
            lines = part.lstrip("\b\n").splitlines()
            title, rest = lines[0], "\n".join(line.strip() for line in lines[1:])
            parts.append(f"{title}\n\n```text\n{rest}\n```\n")
        else:
            parts.append(f"{' '.join(part.split())}\n")
    return "\n".join(parts)


def _parameters(parameters: Iterable[object]) -> str:
    """Return a table of arguments and options."""
    rows = []
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            rows.append((f"`{parameter.metavar or (parameter.name or '').upper()}`", parameter.help or ""))
        elif isinstance(parameter, TyperOption) and not parameter.hidden:
            word = (parameter.metavar or str(parameter.name).upper()).replace("|", " or ")
            value = "" if parameter.is_flag else f" {word}"
            rows.append((f"`{', '.join(parameter.opts)}{value}`", parameter.help or ""))
    return table(("argument or option", "what it does"), rows)

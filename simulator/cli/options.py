"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer

from simulator.errors import InputError, amended

#: How the tool and its groups of commands show help and errors.
APP_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 110},
}
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the workload, as a dotted path; repeatable."),
]
ClusterNodes = Annotated[int | None, typer.Option("--nodes", metavar="N", help="Nodes of the cluster [as its file].")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", metavar="N", help="Simulations at once. [one per core]", show_default=False)
]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="WHERE",
        help="A Ray cluster to simulate on: ray://HOST:PORT, or local-ray. [processes of this machine]",
        show_default=False,
    ),
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is standard output.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print no summary.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 on any warning, or when memory does not fit.")]


def options_named(*same: str, **renamed: str) -> AbstractContextManager[None]:
    """Errors of the block that name a parameter of a Python function name the option of the command instead.

    ``same``: parameters of which options have the name; ``renamed``: parameter -> option. Raises `InputError`.

    >>> with options_named("sizes", only="--row"):
    ...     raise InputError("no such row", file="only", found="x")
    Traceback (most recent call last):
    simulator.errors.InputError: --row: no such row
      found:   'x'
    """
    options = {name: f"--{name}" for name in same} | renamed

    def name_option(error: InputError) -> None:
        error.file = options.get(error.file or "", error.file)

    return amended(name_option)


def parse_ranks(text: str, n_ranks: int, option: str) -> list[int]:
    """``all``, or numbers and ranges joined by commas, ascending and once each. Raises `InputError` naming ``option``.

    >>> parse_ranks("0-3,16", 32, "--ranks"), parse_ranks("all", 3, "--ranks")
    ([0, 1, 2, 3, 16], [0, 1, 2])
    """
    if text == "all":
        return list(range(n_ranks))
    ranks: set[int] = set()
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if first > last:
            raise InputError("is no list of ranks", file=option, found=text, allowed="all, or such as 0-7,16")
        if last >= n_ranks:
            raise InputError("names a rank that does not exist", file=option, found=text, allowed=f"0 to {n_ranks - 1}")
        ranks.update(range(first, last + 1))
    return sorted(ranks)

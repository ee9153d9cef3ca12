"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from simulator.errors import InputError, amended
from simulator.quantities import decimal_point, plain_spellings, usual_spelling

#: How the tool and its groups of commands show help and errors.
APP_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 110},
}
#: What typer's errors call a number -> what ours do.
_NUMBERS = {"valid integer": "a whole number", "valid float": "a number", "valid number": "a number"}


class Command(TyperCommand):
    """A command that refuses what is no number as it refuses other values, and options without one or with two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments.

        Raises `InputError` where an option of a number has something else, any is empty, and where one
        of a single value is given twice.
        """
        words = list(args)
        try:
            left = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            wanted = next((text for sign, text in _NUMBERS.items() if sign in error.message), None)
            if wanted is None or error.param is None:
                raise
            raise _no_number([*error.param.opts, *error.param.secondary_opts], words, wanted) from None
        self._check_single(ctx, words)
        return left

    def _check_single(self, ctx: Any, words: list[str]) -> None:
        """Raise `InputError` where the value of an option is empty, or one of two."""
        values, _, parameters = self.make_parser(ctx).parse_args(words)
        options: list[Any] = list(parameters)
        for option in options:
            if option.param_type_name != "option" or option.multiple or option.is_flag:
                continue
            name = option.opts[0]
            if options.count(option) > 1:
                raise InputError("is given twice", file=name, found=values[option.name], fix="one of them")
            if values[option.name] == "":
                raise InputError("has no value", file=name, fix=f"{name} {option.metavar or 'VALUE'}, or leave it out")


def _no_number(names: list[str], words: list[str], wanted: str) -> InputError:
    """Return the error of the option that has these ``names``, among the ``words`` of a command line."""
    values = [value for word, value in pairwise(words) if word in names]
    values += [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    number = "[-+]?[0-9.]+" if wanted == "a number" else "[-+]?[0-9]+"
    text = next((value for value in values if not re.fullmatch(number, value)), "".join(values[:1]))
    plain = " or ".join(plain_spellings(text)) or usual_spelling(text)
    if wanted == "a number":
        plain = decimal_point(text) or plain
    fix = f"{names[0]} {plain}" if plain else None
    return InputError(f"must be {wanted}", file=names[0], found=text, allowed=f"{wanted}, without a unit", fix=fix)


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
        help="A Ray cluster to simulate on (extra `cluster`): ray://HOST:PORT, or local-ray. [processes here]",
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

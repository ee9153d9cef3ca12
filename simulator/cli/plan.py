"""``plan``: how many GPUs a job needs, and the best layout on each number of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simulator.cli.options import Jobs, Json, On, Quiet, Set, options_named
from simulator.cli.outputs import check_outputs
from simulator.cli.search import (
    SEARCHED,
    FixedValues,
    LayoutDatabase,
    NumberLimits,
    RetriedLayouts,
    fixed_by_key,
    limits_by_key,
    resuming,
    search_watch,
    write_layouts,
)
from simulator.cli.terminal import progress, warn
from simulator.errors import InputError, amended

if TYPE_CHECKING:
    from simulator.searching.layout_search import SearchWatch

PlannedWorkload = Annotated[str, typer.Argument(metavar="WORKLOAD", help="A file, or a name in workloads/.")]
GpuCounts = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N1,N2|MIN..MAX",
        help="Numbers of GPUs, or a range of which whole nodes are tried. [with --days all that could be enough]",
        show_default=False,
    ),
]
RunLength = Annotated[
    str | None, typer.Option("--tokens", metavar="N", help="Tokens of the whole run: 1T, 300B, 15e12. [as the file]")
]
RunDays = Annotated[
    float | None, typer.Option("--days", metavar="D", help="The fewest GPUs are found that train no longer. [no end]")
]
GpuPrice = Annotated[
    float | None, typer.Option("--price", metavar="P", help="Price of a GPU-hour, in any currency. [as the file]")
]
MoreCounts = Annotated[
    int, typer.Option("--more", metavar="K", help="So many larger numbers of GPUs that have a layout, too.")
]
VariedValues = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=V1,V2", help="Values of a key that is no part of the layout. Repeatable."),
]
PlanCsv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a row per number of GPUs as a CSV table.")]


def command(
    workload: PlannedWorkload,
    gpus: GpuCounts = None,
    tokens: RunLength = None,
    days: RunDays = None,
    price: GpuPrice = None,
    more: MoreCounts = 0,
    vary: VariedValues = None,
    fix: FixedValues = None,
    limit: NumberLimits = None,
    set_: Set = None,
    jobs: Jobs = None,
    on: On = None,
    out: LayoutDatabase = None,
    retry: RetriedLayouts = False,
    json: Json = None,
    csv: PlanCsv = None,
    quiet: Quiet = False,
) -> None:
    """Find how many GPUs a job needs, and how to lay it out.

    The fastest layout that fits is searched on every number of GPUs, as by `search`. With --days whole nodes are tried,
    from the fewest on, until the time is enough. No number is left out, as more GPUs need not be faster. With --vary
    each value has searches of its own. Every simulated layout is kept in a database at once. The same command again
    goes on, whatever ended it.

    \b
    Examples:
      llmsim plan gpt175b_3d --tokens 300B --days 30
      llmsim plan gpt175b_3d --gpus 512,1024 --more 1 --price 2
      llmsim plan gpt22b_tp8 --gpus 8 --vary cluster=dgx_a100,dgx_h100
    """
    from simulator.config import parse_changes
    from simulator.planning.entry import plan
    from simulator.sweeping.reading import values_by_key

    out = Path(f"{Path(workload).stem}.search.db") if out is None else out
    check_outputs({"--out": out, "--json": json, "--csv": csv})
    changes = _with_run(parse_changes(set_ or ()), tokens, price)
    numbers, between = _counts(gpus)
    with resuming(out), progress("planning") as far, options_named(*SEARCHED, "days", "more", "vary"), _run_named():
        result = plan(
            workload,
            gpus=numbers,
            between=between,
            days=days,
            more=more,
            vary=values_by_key(vary or (), "--vary"),
            fix=fixed_by_key(fix or (), workload, changes),
            limit=limits_by_key(limit or ()),
            set=changes,
            jobs=jobs,
            on=on,
            out=out,
            retry_failed=retry,
            watch=_watch(far),
        )
    write_layouts(result, workload, out, json, csv, quiet)
    warn(result.warnings)


def _watch(far: Callable[[str], None]) -> Callable[[int], SearchWatch]:
    """Return what says on standard error how far the search on a number of GPUs is."""
    return lambda gpus: search_watch(lambda text: far(f"{gpus:,} GPUs: {text}"))


def _with_run(changes: Mapping[str, Any], tokens: str | None, price: float | None) -> dict[str, Any]:
    """Return changes with the keys that the length of the run and the price stand for.

    Raises `InputError` where one is among ``changes``.
    """
    from simulator.quantities import TOKENS, read_number

    values = {
        ("--tokens", "training.total_tokens"): None if tokens is None else read_number(tokens, TOKENS, "--tokens"),
        ("--price", "cluster.price_per_gpu_hour"): price,
    }
    changed = {key: value for (_, key), value in values.items() if value is not None}
    for option, key in values:
        if key in changed and key in changes:
            raise InputError(f"stands for {key}, which --set changes too", file=option, fix="one of both")
    return {**changes, **changed}


def _run_named() -> AbstractContextManager[None]:
    """Errors of the block that name the price or the length of the run name their options."""
    options = {"cluster.price_per_gpu_hour": "--price", "training.total_tokens": "--tokens"}

    def name_option(error: InputError) -> None:
        if error.file == "--set" and error.key in options:
            error.file, error.key = options[error.key], None

    return amended(name_option)


def _counts(text: str | None) -> tuple[list[int] | None, tuple[int, int] | None]:
    """Return numbers of GPUs, or least and most of them. Raises `InputError`.

    >>> _counts("512,1024"), _counts("64..2048"), _counts(None)
    (([512, 1024], None), (None, (64, 2048)), (None, None))
    """
    if text is None:
        return None, None
    least, dots, most = text.partition("..")
    try:
        if dots:
            return None, (int(least), int(most))
        return [int(number) for number in text.split(",")], None
    except ValueError:
        allowed = "numbers such as 512,1024, or a range such as 64..2048"
        raise InputError("are no numbers of GPUs", file="--gpus", found=text, allowed=allowed) from None

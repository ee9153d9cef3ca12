"""Timelines as Parquet files: a row per kernel and communication, with a dictionary of the columns in the file."""

from __future__ import annotations

from pathlib import Path

from simulator.errors import InputError, install_extra
from simulator.output.files import writing
from simulator.timeline import Timeline

#: Column -> unit, empty where it has none, and description. Pages for users list the same.
COLUMNS: dict[str, tuple[str, str]] = {
    "rank": ("", "simulated rank, which stands for all that do the same at the same time"),
    "lane": ("", "stream: compute, or that of a kind of communication"),
    "name": ("", "kernel or communication"),
    "kind": ("", "class of the kernel, or operation of the communication"),
    "category": ("", "use of time: compute, recompute, optimizer, tp, cp, ep, pp, dp or offload"),
    "phase": ("", "F forward, B backward, I input gradient, W weight gradient, R recompute, O optimizer, C none"),
    "stage": ("", "stage of the model; -1 where it is of none"),
    "chunk": ("", "model chunk of the rank"),
    "microbatch": ("", "number of the micro-batch; -1 where it is of none"),
    "posted_s": ("s", "when the stream came to it, from the start of the step"),
    "start_s": ("s", "when it began; a communication begins when all its ranks have come"),
    "end_s": ("s", "when it ended"),
    "nbytes": ("B", "bytes that a kernel moves in the GPU's memory, or that a GPU sends"),
    "flops": ("FLOP", "floating-point operations of a kernel"),
}


def check_timeline_file() -> None:
    """Raise `InputError` where Parquet files cannot be written."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        fix = install_extra("parquet")
        raise InputError("needs pyarrow, which is not installed", file="--timeline", fix=fix) from None


def write_timeline(timeline: Timeline, path: str | Path, *, step_time_s: float) -> None:
    """Write the rows of a Timeline, as of `Timeline.frame`. Raises `InputError`.

    Each field's metadata have its ``unit`` and ``description``; those of the file have ``step_time_s`` and ``ranks``,
    how many ranks each simulated one stands for.
    """
    check_timeline_file()
    import json

    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pandas(timeline.frame(), preserve_index=False)
    fields = [
        table.schema.field(name).with_metadata({"unit": unit, "description": description})
        for name, (unit, description) in COLUMNS.items()
    ]
    ranks = {str(rank): count for rank, count in timeline.ranks_like.items()}
    about = {"step_time_s": repr(step_time_s), "ranks": json.dumps(ranks)}
    with writing(path) as file:
        parquet.write_table(table.cast(pyarrow.schema(fields, metadata=about)), file)

"""Output of Slurm's ``squeue``: on how many nodes a job runs."""

from __future__ import annotations

from pathlib import Path

from simulator.bounds import MAX_GPUS, is_digits
from simulator.errors import InputError
from simulator.importers.machine_facts import MachineFacts

FORM = "squeue"


def is_queue(text: str) -> bool:
    """Return whether a text is of this format, by its header."""
    return _header(text) is not None


def read(text: str, path: Path) -> MachineFacts:
    """Return the number of nodes of the one running job.

    Columns are counted from the right, as a job's name may hold blanks. Raises `InputError` where no job runs, or
    several on different numbers of nodes.
    """
    start, columns = _header(text) or (0, [])
    state = columns.index("ST" if "ST" in columns else "STATE") - len(columns)
    nodes = columns.index("NODES") - len(columns)
    running: dict[str, int] = {}
    left_out = []
    for line in text.splitlines()[start + 1 :]:
        words = line.split()
        if not words:
            continue
        is_row = len(words) >= len(columns) and words[state] in ("R", "RUNNING") and is_digits(words[nodes])
        if not is_row:
            left_out.append(f"job {words[0]}, which does not run")
            continue
        running[words[0]] = int(words[nodes])
    sizes = set(running.values())
    if len(sizes) != 1 or 0 in sizes:
        jobs = ", ".join(f"{job} on {count} nodes" for job, count in list(running.items())[:4]) or "none"
        fix = "squeue --job NUMBER, of the job that is meant"
        raise InputError("must hold one running job, or jobs of one size", file=path, found=jobs, fix=fix)
    if max(sizes) > MAX_GPUS:
        raise InputError("is no number of nodes", file=path, key="NODES", found=max(sizes), allowed=f"<= {MAX_GPUS:,}")
    return MachineFacts(FORM, nodes=sizes.pop(), left_out=tuple(left_out))


def _header(text: str) -> tuple[int, list[str]] | None:
    """Return the line of the header, counted from 0, and its columns; None where there is none."""
    for number, line in enumerate(text.splitlines()):
        columns = line.split()
        if {"JOBID", "NODES"} <= set(columns) and {"ST", "STATE"} & set(columns):
            return number, columns
    return None

"""Tables of errors: pages say in words what is measured, and the figures beside it are the recorded ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

from simulator.validation.errors import recorded

#: Framework -> how names of its runs begin in `FRAMEWORK_RUNS`.
FRAMEWORK_RUNS = "own-frameworks"
STACKS = {
    "hugging_face": "hf",
    "hugging_face_deepspeed": "ds",
    "torchtitan": "tt",
    "megatron_core_local": "mc",
}


def with_figures(text: str) -> str:
    """Return a page with rows, mean and largest error of suites and frameworks, as recorded, behind their names.

    Only lines of tables behind ``<!-- validation -->`` are touched, up to the next empty line.
    """
    errors = {name: list(rows.values()) for name, rows in recorded().items()}
    runs = recorded()[FRAMEWORK_RUNS]
    errors |= {name: [runs[run] for run in runs if run.startswith(start)] for name, start in STACKS.items()}

    def filled(table: re.Match[str]) -> str:
        return re.sub(
            r"^\| `([\w-]+)` \|[^|]*\|[^|]*\|[^|]*\|",
            lambda row: f"| `{row[1]}` | {_figures(errors[row[1]])} |" if row[1] in errors else row[0],
            table[0],
            flags=re.MULTILINE,
        )

    return re.sub(r"^<!-- validation -->\n(?:\|.*\n)+", filled, text, flags=re.MULTILINE)


def _figures(errors: Iterable[float]) -> str:
    """Return number, mean and largest of the errors as cells of a table.

    >>> _figures([0.01, -0.03])
    '2 | 2.0 % | 3.0 %'
    """
    sizes = [100 * abs(error) for error in errors]
    return f"{len(sizes)} | {sum(sizes) / len(sizes):.1f} % | {max(sizes):.1f} %"

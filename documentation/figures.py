"""Tables of suites: their recorded errors stand in pages that say in words what is measured."""

from __future__ import annotations

import re

from simulator.validation.errors import recorded


def with_figures(text: str) -> str:
    """Return a page with each suite's rows, mean and largest error as recorded, in a table's second to fourth column."""
    for suite, errors in recorded().items():
        sizes = [100 * abs(error) for error in errors.values()]
        row = f"| `{suite}` | {len(sizes)} | {sum(sizes) / len(sizes):.1f} % | {max(sizes):.1f} % |"
        text = re.sub(rf"^\| `{re.escape(suite)}` \|[^|]*\|[^|]*\|[^|]*\|", row, text, flags=re.MULTILINE)
    return text

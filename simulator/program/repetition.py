"""Periods that are left out of a program, because a pipeline does the same again and again."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from simulator.program.step import Step

#: Numbers of micro-batches in the labels of passes (``3F17``) and of transfers (``3SEND_F17``).
_MICROBATCH = re.compile(r"(?<=[0-9_][FBIW])\d+")


class Repetition(NamedTuple):
    """Periods that a shortened program leaves out: ``times`` of them, of so many ``microbatches`` each.

    The whole program is the shortened one with these periods put in where the pipeline is full. ``passes``: those of
    one period on all ranks, as stage, phase and micro-batch. ``steps``: training steps in a row, each of which leaves
    out as many; every lane has the same steps for each.
    """

    microbatches: int
    times: int
    passes: frozenset[tuple[int, str, int]]
    steps: int = 1

    def runs(self, step: Step) -> int:
        """Return how many steps of the whole program a step counts for; passes of one period for those left out."""
        return 1 + self.times if (step.stage, str(step.phase), step.microbatch) in self.passes else 1


def later_label(label: str, microbatches: int) -> str:
    """Return the label of the same step so many micro-batches later.

    >>> later_label("reduce 3B17.0", 2), later_label("1SEND_F3+0RECV_B1", 2), later_label("optimizer", 2)
    ('reduce 3B19.0', '1SEND_F5+0RECV_B3', 'optimizer')
    """
    texts, numbers = _parts(label)
    if len(numbers) == 1:
        return f"{texts[0]}{numbers[0] + microbatches}{texts[1]}"
    return "".join(chain(*[(text, str(n + microbatches)) for text, n in zip(texts, numbers, strict=False)], texts[-1:]))


@lru_cache(maxsize=1 << 17)
def _parts(label: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the numbers of micro-batches in a label, and the text before, between and behind them."""
    return tuple(_MICROBATCH.split(label)), tuple([int(number) for number in _MICROBATCH.findall(label)])

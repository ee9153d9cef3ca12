"""Ranges of the numbers and texts that users write, and words that they choose among, which `config` checks."""

from __future__ import annotations

import numbers
import re
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Predicate

from simulator.errors import InputError
from simulator.input_files import brief

MAX_GPUS = 1_000_000
_DIGITS = re.compile(r"[0-9]{1,18}")
#: Slowest link, in the unit of its key; 0 where there is none.
MIN_BANDWIDTH = 1_000

Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Gt(0), Le(1)]
#: Number of GPUs, nodes, cards or drives.
Count = Annotated[int, Ge(1), Le(MAX_GPUS)]
CountOrNone = Annotated[int, Ge(0), Le(MAX_GPUS)]
#: Number of GPUs or cards of one node; routes between all of them are worked out one by one.
MAX_IN_NODE = 576
InNode = Annotated[int, Ge(1), Le(MAX_IN_NODE)]
InNodeOrNone = Annotated[int, Ge(0), Le(MAX_IN_NODE)]
Bandwidth = Annotated[float, Ge(MIN_BANDWIDTH), Le(1e18)]
MAX_MODEL_SIZE = 1_000_000_000
#: A size of a model: heads, widths, tokens.
ModelSize = Annotated[int, Ge(1), Le(MAX_MODEL_SIZE)]
#: Layers of a model.
MAX_LAYERS = 10_000
Latency = Annotated[float, Ge(0), Le(10)]
#: Speed as a multiple of another one.
SLOWEST = 1e-3
SpeedScale = Annotated[float, Ge(SLOWEST), Le(1e3)]
#: Text that is shown to people: no control characters, no line breaks, no halves of characters.
Text = Annotated[str, Predicate(str.isprintable)]
#: Which engine plays: the compiled one, the one in Python, or the compiled one where it is there (`engine.engines`).
EngineChoice = Literal["auto", "compiled", "python"]


def is_digits(text: str) -> bool:
    """Return whether a text is a whole number in so many digits as numbers of things have; ``int`` reads it.

    >>> is_digits("16"), is_digits("\u00b2"), is_digits("9" * 5000)
    (True, False, False)
    """
    return _DIGITS.fullmatch(text) is not None


def as_number(value: object, *, file: object, allowed: str = "a number, >= 0") -> float:
    """Return a number of 0 or more that a Python caller gives for ``file``. Raises `InputError` on anything else.

    >>> as_number(3, file="budget_s")
    3.0
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise InputError("must be a number", file=file, found=brief(value), allowed=allowed)
    return float(value)

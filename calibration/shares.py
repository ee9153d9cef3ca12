"""How the tokens of a grouped product are spread over its groups, for those who measure and those who fit."""

from __future__ import annotations

import itertools


def ends(tokens: int, groups: int, skew: bool) -> list[int]:
    """Return the end of each group's tokens, in multiples of 16: even shares, or shares that fall as 1 / rank."""
    weights = [1 / (index + 1) if skew else 1.0 for index in range(groups)]
    total = sum(weights)
    bounds = [16 * round(tokens * share / total / 16) for share in itertools.accumulate(weights)]
    return [*bounds[:-1], tokens]

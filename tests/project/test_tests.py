"""Rules that the files of the tests keep to."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

from tests.support.grids import every_pair, grid

TESTS = Path(__file__).parents[1]


def test_helpers_stand_in_support() -> None:
    """No file imports another's tests: what several share stands in tests/support."""
    imports = re.compile(r"(?m)^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+")
    paths = sorted(TESTS.rglob("*.py"))
    assert len(paths) > 100
    assert not [str(path) for path in paths if imports.search(path.read_text(encoding="utf-8"))]


def test_a_thinned_grid_has_every_value() -> None:
    """The diagonal of 4 x 2 points has (1, x) and (3, y). The first point with 2, and that with 4, come to it."""
    points = grid([1, 2, 3, 4], "xy", every=4)
    assert [point.values for point in points if not point.marks] == [(1, "x"), (2, "x"), (3, "y"), (4, "x")]


def test_of_a_thinned_grid_every_two_values_meet() -> None:
    """The two axes of three need at least 9 of 3 x 2 x 3 points; as many are left to `make test`."""
    names, points = every_pair({"a": [1, 2, 3], "b, c": [(4, 5), (6, 7)], "d": "xyz"}).args
    assert names == ["a", "b", "c", "d"]
    assert len(points) == 18
    kept = [(a, (b, c), d) for a, b, c, d in (point.values for point in points if not point.marks)]
    assert len(kept) == 9
    pairs = {pair for point in kept for pair in combinations(point, 2)}
    assert len(pairs) == 3 * 2 + 3 * 3 + 2 * 3

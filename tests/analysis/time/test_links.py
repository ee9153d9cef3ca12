"""Rows of contention on links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analysis.time.links import contention
from simulator.timeline import Contender, Contention
from tests.support.timelines import Span, template, timeline


def _met(link: str, kind: str, loss_s: float, sends_s: float) -> Contention:
    """Copies that lost ``loss_s`` on a link, beside sends that lost ``sends_s``."""
    flows = (Contender("job", "rank", "to_host", 1, 1.0, loss_s), Contender("job", "pp", "send", 1, 1.0, sends_s))
    return Contention(link, kind, 1, flows)


@pytest.mark.parametrize("rounding_s", [1e-14, 0.0, -1e-14])
def test_rows_of_equal_losses_come_in_an_order_of_their_own(rounding_s: float) -> None:
    # Copies lost 2 ms on both links, give or take the last digit. Sends lost 1 ms on the second and half on the first.
    # Of equally large losses the row with the larger other loss comes first, whatever the links' numbers are.
    step = timeline([Span(0, "compute", template(("mm", "matmul", "compute", 1.0)), 0.0)])
    first, second = _met("a", "pcie", 2e-3 + rounding_s, 0.5e-3), _met("b", "pcie", 2e-3, 1e-3)
    worst = _met("c", "roce", 3e-3, 0.0)
    for links in ((first, second, worst), (worst, second, first)):
        rows = contention(replace(step, contention=links))
        assert [row["link"] for row in rows] == ["c", "b", "a"]


def test_links_with_traffic_of_others_of_their_own_share_a_row() -> None:
    # Both ways of a card are half full of others' traffic, which is named by its link. Gradients lose 1 ms on each.
    def met(link: str) -> Contention:
        others, gradients = Contender("", link, "traffic", 1, 1.0, 0.0), Contender("job", "dp", "push", 1, 1.0, 1e-3)
        return Contention(link, "nic", 1, (others, gradients))

    step = timeline([Span(0, "compute", template(("mm", "matmul", "compute", 1.0)), 0.0)])
    (row,) = contention(replace(step, contention=(met("nic0:tx"), met("nic0:rx"))))
    assert row["count"] == 2

"""Rows of contention on links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.analysis.time.links import busiest_links, contention, links_of_purpose
from simulator.timeline import Contender, Contention, LinkUse
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


def test_links_that_tie_come_in_the_order_of_their_cluster() -> None:
    # Both links of the cluster's first node carry 100 B at 100 B/s, as do those of the second. A link that stands for
    # others is the first of them. So rows are the same whether all four are simulated, or one for each two.
    def use(index: int, count: int) -> LinkUse:
        name = f"{'ab'[index % 2]}{index // 2}:tx"
        return LinkUse(name, f"kind{index % 2}", count, 100.0, 100.0, by_purpose={"dp": 100.0}, index=index)

    step = timeline([Span(0, "compute", template(("mm", "matmul", "compute", 1.0)), 0.0)])
    each = [use(index, 1) for index in (3, 1, 2, 0)]
    folded = [use(1, 2), use(0, 2)]
    rows = [busiest_links(replace(step, links=tuple(links))) for links in (each, folded)]
    assert rows[0] == rows[1]
    assert [(row["name"], row["count"]) for row in rows[0]] == [("a0:tx", 2), ("b0:tx", 2)]
    uses = [links_of_purpose(replace(step, links=tuple(links)), "dp") for links in (each, folded)]
    assert uses[0] == uses[1]
    assert [row["links"] for row in uses[0]] == ["a*", "b*"]


def test_equal_contention_is_told_of_the_first_link_of_the_cluster() -> None:
    step = timeline([Span(0, "compute", template(("mm", "matmul", "compute", 1.0)), 0.0)])
    links = (replace(_met("late", "roce", 1e-3, 0.0), index=7), replace(_met("early", "roce", 1e-3, 0.0), index=2))
    for order in (links, links[::-1]):
        (row,) = contention(replace(step, contention=order))
        assert (row["link"], row["count"]) == ("early", 2)


def test_transfers_that_hardly_met_are_left_out() -> None:
    """A step of 1 s leaves out what is below 1 us: here the whole second link, and one transfer of the first."""
    met = (Contender("a", "dp", "all_reduce", 1, 2.0, 1.0), Contender("a", "pp", "send", 1, 2.0, 0.0))
    hardly = Contender("a", "ep", "all_to_all", 1, 9e-7, 4e-7)
    links = (Contention("one", "nvlink", 1, (*met, hardly)), Contention("two", "pcie", 1, (hardly, hardly)))
    step = timeline([Span(0, "compute", template(("mm", "matmul", "compute", 1.0)), 0.0)])
    (row,) = contention(replace(step, contention=links))
    assert row["link"] == "one"
    assert [flow["axis"] for flow in row["flows"]] == ["dp", "pp"]

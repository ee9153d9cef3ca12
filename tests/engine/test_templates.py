"""Templates: rows of ops that spans share, each distinct one kept once."""

from __future__ import annotations

import pytest

from simulator.engine.templates import TemplateStore
from simulator.program import Collective, CollectiveKind, Comm, PointToPoint, PointToPointKind, Purpose

REDUCTION = Collective("grads", CollectiveKind.ALL_REDUCE, 8.0, "dp", Purpose.DATA)
RECEIVE = PointToPoint("input", PointToPointKind.RECV, 8.0, "pp", Purpose.PIPELINE, peer=0)


@pytest.mark.parametrize(("comm", "sent"), [(REDUCTION, 14.0), (RECEIVE, 0.0)])
def test_a_communication_that_the_network_times_is_one_row(comm: Comm, sent: float) -> None:
    """The network says how long it takes, and the host has issued it before. No op behind it could run beside it.

    A GPU sends what goes over the wire, 2 (n - 1) / n of the message in a ring of eight; who receives sends nothing.
    """
    store = TemplateStore()
    number = store.comm_template(comm, 14.0)
    template = store.templates[number]
    columns = (template.work_s, template.launched_s, template.nbytes, template.flops)
    assert [column.tolist() for column in columns] == [[0.0], [0.0], [sent], [0.0]]
    assert template.beside == {}
    assert store.comm_template(comm, 14.0) == number
    assert store.comm_template(comm, 15.0) != number

"""Every group follows the pattern that it would follow if groups that sit alike shared nothing."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.engine import Placed
from simulator.engine.carried import routed_comms
from simulator.engine.group_comms import alike_comms
from simulator.network.collectives import choose
from tests.support.programs import comm_called
from tests.support.ten_nodes import BREAKS, ten_nodes
from tests.support.transfers import at_once

COSTS = Costs.from_profile(load_profile("a100-sxm-80gb"))


@pytest.mark.parametrize("overrides", BREAKS.values(), ids=BREAKS)
def test_the_chosen_pattern_is_the_fastest_of_each_group_alone(overrides: list[dict[str, Any]]) -> None:
    """Four GPUs of each of ten nodes are a tp group, and those of two nodes in a row a dp group: 15 groups.

    The oracle works out all patterns of each group on a cluster that remembers nothing, and takes the fastest.
    """
    cluster, alone = ten_nodes(overrides), ten_nodes(overrides)
    groups = {"tp": [range(at, at + 4) for at in range(0, 40, 4)], "dp": [range(at, at + 8) for at in range(0, 40, 8)]}
    comms = [comm_called("sum", "all_reduce", size, axis, axis) for axis in groups for size in (8.0, 1e5, 1e9)]
    gpus = tuple([gpu for node in range(10) for gpu in cluster.gpus_of(node)[:4]])
    placed = Placed(at_once(groups, *comms), COSTS, gpus, ())
    axes = {axis: placed.program.seated(axis) for axis in groups}
    routed = routed_comms([placed], cluster, alike_comms([placed], cluster, [axes]))
    each = [(one.alike.one(row), one.pattern(place)) for one in routed for place, row in enumerate(one.rows.tolist())]
    assert len(each) == 3 * 15
    for item, pattern in each:
        alone.memo.clear()
        fastest = choose("all_reduce", item.patterns(alone), item.comm.nbytes, COSTS)
        assert fastest is not None
        assert pattern is not None
        assert pattern.timing == fastest.timing
        for phase, expected in zip(pattern.legs, fastest.legs, strict=True):
            assert sorted(phase.loads) == sorted(expected.loads)

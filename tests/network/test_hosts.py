"""Operations between workers and the hosts of servers."""

from __future__ import annotations

from simulator.network import hosts
from tests.support.clusters import nic_cluster


def test_each_server_sends_and_gets_its_equal_part() -> None:
    # Of parameters on four servers each has a quarter, which crosses its own way to worker 0.
    cluster, ends = nic_cluster(5), (0, 8, 9, 10, 11)
    (pushed,), (pulled,) = hosts.push(cluster, ends), hosts.pull(cluster, ends)
    assert [(hop.sender, hop.receiver, hop.load) for hop in pushed.hops] == [(0, server, 0.25) for server in ends[1:]]
    assert [(hop.sender, hop.receiver, hop.load) for hop in pulled.hops] == [(server, 0, 0.25) for server in ends[1:]]

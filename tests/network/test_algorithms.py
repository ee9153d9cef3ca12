"""Every algorithm against its closed form, and against a replay of its messages with the data that they carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import pytest

from simulator.cluster import Cluster, build_cluster
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.network import pat
from simulator.network.collectives import OPERATIONS, fastest, idle_seconds, patterns, plan
from simulator.network.direct import ByteShares
from simulator.network.plan import Plan
from simulator.network.tree import EFFICIENCY, other_parent, parent
from tests.support import replay, scripts
from tests.support.clusters import HOP_s, NIC_Bps, NIC_LATENCY_s
from tests.support.grids import grid, one_in
from tests.support.replay import Part, Place, Script, Wire

IDEAL = Costs.ideal()
SIZE = 1e9
#: Numbers of ranks: small ones, powers of two and their neighbours, and odd ones.
PLAYED_N = (*range(2, 10), 11, 15, 16, 17, 23, 32, 33)
#: Where messages go as the square of the ranks.
FEWER_N = (*range(2, 10), 15, 16, 17)


@cache
def cluster_of(n: int) -> Cluster:
    """Nodes of one GPU with a NIC, all at one switch."""
    nics = {"count": 1, "bandwidth_bps": 8 * NIC_Bps, "latency_s": NIC_LATENCY_s}
    node = {"gpus": {"type": "ideal", "count": 1}, "pcie": {"generation": 6}, "nics": nics}
    return build_cluster(validated(ClusterSpec, {"name": "switch", "nodes": n, "node": node, "fabric": {"radix": 256}}))


def wire(sender: Place, receiver: Place, share: float = 1.0) -> Wire:
    """Of `nic_cluster`: every rank has a NIC of its own at one switch."""
    return ("out", sender), ("in", receiver), share * NIC_Bps, HOP_s


def log2(n: int) -> int:
    return math.ceil(math.log2(n))


def power(n: int) -> int:
    return 1 << (n.bit_length() - 1)


class Form(NamedTuple):
    """What the papers say of n ranks: ``steps`` one after another, ``sizes`` the bytes on the busiest port, per byte of
    message, of all steps together. ``script`` is the same rank by rank; ``share`` of the bandwidth is reached."""

    steps: Callable[[int], int]
    sizes: Callable[[int], float]
    script: Callable[[int, float], Script]
    share: float = 1.0


def halving_steps(n: int) -> int:
    return 2 * int(math.log2(power(n))) + 2 * (n != power(n))


def halving_sizes(n: int) -> float:
    return 2 * (power(n) - 1) / power(n) + 2 * (n != power(n))


def bruck_sizes(n: int) -> float:
    """Of the distances 1 to n-1, those with each bit."""
    return sum(bin(distance).count("1") for distance in range(n)) / n


def binomial_sizes(n: int) -> float:
    """In each step the largest subtree that is handed on; all steps together come to those of the root's children."""
    return sum(min(1 << k, n - (1 << k)) for k in range(log2(n))) / n


FORMS: dict[tuple[str, str], Form] = {
    ("all_reduce", "ring"): Form(lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n, scripts.ring_all_reduce),
    ("all_reduce", "rs_ag"): Form(lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n, scripts.ring_all_reduce),
    ("all_reduce", "hierarchical"): Form(lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n, scripts.ring_all_reduce),
    ("all_reduce", "direct"): Form(lambda n: 2, lambda n: 2 * (n - 1) / n, scripts.direct_all_reduce),
    ("all_reduce", "halving_doubling"): Form(halving_steps, halving_sizes, scripts.halving_doubling_all_reduce),
    ("all_gather", "ring"): Form(lambda n: n - 1, lambda n: (n - 1) / n, scripts.ring_all_gather),
    ("all_gather", "direct"): Form(lambda n: 1, lambda n: (n - 1) / n, scripts.direct_all_gather),
    ("all_gather", "bruck"): Form(log2, lambda n: (n - 1) / n, scripts.bruck_all_gather),
    ("all_gather", "pat"): Form(log2, lambda n: (n - 1) / n, scripts.pat_all_gather, pat.EFFICIENCY),
    ("reduce_scatter", "pat"): Form(log2, lambda n: (n - 1) / n, scripts.pat_reduce_scatter, pat.EFFICIENCY),
    ("reduce_scatter", "ring"): Form(lambda n: n - 1, lambda n: (n - 1) / n, scripts.ring_reduce_scatter),
    ("reduce_scatter", "direct"): Form(lambda n: 1, lambda n: (n - 1) / n, scripts.direct_reduce_scatter),
    ("all_to_all", "pairwise"): Form(lambda n: 1, lambda n: (n - 1) / n, scripts.pairwise_all_to_all),
    ("all_to_all", "rail"): Form(lambda n: 1, lambda n: (n - 1) / n, scripts.pairwise_all_to_all),
    ("all_to_all", "bruck"): Form(log2, bruck_sizes, scripts.bruck_all_to_all),
}
FORMS["send", "direct"] = FORMS["send_recv", "direct"] = Form(lambda n: 1, lambda n: 1.0, scripts.send_recv)
for operation in ("broadcast", "reduce", "scatter", "gather"):
    whole = operation in ("broadcast", "reduce")
    FORMS[operation, "linear"] = Form(
        lambda n: 1,
        (lambda n: n - 1.0) if whole else (lambda n: (n - 1) / n),
        lambda n, size, kind=operation: scripts.linear(n, size, kind),  # type: ignore[misc]
    )
    FORMS[operation, "binomial"] = Form(
        log2,
        (lambda n: float(log2(n))) if whole else binomial_sizes,
        lambda n, size, kind=operation: scripts.binomial(n, size, kind),  # type: ignore[misc]
    )

#: All of whose messages are posted at once, so that there is one latency.
POSTED = {"direct", "pairwise", "rail", "linear"}
#: Whose chunks are under way everywhere at once, and what is no collective of several ranks.
PIPELINED = {("broadcast", "ring"), ("reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "binary_tree")}
IN_SWITCHES = {"nvls", "nvls_tree", "collnet"}


def test_every_algorithm_is_here() -> None:
    every = {(op, name) for op, entry in OPERATIONS.items() for name in entry.algorithms if op != "barrier"}
    known = {*FORMS, *PIPELINED} | {(op, name) for op, name in every if name in IN_SWITCHES}
    assert every == known


def ports(operation: Plan, cluster: Cluster) -> dict[tuple[str, int], float]:
    """Bytes on the ports of the NICs, in all phases."""
    totals: dict[tuple[str, int], float] = {}
    for phase in operation.phases:
        for index, load in phase.loads:
            node, _, name = cluster.links[index].name.partition(".")
            if name in ("nic0:tx", "nic0:rx"):
                key = ("out" if name.endswith("tx") else "in", int(node[4:]))
                totals[key] = totals.get(key, 0.0) + load * phase.nbytes
    return totals


@pytest.mark.parametrize(("op", "name"), FORMS)
def test_steps_and_bytes_are_those_of_the_closed_form(op: str, name: str) -> None:
    """steps x latency, and then bytes / bandwidth, on an idle switch that blocks nothing."""
    form = FORMS[op, name]
    for n in (2,) if op == "send" else FEWER_N if name in POSTED else PLAYED_N:
        operation = plan(op, SIZE, range(n), cluster_of(n), IDEAL, name)
        assert operation.latency_s == pytest.approx(form.steps(n) * HOP_s, rel=1e-9), n
        assert sum(phase.nbytes for phase in operation.phases) == pytest.approx(form.sizes(n) * SIZE, rel=1e-9), n
        expected = form.steps(n) * HOP_s + form.sizes(n) * SIZE / (form.share * NIC_Bps)
        assert idle_seconds(operation, cluster_of(n), IDEAL) == pytest.approx(expected, rel=1e-9), n


@pytest.mark.parametrize(("op", "name"), one_in(2, FORMS))
def test_messages_one_by_one_take_as_long_and_bring_the_data(op: str, name: str) -> None:
    """Port by port as many bytes, and the same end; and at that end everybody has what the operation promises."""
    for n in (2,) if op == "send" else FEWER_N if name in POSTED else PLAYED_N:
        script = FORMS[op, name].script(n, SIZE) if op != "send" else scripts.linear(2, SIZE, "broadcast")
        operation = plan(op, SIZE, range(n), cluster_of(n), IDEAL, name)
        wires = partial(wire, share=FORMS[op, name].share)
        seconds, carried = replay.play(script, wires, posted=name in POSTED)
        assert idle_seconds(operation, cluster_of(n), IDEAL) == pytest.approx(seconds, rel=1e-9), n
        assert ports(operation, cluster_of(n)) == pytest.approx(carried, rel=1e-9), n
        assert promised(op, n, script, name)


def promised(op: str, n: int, script: Script, name: str = "") -> bool:
    """Whether everybody has what the operation promises. In a ring rank i has part i + 1 between its two halves."""
    every = frozenset(range(n))
    moved = int(name == "ring" and op in ("all_gather", "reduce_scatter"))
    owner: Callable[[Place, Part], bool] = {
        "all_gather": lambda place, part: part == (place + moved) % n,  # type: ignore[operator]
        "all_to_all": lambda place, part: part[0] == place,  # type: ignore[index]
        "gather": lambda place, part: place == part,
        "send_recv": lambda place, part: place == part,
        "broadcast": lambda place, part: place == 0,
        "scatter": lambda place, part: place == 0,
        "send": lambda place, part: place == 0,
    }.get(op, lambda place, part: place in every)
    held = replay.data(script, owner)
    parts = {part for message in script.messages for part in message.parts}
    match op:
        case "all_reduce":
            return all(held[i, part] == every for i in every for part in parts)
        case "reduce_scatter":
            return all(held[i, (i + moved) % n] == every for i in every)
        case "all_gather":
            return all(
                held[i, part] == {(part - moved) % n} for i in every for part in parts if owner(i, part) is False
            )  # type: ignore[operator]
        case "all_to_all":
            return all(held[part[1], part] == {part[0]} for part in parts)  # type: ignore[index]
        case "send_recv":
            return all(held[(i + 1) % n, i] == {i} for i in every)
        case "broadcast" | "send":
            return all(held[i, part] == {0} for i in range(1, n) for part in parts)
        case "reduce":
            return all(held[0, part] == every for part in parts)
        case "scatter":
            return all(held[i, i] == {0} for i in range(1, n))
        case _:
            return all(held[0, i] == {i} for i in range(1, n))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 17])
def test_an_uneven_all_to_all_lasts_as_long_as_its_fullest_port(n: int) -> None:
    """Of all n S bytes rank i sends the share a_i, and of each one's rank j gets the share b_j: n S a_i b_j from i to
    j. All flows end together, so that the port with most to carry decides."""
    rising, falling = range(1, n + 1), range(n, 0, -1)
    send, receive = (tuple(weight / sum(weights) for weight in weights) for weights in (rising, falling))
    (pattern,) = patterns("all_to_all", range(n), cluster_of(n), shares=ByteShares(send, receive))
    operation = fastest("all_to_all", (pattern,), SIZE, IDEAL)
    expected = {("out", i): n * SIZE * send[i] * (1 - receive[i]) for i in range(n)}
    expected |= {("in", j): n * SIZE * receive[j] * (1 - send[j]) for j in range(n)}
    assert ports(operation, cluster_of(n)) == pytest.approx(expected, rel=1e-9)
    fullest = HOP_s + max(expected.values()) / NIC_Bps
    assert idle_seconds(operation, cluster_of(n), IDEAL) == pytest.approx(fullest, rel=1e-9)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
@pytest.mark.parametrize("n", PLAYED_N)
def test_a_pipelined_chain_is_what_its_chunks_tend_to(op: str, n: int) -> None:
    """k chunks over n - 1 hops last (n - 1) latencies and (n - 2 + k) S / (k B): the fluid has latencies and S / B. The
    difference goes as 1/k, so that twice what 2 k chunks take less what k take is the fluid."""
    built = cluster_of(n)
    operation = plan(op, SIZE, range(n), built, IDEAL, "ring")
    fluid = idle_seconds(operation, built, IDEAL)
    assert fluid == pytest.approx((n - 1) * HOP_s + SIZE / NIC_Bps, rel=1e-9)
    script_of = scripts.chain_broadcast if op == "broadcast" else scripts.chain_reduce
    (few, carried), (many, _) = (replay.play(script_of(n, SIZE, k), wire) for k in (8, 16))
    assert few == pytest.approx((n - 1) * HOP_s + (n - 2 + 8) * SIZE / 8 / NIC_Bps, rel=1e-9)
    assert 2 * many - few == pytest.approx(fluid, rel=1e-9)
    assert ports(operation, built) == pytest.approx(carried, rel=1e-9)
    assert promised(op, n, script_of(n, SIZE, 4))


def of_trees(name: str, n: int) -> list[list[int]]:
    return [[of(node, n) for node in range(n)] for of in ((parent, other_parent) if name == "tree" else (parent,))]


@pytest.mark.parametrize("name", ["tree", "binary_tree"])
def test_bytes_of_a_tree(name: str) -> None:
    """Every edge of a tree carries its part of the message up and down. With two trees nobody sends more than 2 S, with
    one an inner node with two children sends 3 S."""
    for n in PLAYED_N:
        operation = plan("all_reduce", SIZE, range(n), cluster_of(n), IDEAL, name)
        script = scripts.tree_all_reduce(of_trees(name, n), SIZE, 2)
        _, carried = replay.play(script, wire)
        assert ports(operation, cluster_of(n)) == pytest.approx(carried, rel=1e-9), n
        assert max(carried.values()) <= (2 if name == "tree" else 3) * SIZE
        assert promised("all_reduce", n, script)


@pytest.mark.parametrize(("name", "n"), grid(["tree", "binary_tree"], [2, 3, 4, 5, 8, 9, 15], every=3))
def test_a_pipelined_tree_is_what_its_chunks_tend_to(name: str, n: int) -> None:
    """The fluid has the longest way up and down as latency, and what the busiest port sends at its bandwidth. k chunks
    last longer by what it takes to fill the pipeline, at most one chunk's share of the port per hop; that goes as 1/k,
    so that twice what 2 k chunks take less what k take is the fluid."""
    built, parents = cluster_of(n), of_trees(name, n)
    (phase,) = plan("all_reduce", SIZE, range(n), built, IDEAL, name).phases
    fluid = max(load for _, load in phase.loads) * phase.nbytes / NIC_Bps
    hops = phase.latency_s / HOP_s
    few = 16 if n < 10 else 8
    played = {k: replay.play_shared(scripts.tree_all_reduce(parents, SIZE, k), at_once) for k in (few, 2 * few)}
    for k, seconds in played.items():
        assert fluid < seconds <= fluid * (1 + hops / k) * (1 + 1e-9) or n == 2
    if n < 10 and (name, n) != ("binary_tree", 7):  # that one's first chunks settle slowly
        assert 2 * played[2 * few] - played[few] == pytest.approx(fluid, rel=1e-8)
    assert phase.cap_Bps == pytest.approx(EFFICIENCY * NIC_Bps)


def at_once(sender: Place, receiver: Place) -> Wire:
    """Without latency. Switches have a port of their own to and from each rank."""
    out = ("in", receiver) if isinstance(sender, tuple) else ("out", sender)
    into = ("out", sender) if isinstance(receiver, tuple) else ("in", receiver)
    return (
        (out, "switch") if isinstance(sender, tuple) else out,
        (into, "switch") if isinstance(receiver, tuple) else into,
        NIC_Bps,
        0.0,
    )


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_sum_in_the_switch_is_what_its_chunks_tend_to(n: int) -> None:
    """(1 + 1/n) S in and out of every GPU, and data that everybody has all of."""
    fluid = (1 + 1 / n) * SIZE / NIC_Bps
    played = [replay.play_shared(scripts.nvls_all_reduce(n, SIZE, k), at_once) for k in (8, 16)]
    assert fluid < played[1] < played[0]
    assert 2 * played[1] - played[0] == pytest.approx(fluid, rel=1e-9)
    assert promised("all_reduce", n, scripts.nvls_all_reduce(n, SIZE, 2))

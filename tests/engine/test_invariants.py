"""The validator that other tests trust: every rule of it refuses a timeline that breaks this one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.engine.invariants import InvariantError, Place, check
from simulator.lowering import schedule_program
from simulator.program import Program
from simulator.schedules import SCHEDULES
from simulator.step_result import StepResult
from simulator.timeline import LinkUse, SpanLabels, Timeline
from tests.support.jobs import job, play

ALL = ("posted_s", "launched_s", "start_s", "end_s")


def played(comm: float = 0.5) -> tuple[Program, Timeline]:
    """1F1B of two ranks and two micro-batches, F 1 s and B 2 s. Rank 0: F0 from 0, F1 from 1, B0 from 5, B1 from 8.
    Rank 1: F0 from 1.5, B0 from 2.5, F1 from 4.5, B1 from 5.5. With free transfers: 0, 1, 4, 7 and 1, 2, 4, 5."""
    program = schedule_program(SCHEDULES["1f1b"], 2, 2, 1, 1.0, 2.0, 1.0)
    return program, simulate(program, ideal_cluster(2, comm), Costs.ideal())


def later(timeline: Timeline, label: str, seconds: float, *columns: str) -> Timeline:
    """With these times of a step, or all of them, later by ``seconds``."""
    changed: dict[str, Any] = {name: getattr(timeline, name).copy() for name in columns or ALL}
    for column in changed.values():
        column[timeline.labels.index(label)] += seconds
    return replace(timeline, **changed)


def only(timeline: Timeline, keeps: Callable[[str], bool]) -> Timeline:
    return timeline.select_spans(np.flatnonzero([keeps(label) for label in timeline.labels]))


def again(timeline: Timeline) -> Timeline:
    """With a last span of a step that no program has."""
    labels = SpanLabels.written([*timeline.labels, "0F2"])
    return replace(timeline.select_spans(np.append(np.arange(len(timeline.labels)), 3)), labels=labels)


def swapped(timeline: Timeline) -> Timeline:
    """0RECV_B0 while 0SEND_F1 is sent (at 2 s), 1RECV_F1 while 1SEND_B0 is (at 4 s), each in time for what waits for it
    (B0 and F1, at 4 s): moments of sends and of receives are as many as before, and the same."""
    return later(later(timeline, "0RECV_B0", -2, "start_s", "end_s"), "1RECV_F1", 2, "start_s", "end_s")


def carrying(timeline: Timeline, nbytes: float, capacity_Bps: float) -> Timeline:
    links = [replace(link, nbytes=nbytes, capacity_Bps=capacity_Bps) for link in timeline.links]
    return replace(timeline, links=tuple(links))


def sending(timeline: Timeline, nbytes: float) -> Timeline:
    """Each send has ``nbytes``; what links carried stays."""
    templates = [
        replace(template, nbytes=np.array([nbytes])) if template.kinds == ("send",) else template
        for template in timeline.templates
    ]
    return replace(timeline, templates=tuple(templates))


#: What is wrong -> how a timeline becomes so, and what is said.
BREAKS: dict[str, tuple[Callable[[Timeline], Timeline], str]] = {
    "a step is missing": (lambda t: only(t, lambda label: label != "1B1"), "step 1B1 did not run"),
    "a transfer is missing": (lambda t: only(t, lambda label: label != "0SEND_F1"), "step 0SEND_F1 did not run"),
    "a step too many": (again, "17 steps ran, the program has 16"),
    "out of its lane's order": (lambda t: later(t, "0F1", -0.5), "0F1 began before the one before it ended"),
    "before what it waits for": (lambda t: later(t, "0SEND_F0", -0.5), "0SEND_F0 began before 0F0 had ended"),
    "before time 0": (lambda t: later(t, "0F0", -0.5, "start_s", "end_s"), "starts before time 0"),
    "ends before it starts": (lambda t: later(t, "0SEND_F0", 0.75, "start_s"), "ends before it starts"),
    # Its lane comes to a step when it may begin; that it does begin then is of rows.
    "two at once on a lane": (lambda t: later(t, "0F1", -0.5, "start_s"), "overlaps the one before it"),
    "launched before its turn": (lambda t: later(t, "0F1", -0.5, "launched_s"), "launched before its lane came to it"),
    "begun before launched": (lambda t: later(t, "0B1", 0.5, "launched_s"), "started before it was launched"),
    "too fast": (lambda t: later(t, "0B1", -0.5, "end_s"), "faster than its work at full speed"),
    "ends apart": (lambda t: later(t, "0RECV_B1", -0.25, "start_s"), "rank 1 to rank 0, .*differ in time"),
    "more than a link can": (lambda t: carrying(t, 100.0, 10.0), "carried more than its capacity"),
    "bytes lost": (lambda t: sending(t, 8.0), "GPUs sent 32 bytes, their links carried 0"),
}


def test_what_was_played_is_possible() -> None:
    """So is a link that is full whenever anything is in flight: 2 s, for two transfers go each way and none meet."""
    check(*played())
    program, timeline = played()
    check(program, sending(carrying(timeline, 20.0, 10.0), 8.0))


@pytest.mark.parametrize("what", BREAKS)
def test_what_cannot_have_happened_is_refused(what: str) -> None:
    program, timeline = played()
    broken, words = BREAKS[what]
    with pytest.raises(InvariantError, match=words):
        check(program, broken(timeline))


def test_ends_of_a_transfer_are_told_by_whose_they_are() -> None:
    program, timeline = played(comm=0.0)
    check(program, timeline)
    with pytest.raises(InvariantError, match="differ in time"):
        check(program, swapped(timeline))


def test_folded_ranks_stand_for_the_peers_of_others() -> None:
    """Two pipelines side by side are simulated as one, whose transfers have both ends all the same."""
    one, _ = played()
    twice = Program(one.roles, (0, 1, 0, 1), {"pp": ((0, 1), (2, 3))})
    folded = simulate(twice, ideal_cluster(4, 0.5), Costs.ideal())
    assert folded.ranks_like == {0: 2, 1: 2}
    check(twice, folded)
    with pytest.raises(InvariantError, match="differ in time"):
        check(twice, later(folded, "0RECV_B1", -0.25, "start_s"))


# Bytes of links, against the routes of all transfers


@pytest.fixture(scope="module", params=[True, False], ids=["folded", "every rank"])
def result(request: pytest.FixtureRequest) -> StepResult:
    """A pipeline of two stages of two tensor-parallel ranks, twice, on two nodes of four GPUs."""
    layout = {"tp": 2, "pp": 2, "dp": 2}
    cluster = {"name": "dgx_a100", "nodes": 2, "overrides": [{"gpu": "node*.gpu7", "missing": True}]}
    return play(job(model__layers=2) | {"parallelism": layout, "cluster": cluster}, fold=request.param)


def altered(result: StepResult, change: Callable[[list[LinkUse]], Sequence[LinkUse]]) -> Timeline:
    return replace(result.played, links=tuple(change(list(result.played.links))))


def more(links: list[LinkUse], at: int, nbytes: float) -> list[LinkUse]:
    return [replace(link, nbytes=link.nbytes + nbytes) if i == at else link for i, link in enumerate(links)]


def test_links_carried_to_the_byte_what_was_sent(result: StepResult) -> None:
    check(result.program, result.played, Place(result.placed, result.cluster))


def firsts_of_kinds(links: Sequence[LinkUse]) -> list[tuple[int, LinkUse]]:
    """Return the first link of each kind, with its place."""
    first: dict[str, tuple[int, LinkUse]] = {}
    for at, link in enumerate(links):
        first.setdefault(link.kind, (at, link))
    return list(first.values())


@pytest.mark.parametrize("nbytes", [1.0, -1.0])
def test_a_link_off_by_one_byte_is_refused(result: StepResult, nbytes: float) -> None:
    place = Place(result.placed, result.cluster)
    for at, link in firsts_of_kinds(result.played.links):
        broken = altered(result, lambda links, at=at: more(links, at, nbytes))
        with pytest.raises(InvariantError, match=f"link {re.escape(link.name)} carried"):
            check(result.program, broken, place)


def test_links_that_carry_a_fifth_more_are_refused(result: StepResult) -> None:
    broken = altered(result, lambda links: [replace(link, nbytes=1.2 * link.nbytes) for link in links])
    with pytest.raises(InvariantError, match="were sent"):
        check(result.program, broken, Place(result.placed, result.cluster))


def test_a_link_that_is_left_out_is_refused(result: StepResult) -> None:
    broken = altered(result, lambda links: links[1:])
    with pytest.raises(InvariantError, match=r"links of kind .* were sent"):
        check(result.program, broken, Place(result.placed, result.cluster))


def test_a_class_with_one_link_too_many_is_refused(result: StepResult) -> None:
    broken = altered(result, lambda links: [replace(links[0], count=links[0].count + 1), *links[1:]])
    with pytest.raises(InvariantError, match=r"links of kind .* were sent"):
        check(result.program, broken, Place(result.placed, result.cluster))

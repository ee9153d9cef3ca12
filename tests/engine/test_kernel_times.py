"""Times of ops that were worked out once and shifted are those of playing the ops one after another."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from simulator.arrays import Floats
from simulator.engine.kernel_times import KernelTimes, PacedTemplate, joined_times
from simulator.timeline import Template


def template(random: Random, ops: int) -> Template:
    zeros, names = np.zeros(ops), ("op",) * ops
    work, issue = ([random.uniform(0.1, 2.0) for _ in range(ops)] for _ in range(2))
    return Template(names, names, names, names, zeros.astype(int), np.array(work), np.cumsum(issue), zeros, zeros)


def followed(
    paced: PacedTemplate, host_s: float, first: int, left_s: float | None, now: float
) -> list[tuple[float, float]]:
    """Each op begins when the one before it has ended and the host has launched it; the first may have begun before."""
    times = []
    for op in range(first, len(paced.template)):
        resumed = op == first and left_s is not None
        begin = now if resumed else max(now, host_s + float(paced.template.launched_s[op]))
        work = left_s if resumed and left_s is not None else float(paced.template.work_s[op])
        now = begin + work / paced.speed[op]
        times.append((begin, now))
    return times


@pytest.mark.parametrize("seed", range(40))
def test_times_are_those_of_playing_op_by_op(seed: int) -> None:
    """Whole or resumed, with hosts far ahead (-30 s), about as fast as the GPU, and late."""
    random = Random(seed)
    of = template(random, random.randint(1, 9))
    paced = PacedTemplate.from_speeds(of, np.array([random.uniform(0.3, 1.0) for _ in of.names]))
    first, host_s = random.randrange(len(of)), random.choice([-30.0, -4.0, 0.0, 5.0])
    launched = host_s + float(of.launched_s[first]) <= 3.0
    left_s = random.choice([None, 0.4 * float(of.work_s[first])]) if launched else None
    times = paced.times(host_s, first, left_s, 3.0)
    expected = followed(paced, host_s, first, left_s, 3.0)
    ends = [times.at_s + times.end[op] for op in range(first, len(of))]
    assert ends == pytest.approx([end for _, end in expected])
    later = slice(first + times.resumed, None)
    starts = [times.at_s + start for start in times.start[later]]
    assert starts == pytest.approx([start for start, _ in expected[times.resumed :]])
    for nth, end in enumerate(ends):
        assert times.op_at(end + 1e-6) == first + nth + 1


def test_an_op_whose_speed_changes_keeps_its_start() -> None:
    """Ops of 2 and 1 s at full speed from 0 on; at 1 s speed falls to a half: the 1 s left of the first takes 2."""
    of = Template(("a", "b"), *[("", "")] * 3, np.zeros(2, int), np.array([2.0, 1.0]), *[np.zeros(2)] * 3)
    fast, slow = PacedTemplate.from_speeds(of, np.ones(2)), PacedTemplate.from_speeds(of, np.full(2, 0.5))
    history: list[KernelTimes] = [fast.times(0.0, 0, None, 0.0), slow.times(0.0, 0, 1.0, 1.0)]
    joined: tuple[Floats, Floats] = joined_times(history)
    assert [column.tolist() for column in joined] == [[0.0, 3.0], [3.0, 5.0]]

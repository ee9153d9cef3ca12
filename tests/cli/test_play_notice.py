"""The notice of a simulation that takes long: what it says, and when."""

from __future__ import annotations

import pytest

from simulator.cli import play_notice
from simulator.cli.play_notice import PlayNotice, simulating
from simulator.engine.progress import tell


def told(moments: list[tuple[float, float]]) -> tuple[list[str], list[str]]:
    """What is said of shares at seconds: on a terminal as it goes on, and in lines."""
    far: list[str] = []
    lines: list[str] = []
    seconds = iter([moment for moment, _ in moments])
    notice = PlayNotice(far.append, lines.append, lambda: next(seconds))
    for _, share in moments:
        notice(share)
    return far, lines


def test_a_long_play_is_told_of_after_three_seconds_and_then_once_a_minute() -> None:
    """At 4 s a tenth has ended since the first word: 1 / 40 a second, so that 0.8 takes 32 s, and 36 s are long.

    At 50 s the next minute is not over. At 70 s half has ended since the first word: 1 / 140 a second, and 0.4 left.
    """
    far, lines = told([(0.0, 0.1), (2.0, 0.15), (4.0, 0.2), (50.0, 0.5), (70.0, 0.6)])
    assert lines == [
        "simulated 20 % of the step, about 32 s left",
        "simulated 60 % of the step, about 56 s left",
    ]
    assert far[0] == "simulated 15 % of the step, about 34 s left"
    assert len(far) == 4


def test_a_play_of_less_than_half_a_minute_is_shown_on_a_terminal_alone() -> None:
    """A tenth in 2.9 s is 29 s in all."""
    far, lines = told([(0.0, 0.0), (2.9, 0.1), (3.0, 0.12), (29.0, 1.0)])
    assert len(far) == 3
    assert lines == []


def test_every_play_is_judged_by_its_own_speed() -> None:
    """The second play of a step, at other clocks, begins at 41 s: a fifth of it takes 4 s, and 0.7 of it are left."""
    far, lines = told([(0.0, 0.0), (20.0, 0.5), (40.0, 1.0), (41.0, 0.1), (45.0, 0.3)])
    assert lines == ["simulated 50 % of the step, about 20 s left"]
    assert far[-1] == "simulated 30 % of the step, about 14 s left"


def test_a_play_that_is_over_at_once_is_no_word_worth() -> None:
    """Plays that end before the first word about them, each at its end; the second after a minute."""
    assert told([(1e6, 1.0), (1e6 + 60.0, 1.0)])[1] == []


def test_who_looks_at_no_terminal_reads_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hundredth of the play a second takes 100 s, of which 96 are left after four."""
    seconds = iter([0.0, 4.0])
    monkeypatch.setattr(play_notice.time, "monotonic", lambda: next(seconds))
    with simulating("a job"):
        tell(0, 100)
        tell(4, 100)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a job: simulated 4 % of the step, about 96 s left\n")

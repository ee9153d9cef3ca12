"""The table of axes, and the words that programs are written in."""

from __future__ import annotations

import pytest

from simulator.program import AXES, HOST_LANES, REPLICAS, Axis, HostKind, axis_of, undivided
from simulator.program.validation import COMM_TYPES
from simulator.program.vocabulary import CollectiveKind, PointToPointKind, RecordedKind


def test_every_word_has_its_entry() -> None:
    assert list(AXES) == list(Axis)
    assert list(HOST_LANES) == list(HostKind)
    assert list(COMM_TYPES) == [*CollectiveKind, *PointToPointKind, *HostKind, *RecordedKind]


def test_parts_of_an_axis_serve_what_the_whole_serves() -> None:
    """Shards and replicas of dp are groups of dp's own members, so that they have no purpose that dp has not."""
    parts = {axis: facts for axis, facts in AXES.items() if facts.whole is not None}
    assert set(parts) >= {axis for axes in REPLICAS.values() for axis in (axes.shard, axes.replica)}
    for facts in parts.values():
        assert set(facts.purposes) <= set(AXES[facts.whole].purposes)


@pytest.mark.parametrize("axis", [axis for axis in Axis if not AXES[axis].numbered])
def test_an_axis_has_its_own_name(axis: Axis) -> None:
    assert axis_of(axis.value) is axis
    with pytest.raises(KeyError):
        axis_of(f"{axis}0")


@pytest.mark.parametrize(("name", "axis"), [("copies0", Axis.COPIES), ("copies12", Axis.COPIES)])
def test_numbered_axes_are_called_by_number(name: str, axis: Axis) -> None:
    assert axis_of(name) is axis
    assert undivided(name) is Axis.EP


@pytest.mark.parametrize("name", ["", "copies", "copies1x", "3", "dpp", "dp_", "tp "])
def test_other_names_are_no_axis(name: str) -> None:
    with pytest.raises(KeyError):
        axis_of(name)

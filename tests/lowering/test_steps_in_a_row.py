"""Steps in a row: how their passes are numbered, and what waits for the step before."""

from __future__ import annotations

import pytest

from simulator.lowering.lanes import Lanes
from simulator.lowering.steps_in_a_row import repeated, rolling
from simulator.program import Step
from tests.support.lanes import read, waits, write
from tests.support.passes import lines

#: A step of two micro-batches, whose gradients are reduced before the update. Parameters are gathered after it, and
#: something that waits for nothing is gathered beside.
STEP = """
  lane compute
    step 0F0 block=0 phase=F microbatch=0 stage=0
    step 0F1 block=0 phase=F microbatch=1 stage=0
    step 0B0 block=0 phase=B microbatch=0 stage=0
    step 0B1 block=0 phase=B microbatch=1 stage=0
    step optimizer after=reduce block=0 phase=O
  lane dp
    step reduce after=0B1
      comm "dp.all_reduce grads" all_reduce nbytes=1024 axis=dp purpose=dp
    step gather after=optimizer
      comm "dp.all_gather parameters" all_gather nbytes=1024 axis=dp purpose=dp
    step beside
      comm "dp.all_gather beside" all_gather nbytes=1024 axis=dp purpose=dp
"""


def test_one_step_is_as_it_was() -> None:
    lanes = read(STEP)
    assert write(repeated(lanes, 1, 2), places=True) == write(lanes, places=True)


def test_micro_batches_are_numbered_through_and_steps_wait_for_what_closes_the_last() -> None:
    """The second of three steps of two micro-batches has numbers 2 and 3, the third 4 and 5. An update has none. A
    step's first pass waits for all that follows the update before: the gather. What waits for nothing in its own step
    begins behind the last update."""
    after_last = {"gather": "optimizer", "beside": "optimizer"}
    lanes = repeated(read(STEP), 3, 2)
    places = [(step.label, step.microbatch) for step in lanes["compute"]]
    passes = ("0F0", 0), ("0F1", 1), ("0B0", 0), ("0B1", 1)
    expected = [(name, number) for name, number in passes] + [("optimizer", -1)]
    for step in (1, 2):
        expected += [(f"{name}@{step}", number + 2 * step) for name, number in passes] + [(f"optimizer@{step}", -1)]
    assert places == expected
    assert {label: after for label, after in waits(lanes).items() if after} == {
        "optimizer": ("reduce",),
        "0F0@1": ("gather",),
        "optimizer@1": ("reduce@1",),
        "0F0@2": ("gather@1",),
        "optimizer@2": ("reduce@2",),
    }
    assert waits(lanes, "dp") == {
        "reduce": ("0B1",),
        "gather": (after_last["gather"],),
        "beside": (),
        "reduce@1": ("0B1@1",),
        "gather@1": ("optimizer@1",),
        "beside@1": (after_last["beside"],),
        "reduce@2": ("0B1@2",),
        "gather@2": ("optimizer@2",),
        "beside@2": ("optimizer@1",),
    }


def with_update(passes: Lanes) -> Lanes:
    """Add a reduction behind the last pass, and the update that waits for it."""
    rest = read(STEP)
    last = passes["compute"][-1].label
    update = rest["compute"][-1]
    reduction = rest["dp"][0]
    reduced = Step(reduction.label, reduction.op, (last,))
    gathered = rest["dp"][1]
    return {"compute": [*passes["compute"], update], "dp": [reduced, gathered]}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_steps_that_run_on_have_their_updates_between_passes(steps: int) -> None:
    """1F1B's second of two ranks, whose passes of a step end before those of the next begin, and its first, which runs
    a forward pass ahead. An update stands behind the last backward pass of its step, and the pass behind it waits for
    the gather. Passes keep their numbers."""
    count = 2 * steps
    first = [("F", 0), *(pair for n in range(1, count) for pair in (("F", n), ("B", n - 1))), ("B", count - 1)]
    last = [(kind, n) for n in range(count) for kind in "FB"]
    for order in (first, last):
        text = "".join(f"    step 0{kind}{n} block=0 phase={kind} microbatch={n} stage=0\n" for kind, n in order)
        lanes = rolling(read(f"  lane compute\n{text}"), steps, 2, with_update)
        names = [f"0{kind}{n}" for kind, n in order]
        expected, after = [], {}
        for name in names:
            if expected and expected[-1].startswith("optimizer"):
                after[name] = (expected[-1].replace("optimizer", "gather"),)
            expected.append(name)
            step, odd = divmod(int(name[2:]), 2)
            if name[1] == "B" and odd:
                number = f"@{step}" if step else ""
                expected.append(f"optimizer{number}")
                after[f"optimizer{number}"] = (f"reduce{number}",)
        assert [step.label for step in lanes["compute"]] == expected
        assert {label: behind for label, behind in waits(lanes).items() if behind} == after
        assert [step.microbatch for step in lanes["compute"] if step.phase != "O"] == [n for _, n in order]
        reductions = [label for label in waits(lanes, "dp") if label.startswith("reduce")]
        assert [waits(lanes, "dp")[label] for label in reductions] == [(f"0B{2 * n + 1}",) for n in range(steps)]
        assert len(lines(write({"dp": lanes["dp"]}))) == 1 + 4 * steps

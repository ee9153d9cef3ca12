"""Steps in a row: how their passes are numbered, and what waits for the step before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simulator.cluster import build_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.lowering import build_program
from simulator.lowering.lanes import Lanes
from simulator.lowering.steps_in_a_row import repeated, rolling
from simulator.program import Step
from tests.support import quick
from tests.support.lanes import read, waits, write
from tests.support.passes import lines
from tests.support.sharded import load

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
        "gather": ("optimizer",),
        "beside": (),
        "reduce@1": ("0B1@1",),
        "gather@1": ("optimizer@1",),
        "beside@1": ("optimizer",),
        "reduce@2": ("0B1@2",),
        "gather@2": ("optimizer@2",),
        "beside@2": ("optimizer@1",),
    }


def test_what_waits_for_nothing_begins_once_the_host_has_sent_the_parameters() -> None:
    """The CPU updates in two shares. A gather of the next step needs both on the GPU, but not their states on drives.
    The first pass of that step waits for all that follows the last backward pass."""
    lanes = read(
        """
        lane compute
          step 0F0 block=0 phase=F microbatch=0 stage=0
          step 0B0 block=0 phase=B microbatch=0 stage=0
        lane cpu
          step "update 0" after=0B0
            comm offload.adam host_update nbytes=8 axis=rank purpose=optimizer
          step "update 1" after=0B0
            comm offload.adam host_update nbytes=8 axis=rank purpose=optimizer
        lane nvme_write
          step "states out 0" after="update 0"
            comm "offload.write states" to_nvme nbytes=8 axis=rank purpose=offload
        lane h2d_params
          step "params in 0" after="update 0"
            comm "offload.params to GPU" from_host nbytes=2 axis=rank purpose=offload stream=params
          step "params in 1" after="update 1"
            comm "offload.params to GPU" from_host nbytes=2 axis=rank purpose=offload stream=params
        lane dp
          step gather
            comm "dp.all_gather params" all_gather nbytes=4 axis=dp purpose=dp
        """
    )
    row = repeated(lanes, 3, 1)
    assert waits(row, "dp") == {
        "gather": (),
        "gather@1": ("params in 0", "params in 1"),
        "gather@2": ("params in 0@1", "params in 1@1"),
    }
    assert waits(row)["0F0@1"] == ("update 0", "update 1", "states out 0", "params in 0", "params in 1")


@pytest.mark.parametrize(
    ("zero", "offload", "puts"),
    [
        (1, {"optimizer": "cpu"}, "params in "),
        (2, {"optimizer": "cpu"}, "params in "),
        (3, {"optimizer": "cpu"}, "params in "),
        (3, {"optimizer": "cpu", "parameters": "cpu"}, "update "),
        (3, {"parameters": "cpu"}, "params out"),
        (3, {"parameters": "none"}, "optimizer"),
    ],
)
def test_no_step_reads_parameters_before_they_are_where_they_live(
    zero: int, offload: dict[str, Any], puts: str
) -> None:
    """The second of two steps, as played: its first gather, or copy of a shard, begins when the last shard is there."""
    workload = load(dp=4, zero=zero, offload=offload)
    program = build_program(workload, steps=2)
    spans = simulate(program, build_cluster(workload.cluster), Costs.from_profile(quick.PROFILE))
    labels = list(spans.labels)
    first = np.array([label.startswith(puts) and not label.endswith("@1") for label in labels])
    second = np.array([label.startswith("gather ") and label.endswith("@1") for label in labels])
    assert spans.start_s[second].min() >= spans.end_s[first].max()


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

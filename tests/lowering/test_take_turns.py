"""NCCL runs the collectives of one communicator one after another, whatever streams they are called on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from simulator.lowering.passes.take_turns import take_turns
from simulator.program import Block, Comm, Compute, Fixed, HostOperation, PointToPoint, Step
from tests.support import quick
from tests.support.frameworks import MEGATRON, PYTORCH
from tests.support.grids import grid
from tests.support.jobs import job
from tests.support.lanes import lanes_of, rank
from tests.support.programs import comm_called


def called(label: str, op: str, *after: str, axis: str = "dp", stream: str = "") -> Step:
    return Step(label, comm_called(label, op, 1e6, axis, "dp", stream=stream), after)


def test_who_waits_for_whom() -> None:
    """Passes p0 to p2. r0 is issued behind p0, g2 behind p0 too, which comes after; r1 behind p1, r2 behind p2, with g2
    before both; g0 and g1 follow on nothing. x is on another communicator, and waits for none of them."""
    work = Block("work", (Compute("work", Fixed(1.0), "B"),))
    lanes = lanes_of(
        {
            "compute": [Step(f"p{i}", work, (f"g{i}",), phase="B") for i in range(3)],
            "dp": [called(f"r{i}", "reduce_scatter", f"p{i}") for i in range(3)],
            "dp_gather": [
                called(f"g{i}", "all_gather", *after, stream="gather") for i, after in enumerate(([], [], ["p0"]))
            ],
            "other": [called("x", "all_reduce", "p0", axis="edp")],
        }
    )
    waits = {step.label: step.after for steps in take_turns(lanes, rank()).values() for step in steps}
    assert waits == {
        **{f"p{i}": (f"g{i}",) for i in range(3)},
        **{"g0": (), "g1": (), "r0": ("p0", "g1"), "g2": ("p0", "r0"), "r1": ("p1", "g2"), "r2": ("p2",)},
        "x": ("p0",),
    }


def test_lanes_of_different_communicators_are_left_as_they_are() -> None:
    """One lane has two reductions of an axis, another lane one of another axis: nobody waits for anybody."""
    work = Block("work", (Compute("work", Fixed(1.0), "B"),))
    lanes = lanes_of(
        {
            "compute": [Step("p", work, phase="B")],
            "dp": [called("r0", "reduce_scatter", "p"), called("r1", "reduce_scatter", "p")],
            "other": [called("x", "all_reduce", "p", axis="edp")],
        }
    )
    assert take_turns(lanes, rank()) is lanes


def test_what_waits_by_way_of_another_lane_is_issued_behind_it() -> None:
    """The optimizer on the host: the gather waits for what is copied there after the reduction, and comes after it."""
    work = Block("work", (Compute("work", Fixed(1.0), "B"),))
    lanes = lanes_of(
        {
            "compute": [Step(f"p{i}", work, phase="B") for i in range(3)],
            "dp_gather": [called("g", "all_gather", "copied", stream="gather")],
            "h2d": [Step("copied", HostOperation("copied", "from_host", 1e6, "rank", "offload"), ("r",))],
            "dp": [called("r", "reduce_scatter", "p2")],
        }
    )
    waits = {step.label: step.after for steps in take_turns(lanes, rank()).values() for step in steps}
    assert waits["r"] == ("p2",)
    assert waits["g"] == ("copied", "r")


@pytest.mark.parametrize(
    ("section", "framework"),
    grid(
        [
            {"dp": 8, "zero": 1, "overlap": {"grad_reduce": True, "param_gather": True}},
            {"dp": 8, "zero": 3},
            {"dp": 8, "zero": 3, "prefetch": 2},
            {"dp": 4, "zero": 3, "hsdp": 2},
            {"dp": 4, "pp": 2, "zero": 3, "schedule": "interleaved_zb", "vpp": 2},
            {"dp": 4, "tp": 2, "zero": 3},
            {"dp": 8, "zero": 3, "grad_compression": "int8"},
        ],
        [MEGATRON, PYTORCH],
        every=2,
    ),
)
def test_what_one_communicator_does_never_overlaps(section: dict[str, Any], framework: str) -> None:
    layout = {"bucket_bytes": 400_000, **section}  # several buckets
    result = quick.play(quick.load(job(framework=framework) | {"parallelism": layout}))
    timeline = result.spans
    role = result.program.roles[0]
    axis = {
        step.label: step.op.axis
        for lane, _, step in role.steps()
        if lane != "compute" and isinstance(step.op, Comm) and not isinstance(step.op, PointToPoint)
    }
    seen: dict[str, list[tuple[float, float]]] = {}
    for span in (timeline.rank == 0).nonzero()[0]:
        label = timeline.labels[span]
        if label in axis:
            seen.setdefault(axis[label], []).append((timeline.start_s[span], timeline.end_s[span]))
    assert sum(len(set(spans)) for spans in seen.values()) >= len(axis) > 2
    for spans in seen.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(ordered))

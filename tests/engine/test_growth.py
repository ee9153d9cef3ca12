"""Programs that are extended while the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from simulator.api import cluster_of
from simulator.config import load_workload
from simulator.config.profile import load_profiles
from simulator.costs import Costs
from simulator.engine import Placed, PlayedProgram, StepSource, play_together, simulate
from simulator.engine.invariants import Place, check
from simulator.engine.issue_order import EarlierCompute, HostSpeeds, host_work
from simulator.lowering import build_program
from simulator.program import (
    Extension,
    PointToPoint,
    PointToPointKind,
    Program,
    Purpose,
    Role,
    Step,
    StepPhase,
)
from tests.support.clusters import HOP_s, NIC_Bps
from tests.support.engines import ENGINES, each_engine  # noqa: F401
from tests.support.growing import PieceOf, assert_same, by_start, by_step, cut, in_order
from tests.support.grown_programs import IDEAL, REDUCTION, B, F, grow, kernel, one_role, spans
from tests.support.jobs import job

pytestmark = pytest.mark.usefixtures("each_engine")

# A program in one piece, and the same program piece by piece.

WIDE = {"layers": 2, "hidden": 8192, "heads": 64, "vocab": 32000}

SLOW = [pytest.mark.slow]
SHORT = {"seq": 128, "global_batch": 8}

JOBS: dict[str, dict[str, Any]] = {
    "1f1b": {"parallelism": {"tp": 2, "dp": 2, "pp": 2, "schedule": "1f1b", "zero": 1}},
    "blocking": {"parallelism": {"tp": 2, "dp": 2, "pp": 2, "schedule": "1f1b", "overlap": {"p2p": False}}},
    "interleaved": {"parallelism": {"tp": 2, "dp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved", "zero": 1}},
    "zb_h1": {"parallelism": {"pp": 4, "dp": 2, "schedule": "zb_h1"}},
    "zero3": {"parallelism": {"dp": 4, "zero": 3}, "framework": "pytorch"},
    "power": {
        "parallelism": {"dp": 2, "pp": 2, "schedule": "1f1b"},
        "model": WIDE,
        "training": {"seq": 4096, "global_batch": 8, "precision": "bf16"},
        "cluster": "dgx_h200",
    },
}


def compare(
    name: str, piece_of: Callable[[Program, Placed], PieceOf], fold: bool, coalesce: bool, launch: bool
) -> tuple[PlayedProgram, PlayedProgram]:
    """Play three steps of a job in one piece, and cut into pieces; return both after they were compared."""
    sections = {"training": {**SHORT, "precision": "bf16"}, **JOBS[name]}
    workload = load_workload(job(**sections))
    cluster, profiles = cluster_of(workload), load_profiles(workload.calibrations, workload.training)
    costs = Costs.from_profiles(profiles, workload.software, None)
    costs = costs if launch else replace(costs, launch={})
    program = build_program(workload, steps=3)
    placed = Placed.on(program, costs, cluster)
    beginning, extensions = cut(program, piece_of(program, placed))
    shortcuts = {"fold": fold, "coalesce": coalesce}
    (whole,) = play_together([placed], cluster, **shortcuts)
    (grown,) = play_together([replace(placed, program=beginning, more=in_order(extensions))], cluster, **shortcuts)
    assert len(extensions) > 1
    assert [role.lanes for role in grown.program.roles] == [role.lanes for role in program.roles]
    check(grown.program, grown.timeline, Place(replace(placed, program=grown.program), cluster))
    assert_same(whole.timeline, grown.timeline)
    if name == "power":
        # Products draw more than the limit at the highest clock.
        assert all(hz < 1.98e9 for hz in grown.timeline.clocks_hz.values())
    return whole, grown


def in_turn(choices: Sequence[Any]) -> list[Any]:
    """Return the product of engines, jobs and choices; `make test` has each job once, with an engine and a choice."""
    return [
        pytest.param(engine, name, choice, marks=[] if (i % len(ENGINES), i // 2 % len(choices)) == (e, c) else SLOW)
        for (e, engine), (i, name), (c, choice) in product(enumerate(ENGINES), enumerate(JOBS), enumerate(choices))
    ]


@pytest.mark.parametrize(("each_engine", "name", "shortcuts"), in_turn([True, False]), indirect=["each_engine"])
def test_steps_that_come_one_after_another_are_those_of_a_program_in_one_piece(name: str, shortcuts: bool) -> None:
    """Training steps that hosts know of from the beginning: they run ahead into each as into one long program."""
    whole, grown = compare(name, lambda program, placed: by_step, shortcuts, shortcuts, launch=True)
    # An event to ask for an extension, and one for each lane that has waited: what could be coalesced still is.
    assert grown.timeline.events <= 1.02 * whole.timeline.events


@pytest.mark.parametrize(
    ("each_engine", "name", "shortcuts"),
    in_turn([(True, True), (True, False), (False, True)]),
    indirect=["each_engine"],
)
def test_wherever_a_program_is_cut_it_is_the_same(name: str, shortcuts: tuple[bool, bool]) -> None:
    """Cut in eleven at equal times, through passes and steps: without the time of hosts nothing tells the pieces.

    The kernels of the beginning are no longer those of the whole, from which a power limit's first clocks follow.
    """

    def piece_of(program: Program, placed: Placed) -> PieceOf:
        return by_start(program, simulate(program, cluster_of_job(name), placed.costs), 11)

    compare(name, piece_of, *shortcuts, launch=False)


def cluster_of_job(name: str) -> Any:
    return cluster_of(load_workload(job(**JOBS[name])))


def test_ranks_of_a_role_fold_as_they_grow() -> None:
    """Eight ranks that reduce together in every extension are alike: one of them is simulated."""
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": ()}, 8, dp=(REDUCTION,))
    extensions = [Extension({0: {"dp": (Step(f"r{n}", REDUCTION),)}}) for n in range(3)]
    folded = grow(beginning, in_order(extensions))
    assert folded.timeline.ranks_like == {0: 8}
    assert_same_ends(folded, grow(beginning, in_order(extensions), fold=False))


def assert_same_ends(first: PlayedProgram, second: PlayedProgram) -> None:
    for rank in range(first.program.n_ranks):
        first_spans, second_spans = (dict(sorted(spans(played, rank).items())) for played in (first, second))
        assert list(first_spans) == list(second_spans)
        assert np.array(list(first_spans.values())) == pytest.approx(np.array(list(second_spans.values())), rel=1e-9)


# Sources that look at the clock.


def test_requests_are_batched_as_they_arrive() -> None:
    """An iteration takes 1 s and 0.5 s a request; those that have arrived when it ends go together into the next.

    The request of 0 s is alone: it ends at 1.5 s. Those of 0.5 s and 1.5 s are there then, and take 2 s, to 3.5 s. The
    next arrives at 10 s, and is done at 11.5 s.
    """
    asked_s: list[float] = []

    def more() -> StepSource:
        arrivals = [0.0, 0.5, 1.5, 10.0]

        def source(now_s: float) -> Extension | None:
            asked_s.append(now_s)
            waiting = [arrival for arrival in arrivals if arrival <= now_s]
            del arrivals[: len(waiting)]
            if waiting:
                return Extension({0: {"compute": (kernel(f"{now_s:g}", 1 + len(waiting) / 2),)}}, now_s)
            return Extension({}, arrivals[0]) if arrivals else None

        return source

    played = grow(one_role({"compute": ()}), more)
    assert spans(played) == {"0": (0.0, 1.5), "1.5": (1.5, 3.5), "10": (10.0, 11.5)}
    assert asked_s == [0.0, 1.5, 3.5, 10.0, 11.5]


def test_nothing_begins_before_its_release() -> None:
    """The first kernel ends at 1 s. The next is released at 4 s, one behind it at 2 s, when that has long begun."""
    extensions = [
        Extension({0: {"compute": (kernel(name, 1.0),)}}, release_s) for name, release_s in (("b", 4), ("c", 2))
    ]
    played = grow(one_role({"compute": (kernel("a", 1.0),)}), in_order(extensions))
    assert spans(played) == {"a": (0.0, 1.0), "b": (4.0, 5.0), "c": (5.0, 6.0)}


def test_a_pipeline_takes_the_next_micro_batch_when_its_first_stage_is_free() -> None:
    """Stage 0 takes 1 s a micro-batch, stage 1 takes 2 s, and a micro-batch of 1e9 bytes takes x = a hop and 1 s.

    The first lane to run dry is always stage 0's compute lane: at 1, 2, 3 and 4 s. Stage 1 begins at 1 + x and never
    waits again, as transfers, which follow each other at 1 s, are faster than it.
    """
    asked_s: list[float] = []
    send, recv = (
        PointToPoint("fwd", kind, 1e9, "pp", Purpose.PIPELINE, peer)
        for kind, peer in ((PointToPointKind.SEND, 1), (PointToPointKind.RECV, 0))
    )

    def lanes(n: int) -> dict[int, dict[str, tuple[Step, ...]]]:
        return {
            0: {"compute": (kernel(f"0F{n}", 1.0),), "pp": (Step(f"send{n}", send, (f"0F{n}",)),)},
            1: {"pp": (Step(f"recv{n}", recv),), "compute": (kernel(f"1F{n}", 2.0, f"recv{n}"),)},
        }

    def more() -> StepSource:
        def source(now_s: float) -> Extension | None:
            asked_s.append(now_s)
            return Extension(lanes(len(asked_s))) if len(asked_s) < 4 else None

        return source

    beginning = Program(
        tuple(Role(f"stage{role}", lanes_of_role) for role, lanes_of_role in lanes(0).items()),
        (0, 1),
        {"pp": ((0, 1),)},
    )
    played = grow(beginning, more)
    assert asked_s == [1.0, 2.0, 3.0, 4.0]
    x = HOP_s + 1e9 / NIC_Bps
    assert played.timeline.length_s == pytest.approx(1 + x + 4 * 2, rel=1e-9)


# Hosts.

LAUNCHED = replace(IDEAL, launch={"forward_other": 0.25, "bucket": 2.0})


@pytest.mark.parametrize(("release_s", "begins_s"), [(0.0, 1.25), (1.25, 1.5), (3.0, 3.25)])
def test_hosts_run_ahead_into_what_they_know(release_s: float, begins_s: float) -> None:
    """Kernels take 1 s, and their hosts 0.25 s to issue one: the first runs from 0.25 to 1.25 s.

    What is released at 0 has been issued by 0.5 s. What is released as it is asked for, or later, is issued after that.
    """
    extension = Extension({0: {"compute": (kernel("b", 1.0),)}}, release_s)
    played = grow(one_role({"compute": (kernel("a", 1.0),)}), in_order([extension]), LAUNCHED)
    assert spans(played) == {"a": (0.25, 1.25), "b": (begins_s, begins_s + 1)}


@pytest.mark.parametrize(("release_s", "begins_s"), [(0.0, 2.25), (1.25, 3.25)])
def test_hosts_issue_communication_that_comes_without_computation(release_s: float, begins_s: float) -> None:
    """A kernel is issued by 0.25 s, and ends at 1.25 s. Issuing the reduction behind it takes 2 s from then, or from
    its release."""
    beginning = one_role({"dp": (), "compute": (kernel("a", 1.0),)}, 2, dp=(REDUCTION,))
    extension = Extension({0: {"dp": (Step("r", REDUCTION, ("a",)),)}}, release_s)
    played = grow(beginning, in_order([extension]), LAUNCHED)
    assert spans(played)["r"][0] == pytest.approx(begins_s, rel=1e-12)


@pytest.mark.parametrize(("phase", "issue_s", "start_s"), [(B, 4.0, 0.0), (F, 2.0, 2.0)])
def test_an_extension_is_issued_as_a_program_of_its_own(phase: StepPhase, issue_s: float, start_s: float) -> None:
    """A bucket takes the main thread 2 s, and autograd's, which is half as fast, 4 s; autograd starts in 1 s / 0.5.

    Reduction r0 follows the pass before the extension. It is issued first, by the thread of that pass. Kernel c is of a
    backward pass, which starts autograd unless it goes on with the pass before. Reduction r1 follows c, and r2, for
    which the forward pass d waits, is issued right before d by the main thread.
    """
    costs = replace(IDEAL, launch={"bucket": 2.0, "autograd": 1.0})
    lanes = {
        "compute": (kernel("c", 1.0, phase=B), kernel("d", 1.0, "r2")),
        "dp": (Step("r0", REDUCTION, ("b",)), Step("r1", REDUCTION, ("c",)), Step("r2", REDUCTION)),
    }
    earlier = EarlierCompute({"b"}, kernel("b", 1.0, phase=phase))
    work = host_work(Role("r", lanes), costs, HostSpeeds(1.0, 0.5), earlier)
    assert [one.issues for one in work] == [(("r0", issue_s),), (("r1", 4.0), ("", 2.0)), ()]
    assert [one.start_s for one in work] == [start_s, 0.0, 0.0]

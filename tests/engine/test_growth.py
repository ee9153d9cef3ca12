"""Programs that are extended while the clock runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simpy.core import EmptySchedule, StopSimulation

from simulator.api import cluster_of
from simulator.config import load_workload
from simulator.config.profile import load_profiles
from simulator.costs import Costs
from simulator.engine import Placed, PlayedProgram, StepSource, play_together, simulate
from simulator.engine.growth import MOST_AT_ONCE
from simulator.engine.invariants import Place, check
from simulator.engine.issue_order import EarlierCompute, HostSpeeds, host_work
from simulator.errors import DeadlockError
from simulator.lowering import build_program
from simulator.program import (
    Block,
    Collective,
    CollectiveKind,
    Comm,
    Compute,
    Extension,
    Fixed,
    PointToPoint,
    PointToPointKind,
    Program,
    ProgramError,
    Purpose,
    Role,
    Step,
    StepPhase,
    expecting,
    extended,
)
from tests.support.clusters import HOP_s, NIC_Bps, nic_cluster
from tests.support.engines import each_engine  # noqa: F401
from tests.support.growing import PieceOf, assert_same, by_start, by_step, cut, in_order
from tests.support.jobs import job

pytestmark = pytest.mark.usefixtures("each_engine")

IDEAL = Costs.ideal()
F, B = StepPhase.FORWARD, StepPhase.BACKWARD
REDUCTION = Collective("r", CollectiveKind.ALL_REDUCE, 1e9, "dp", Purpose.DATA)


def kernel(label: str, seconds: float, *after: str, phase: StepPhase = F) -> Step:
    return Step(label, Block(label, (Compute(label, Fixed(seconds), phase),)), after, phase)


def one_role(lanes: dict[str, tuple[Step, ...]], ranks: int = 1, **later: tuple[Comm, ...]) -> Program:
    """Return a program of ranks that do the same, in one dp group."""
    return Program((Role("all", lanes, later),), (0,) * ranks, {"dp": (tuple(range(ranks)),)})


def grow(program: Program, more: Callable[[], StepSource], costs: Costs = IDEAL, **shortcuts: bool) -> PlayedProgram:
    cluster = nic_cluster(program.n_ranks)
    (played,) = play_together([Placed.on(program, costs, cluster, more=more)], cluster, **shortcuts)
    check(played.program, played.timeline)
    return played


def spans(played: PlayedProgram, rank: int = 0) -> dict[str, tuple[float, float]]:
    """Label of a step -> when it began and ended."""
    timeline = played.timeline
    mine = (timeline.rank == timeline.simulated_as[rank]).tolist()
    times = zip(timeline.labels, timeline.start_s.tolist(), timeline.end_s.tolist(), mine, strict=True)
    return {label: (start_s, end_s) for label, start_s, end_s, is_mine in times if is_mine}


# A program in one piece, and the same program piece by piece.

WIDE = {"layers": 2, "hidden": 8192, "heads": 64, "vocab": 32000}
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
    cluster, profiles = cluster_of(workload), load_profiles(workload.calibrations, workload.training.attention_kernel)
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


@pytest.mark.parametrize("shortcuts", [True, False])
@pytest.mark.parametrize("name", JOBS)
def test_steps_that_come_one_after_another_are_those_of_a_program_in_one_piece(name: str, shortcuts: bool) -> None:
    """Training steps that hosts know of from the beginning: they run ahead into each as into one long program."""
    whole, grown = compare(name, lambda program, placed: by_step, shortcuts, shortcuts, launch=True)
    # An event to ask for an extension, and one for each lane that has waited: what could be coalesced still is.
    assert grown.timeline.events <= 1.02 * whole.timeline.events


@pytest.mark.parametrize(("fold", "coalesce"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", JOBS)
def test_wherever_a_program_is_cut_it_is_the_same(name: str, fold: bool, coalesce: bool) -> None:
    """Cut in eleven at equal times, through passes and steps: without the time of hosts nothing tells the pieces.

    The kernels of the beginning are no longer those of the whole, from which a power limit's first clocks follow.
    """

    def piece_of(program: Program, placed: Placed) -> PieceOf:
        return by_start(program, simulate(program, cluster_of_job(name), placed.costs), 11)

    compare(name, piece_of, fold, coalesce, launch=False)


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


# What is refused.


def refused(extension: Extension, lanes: dict[str, tuple[Step, ...]] | None = None) -> str:
    beginning = one_role(lanes or {"compute": (kernel("a", 1.0),), "dp": ()}, 2, dp=(REDUCTION,))
    with pytest.raises(ProgramError) as error:
        grow(beginning, in_order([extension]))
    return str(error.value)


def test_communication_that_was_not_declared_is_refused() -> None:
    """The sentence says where to declare it."""
    other = replace(REDUCTION, nbytes=2e9)
    message = refused(Extension({0: {"dp": (Step("r", REDUCTION), Step("s", other))}}))
    assert "step 's' on lane 'dp' has all_reduce 'r' of 2000000000 bytes on axis 'dp'" in message
    assert "Name it in Role.later['dp']" in message


def test_communication_is_declared_for_its_lane() -> None:
    """Collectives that nothing can delay are told by the lanes that communicate."""
    assert "Name it in Role.later['compute']" in refused(Extension({0: {"compute": (Step("r", REDUCTION),)}}))


def test_names_and_purposes_need_no_declaration() -> None:
    """The network carries the same bytes, whatever they are called."""
    beginning = one_role({"compute": (), "dp": ()}, 2, dp=(REDUCTION,))
    renamed = replace(REDUCTION, name="norm", purpose=Purpose.OPTIMIZER)
    played = grow(beginning, in_order([Extension({0: {"dp": (Step("n", renamed),)}})]))
    assert set(spans(played)) == {"n"}


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        ({1: {}}, "an extension is for role 1; ranks play 0"),
        ({0: {"pp": ()}}, "an extension has steps for lane 'pp'; its lanes are compute, dp"),
        ({0: {"compute": (kernel("a", 1.0),)}}, "two steps are labelled 'a'"),
        ({0: {"compute": (kernel("b", 1.0), kernel("b", 1.0))}}, "two steps are labelled 'b'"),
        ({0: {"dp": (kernel("b", 1.0),)}}, "step 'b' computes on lane 'dp'"),
        ({0: {"compute": ()}}, "an extension without steps, asked for at 1 s, is released at 0 s"),
    ],
)
def test_what_cannot_be_played_is_refused(lanes: Any, message: str) -> None:
    assert message in refused(Extension(lanes))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_amounts_that_come_are_checked(seconds: float) -> None:
    """A kernel's length and a release, before SimPy meets them."""
    assert f"step 'b': kernel 'b': seconds is {seconds:g};" in refused(
        Extension({0: {"compute": (kernel("b", seconds),)}})
    )
    assert f"an extension: release_s is {seconds:g};" in refused(Extension({0: {"compute": ()}}, seconds))


def test_a_source_returns_extensions() -> None:
    with pytest.raises(ProgramError, match="program: the source returned a str at 0 s; it must return an Extension"):
        grow(one_role({"compute": ()}), lambda: lambda _: "more")  # type: ignore[arg-type, return-value]


def test_more_returns_a_source() -> None:
    """A list of extensions is none."""
    with pytest.raises(ProgramError, match=r"program: more\(\) returned a list; it must return a source"):
        grow(one_role({"compute": ()}), list)


def test_samples_are_of_the_programs_roles_and_lanes() -> None:
    beginning = one_role({"compute": ()}, 2)
    for lanes, message in (
        ({1: {}}, "program: an extension is for role 1; ranks play 0"),
        ({0: {"dp": (Step("r", REDUCTION),)}}, "an extension has steps for lane 'dp'; its lanes are compute."),
    ):
        with pytest.raises(ProgramError, match=message):
            expecting(beginning, Extension(lanes))


def test_labels_are_of_a_role() -> None:
    """Two roles may each have a step of one label, in one extension or in several."""
    roles = tuple(Role(name, {"compute": ()}) for name in "ab")
    both = Program(roles, (0, 1), {})
    same = Extension({0: {"compute": (kernel("x", 1.0),)}, 1: {"compute": (kernel("x", 2.0),)}})
    played = grow(both, in_order([same]))
    assert [spans(played, rank)["x"] for rank in (0, 1)] == [(0.0, 1.0), (0.0, 2.0)]


def test_a_step_may_wait_for_one_that_comes_later() -> None:
    """The reduction waits for a kernel of the next extension, which ends at 2 s."""
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": (Step("r", REDUCTION, ("b",)),)}, 2)
    played = grow(beginning, in_order([Extension({0: {"compute": (kernel("b", 1.0),)}})]))
    assert spans(played)["r"][0] == pytest.approx(2.0)


def test_a_label_that_never_comes_is_told() -> None:
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": (Step("r", REDUCTION, ("b",)),)}, 2)
    with pytest.raises(DeadlockError) as error:
        grow(beginning, in_order([]), fold=False)
    lines = str(error.value).splitlines()
    assert lines[1] == "  rank 0, lane dp, step r: waits for step b of the same rank, which never came"
    assert len(lines) == 3


def test_lanes_that_wait_for_an_extension_are_told() -> None:
    """No extension is asked for, as no lane runs its steps to the end. The compute lane has none and waits for some."""
    beginning = one_role({"compute": (), "dp": (Step("r", REDUCTION, ("b",)),)}, 2)
    with pytest.raises(DeadlockError) as error:
        grow(beginning, in_order([Extension({0: {"compute": (kernel("b", 1.0),)}})]))
    assert (
        "rank 0, lane compute: waits for an extension of the program, asked for when a lane has run its steps of the "
        "last one"
    ) in str(error.value)


# Sources without an end.


def endless(seconds: float, asked: list[float]) -> Callable[[], StepSource]:
    def source(now_s: float) -> Extension:
        asked.append(now_s)
        return Extension({0: {"compute": (kernel(str(len(asked)), seconds),)}})

    return lambda: source


def test_a_source_that_lets_no_time_pass_is_stopped() -> None:
    asked: list[float] = []
    with pytest.raises(ProgramError, match=f"{MOST_AT_ONCE} extensions came at 0 s, and the clock stands still"):
        grow(one_role({"compute": ()}), endless(0.0, asked))
    assert len(asked) == MOST_AT_ONCE + 1


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), TimeoutError("five seconds are enough"), EmptySchedule(), StopSimulation()]
)
def test_what_a_source_raises_ends_the_play(stop: BaseException) -> None:
    """An interrupt of the user, a bound that a source sets itself, or what SimPy ends its own run by."""
    asked: list[float] = []
    source = endless(1.0, asked)()

    def until_5_s(now_s: float) -> Extension | None:
        if now_s >= 5:
            raise stop
        return source(now_s)

    with pytest.raises(type(stop)) as error:
        grow(one_role({"compute": ()}), lambda: until_5_s)
    assert error.value is stop
    assert asked == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_source_is_begun_anew_for_every_play() -> None:
    """The same program twice, from one factory: it keeps nothing from the play before."""
    more = in_order([Extension({0: {"compute": (kernel("b", 1.0),)}})])
    beginning = one_role({"compute": (kernel("a", 1.0),)})
    first, second = (grow(beginning, more) for _ in range(2))
    assert spans(first) == spans(second) == {"a": (0.0, 1.0), "b": (1.0, 2.0)}


# Without a clock.


def test_a_program_is_extended_in_order() -> None:
    beginning = one_role({"compute": (kernel("a", 1.0),), "dp": ()}, 2)
    extensions: Sequence[Extension] = [
        Extension({0: {"compute": (kernel("b", 1.0),), "dp": (Step("r", REDUCTION, ("b",)),)}}),
        Extension({0: {"compute": (kernel("c", 1.0),)}}),
    ]
    longer = extended(beginning, *extensions)
    assert [(lane, step.label) for lane, _, step in longer.roles[0].steps()] == [
        ("compute", "a"),
        ("compute", "b"),
        ("compute", "c"),
        ("dp", "r"),
    ]
    assert longer == extended(extended(beginning, extensions[0]), extensions[1])
    assert [step.label for _, _, step in beginning.roles[0].steps()] == ["a"]
    with pytest.raises(ProgramError, match="two steps are labelled 'b'"):
        extended(longer, extensions[0])


def test_samples_declare_each_communication_once() -> None:
    beginning = one_role({"compute": (), "dp": ()}, 2)
    sample = Extension({0: {"dp": (Step("r", REDUCTION), Step("s", REDUCTION))}})
    assert expecting(beginning, sample, sample).roles[0].later == {"dp": (REDUCTION,)}

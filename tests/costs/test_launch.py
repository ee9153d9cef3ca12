"""Host costs by kind of op: what is issued, what it takes, and that small models run at the pace of the host."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.fit import hosts
from calibration.fit import launch as launch_fit
from calibration.fit.cases import Cases, MeasuredCase, read
from calibration.narrow import LAYOUTS, narrow
from simulator.cluster import build_cluster
from simulator.cluster.ideal import ideal_cluster
from simulator.config.cluster import cluster_data, load_cluster
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.costs.launch import issued, launch_seconds
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.engine.issue_order import HostSpeeds, host_work, issue_order, issued_by
from simulator.frameworks import pytorch
from simulator.lowering import build_program
from simulator.program import (
    AllToAll,
    Attention,
    Block,
    Collective,
    Comm,
    Compute,
    Fixed,
    GroupedMatmul,
    Matmul,
    Memory,
    PointToPoint,
    Program,
    Role,
    Step,
)
from simulator.timeline import Timeline
from tests.support.grids import one_in
from tests.support.programs import comm_called
from tests.support.quick import ISSUED

MEASURED = Path(__file__).parents[2] / "calibration" / "measurements" / "h100-sxm-80gb"
LAYERS = MEASURED.parent / "h200-sxm-141gb"
PRODUCT, NORM = Matmul(8, 8, 8), Memory("norm", 1.0, 1.0)


@pytest.mark.parametrize(
    ("op", "kinds"),
    [
        (Compute("qkv", PRODUCT, "F"), "forward_matmul"),
        (Compute("qkv", PRODUCT, "R"), "forward_matmul"),
        (Compute("qkv", PRODUCT, "W"), "backward_matmul"),
        (Compute("norm", NORM, "F"), "forward_norm"),
        (Compute("norm", Memory("rms_norm_bwd", 1.0, 1.0), "B"), "backward_norm"),
        (Compute("core", Attention(1, 1, 1, 8, 8, 8), "F"), "forward_attention graph"),
        (Compute("core", Attention(1, 1, 1, 8, 8, 8), "B"), "backward_attention graph"),
        (Compute("gelu", Memory("activation", 1.0, 1.0), "B"), "backward_other"),
        (Compute("adam", Memory("optimizer", 1.0, 1.0), "O"), "optimizer"),
        (Compute("core", Attention(1, 1, 1, 8, 8, 8), "R"), "forward_attention"),
        (Compute("attn.softmax", Memory("softmax", 1.0, 1.0), "F"), "forward_other graph"),
        (Compute("attn.softmax + attn.probs dropout", Memory("dropout", 1.0, 1.0), "F"), "forward_other graph"),
        (Compute("attn.softmax", Memory("softmax", 1.0, 1.0), "R"), "forward_other"),
        (Compute("norm", NORM, "R", carries_checkpoint=True), "forward_norm checkpoint"),
        (Compute("fc1 dequantize", Memory("upcast", 1.0, 1.0), "B", dequantizes=True), "backward_other dequantize"),
        (Compute("experts", GroupedMatmul((8, 8), 8, 8), "F"), "forward_grouped expert"),
        (Collective("x", "all_gather", 8.0, "tp", "tp"), "collective"),
        (Collective("x", "all_reduce", 8.0, "tp", "tp"), "tp_all_reduce"),
        (AllToAll("x", 8.0, "ep", "ep"), "exchange"),
        (PointToPoint("x", "send", 8.0, "pp", "pp", peer=1), "p2p"),
    ],
)
def test_an_op_is_issued_as_its_kinds(op: Compute | Comm, kinds: str) -> None:
    assert issued(op) == dict.fromkeys(kinds.split(), 1)
    assert kinds.split()[0] in ISSUED


def test_what_goes_with_an_op_is_issued_with_it() -> None:
    """A call of autograd's engine with the gradients of each module's weights, where these are computed apart."""
    for kernel, kind in ((PRODUCT, "backward_matmul"), (Memory("rms_norm_bwd", 1.0, 1.0), "backward_norm")):
        assert issued(Compute("x", kernel, "W"), "W") == {kind: 1, "weights": 1}
        assert issued(Compute("x", kernel, "W"), "B") == {kind: 1}
    for phase, way in (("F", "forward"), ("R", "forward"), ("B", "backward")):
        joined = Compute("sort", Memory("copy", 1.0, 1.0, parts=32), phase)
        assert issued(joined, phase) == {f"{way}_other": 1, f"{way}_part": 32}
    assert issued(Compute("bias", Memory("bias_grad", 1.0, 1.0), "W"), "W") == {"backward_other": 1}


def test_a_gradient_that_is_added_to_a_buffer_has_its_hooks() -> None:
    """Only behind a product for weights: a like sum elsewhere has none. Where unlisted, it is as other kernels."""
    added = Memory("accumulate", 2.0, 1.0)
    assert issued(Compute("fc1 grad add", added, "W"), "B") == {"gradient": 1}
    assert issued(Compute("sum", added, "B"), "B") == {"backward_other": 1}
    costs = load_profile("h200-sxm-141gb").host.launch_s
    assert launch_seconds(costs["eager"])["gradient"] == costs["eager"].backward_s["other"]
    assert launch_seconds(costs["megatron"])["gradient"] > 3 * costs["megatron"].backward_s["other"]


def test_a_layer_of_compiled_code_is_counted_once_each_way() -> None:
    """A host that takes 20 us for a kernel and 500 for a graph needs 4 x 20 + 500 us for attention and three products.

    The attention that is run again is part of the backward graph: 20 us."""
    costs = load_profile("h200-sxm-141gb").host.launch_s["compiled"]
    flat = dict.fromkeys(costs.forward_s, 20e-6)
    table = launch_seconds(replace(costs, forward_s=flat, around_s={"graph": 500e-6}))
    core = Attention(1, 1, 1, 8, 8, 8)
    ops = [*(Compute(f"qkv{n}", PRODUCT, "F") for n in range(3)), Compute("core", core, "F")]
    seconds = sum(table[kind] * n for op in ops for kind, n in issued(op).items())
    assert seconds == pytest.approx(4 * 20e-6 + 500e-6)
    again = issued(Compute("core", core, "R"), "B")
    assert sum(table.get(kind, 0.0) * n for kind, n in again.items()) == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("op", "kind"), [("all_reduce", "bucket"), ("all_gather", "gather"), ("reduce_scatter", "reduce")]
)
def test_data_parallel_hooks_are_free_unless_measured(op: str, kind: str) -> None:
    """A profile without ``around_s`` charges nothing for them, one with it what it says."""
    comm, costs = comm_called("x", op, 8.0, "dp", "dp"), load_profile("h200-sxm-141gb").host.launch_s["eager"]
    assert issued(comm) == {kind: 1}
    assert launch_seconds(replace(costs, around_s={})).get(kind, 0) == 0
    assert launch_seconds(costs)[kind] > 100e-6


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("layers", [1, 7, 40])
def test_a_host_bound_pass_lasts_as_long_as_its_launches(layers: int, coalesce: bool) -> None:
    """Kernels of 1 us behind launches of 2, 5 and 9 us, then one optimizer step of 30 us: the GPU ends one kernel after
    the last launch, whatever came before."""
    table = {"forward_other": 2e-6, "backward_other": 5e-6, "optimizer": 30e-6, "collective": 9e-6}
    kernel = Fixed(1e-6)
    forward = Block("f", tuple(Compute(f"f{i}", kernel, "F") for i in range(layers)))
    backward = Block("b", tuple(Compute(f"b{i}", kernel, "B") for i in range(2 * layers)))
    step = Block("o", (Compute("adam", kernel, "O"),))
    steps = tuple(Step(block.name, block, phase=block.name.upper()) for block in (forward, backward, step))
    program = Program((Role("r", {"compute": steps}),), (0,), {})
    timeline = simulate(program, ideal_cluster(1), replace(Costs.ideal(), launch=table), coalesce=coalesce)
    launches_s = layers * 2e-6 + 2 * layers * 5e-6 + 30e-6
    assert timeline.end_s.max() == pytest.approx(launches_s + 1e-6, rel=1e-9)


def test_whole_layers_are_the_sum_of_their_ops() -> None:
    """A layer of Llama, which was not fitted, forward and backward within a tenth."""
    points = launch_fit.fit(read(MEASURED), load_profile("h100-sxm-80gb")).points
    held_out = [point for point in points if point.held_out]
    assert len(held_out) == 2
    assert all(abs(point.error) < 0.1 for point in held_out)


def test_the_shipped_profile_has_what_the_fit_gives() -> None:
    figures = launch_fit.fit(read(MEASURED), load_profile("h100-sxm-80gb")).figures["host.launch_s.eager"]
    shipped = load_profile("h100-sxm-80gb").host.launch_s["eager"]
    assert shipped.forward_s == pytest.approx(figures["forward_s"], rel=1e-3)
    assert shipped.backward_s == pytest.approx(figures["backward_s"], rel=1e-3)
    assert shipped.collective_s == pytest.approx(figures["collective_s"], rel=1e-3)


PAIR = ((0, 1),)


@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize("buckets", [1, 3, 8])
def test_communication_of_its_own_lane_costs_the_host_time(buckets: int, coalesce: bool) -> None:
    """Backward in pieces of one kernel of 1 us, launched in 5 us; behind each an all-reduce, issued in 20 us, which the
    next kernel's launch comes after. The last one starts when the host has issued all: n x 25 us, more than the GPU
    needs; an all-reduce of no bytes takes nothing here."""
    block = Block("b", (Compute("b", Fixed(1e-6), "B"),))
    comm = Collective("grads", "all_reduce", 0.0, "dp", "dp")
    compute = tuple(Step(f"b{n}", block, phase="B") for n in range(buckets))
    reduce = tuple(Step(f"r{n}", comm, (f"b{n}",)) for n in range(buckets))
    program = Program((Role("r", {"compute": compute, "dp": reduce}),), (0, 0), {"dp": PAIR})
    table = {"backward_other": 5e-6, "bucket": 20e-6}
    costs = replace(Costs.ideal(), launch=table)
    timeline = simulate(program, ideal_cluster(2), costs, coalesce=coalesce)
    assert timeline.end_s.max() == pytest.approx(buckets * 25e-6, rel=1e-9)
    free = simulate(program, ideal_cluster(2), replace(costs, launch={"backward_other": 5e-6}), coalesce=coalesce)
    assert free.end_s.max() == pytest.approx(buckets * 5e-6 + 1e-6, rel=1e-9)


@pytest.mark.parametrize("products", [1, 5])
def test_a_split_pass_issues_cuts_and_calls_beside_its_kernels(products: int) -> None:
    """Input then weight gradients of so many products: autograd starts once, the graph is cut at each product of the
    first pass, and each of the second is a call of its own."""
    blocks = [
        Block(phase, tuple(Compute(f"{phase}{n}", PRODUCT, kernel) for n in range(products)))
        for phase, kernel in (("I", "B"), ("W", "W"))
    ]
    steps = tuple(Step(block.name, block, phase=block.name, microbatch=0) for block in blocks)
    role = Role("r", {"compute": steps})
    counts = Counter[str]()
    for _, kind, n in issued_by(role):
        counts[kind] += n
    assert counts == {"autograd": 1, "split": products, "backward_matmul": 2 * products, "weights": products}


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_a_pass_that_is_cut_starts_once(pieces: int) -> None:
    block = Block("b", (Compute("b", PRODUCT, "B"),))
    steps = tuple(Step(f"{mb}B.{n}", block, phase="B", microbatch=mb) for mb in range(3) for n in range(pieces))
    kinds = Counter(kind for _, kind, _ in issued_by(Role("r", {"compute": steps})))
    assert kinds == {"autograd": 3, "backward_matmul": 3 * pieces}


def test_the_host_issues_transfers_where_they_belong() -> None:
    """A receive before what waits for it, a send behind what makes it, what nobody waits for first."""
    block = Block("f", (Compute("f", PRODUCT, "F"),))
    compute = (Step("f0", block), Step("f1", block, after=("r1",)))
    receive = Step("r1", PointToPoint("recv", "recv", 8.0, "pp", "pp", peer=1))
    send = Step("s0", PointToPoint("send", "send", 8.0, "pp", "pp", peer=1), after=("f0",))
    stray = Step("x", PointToPoint("recv", "recv", 8.0, "pp", "pp", peer=1, tag="x"))
    role = Role("r", {"compute": compute, "in": (receive, stray), "out": (send,)})
    assert issue_order(role) == (("x",), ("r1", "s0"), ())


KINDS = ("forward_matmul", "forward_attention", "forward_norm", "forward_other", "backward_matmul", "exchange")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-6, 1e-3), min_size=len(KINDS), max_size=len(KINDS)))
def test_seconds_of_kinds_are_found_from_sums(seconds_of: list[float]) -> None:
    """Times that are exact sums of the kinds' seconds give those back: one equation for each kind and its next."""
    true = dict(zip(KINDS, seconds_of, strict=True))
    counted = [{kind: 3, KINDS[n - 1]: 1} for n, kind in enumerate(KINDS)]
    sums = [sum(n * true[kind] for kind, n in counts.items()) for counts in counted]
    equations = [hosts.Equation("x", total, counts) for total, counts in zip(sums, counted, strict=True)]
    assert hosts.least_squares(equations, KINDS) == pytest.approx(seconds_of, rel=1e-6)


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (1.1, 1.0), (0.8, 1.2), (1.3, 0.9)])
def test_costs_are_those_of_a_host_of_one_speed(forward: float, backward: float) -> None:
    """Two threads whose seconds grow by ``forward`` and ``backward`` from one probe to the next, and linearly between:
    a run that issues 100 forward ops of 20 us and 100 backward ones of 30 us on the usual host takes longer or shorter
    by that, and both costs come back. A row without probes stays as it is."""
    usual = hosts.Pace(0.02, 0.04)
    probes = [(0.02 * forward**n, 0.04 * backward**n) for n in range(-3, 4)]
    between = [[(a + b) / 2 for a, b in zip(*two, strict=True)] for two in pairwise(probes)]
    row = {"probe_s": [[f + b for f, b in probes]], "probe_forward_s": [[f for f, _ in probes]], "time_s": 9.0}

    def case(counts: tuple[int, int]) -> MeasuredCase:
        blocks = [counts[0] * 20e-6 * f / 0.02 + counts[1] * 30e-6 * b / 0.04 for f, b in between]
        return MeasuredCase("layers", "passes", {}, (0,), {**row, "block_s": [blocks]})

    cases = {counts: case(counts) for counts in ((100, 100), (100, 300))}
    assert hosts.usual_pace(Cases(tuple(cases.values()), ())) == pytest.approx(usual)
    kinds, equations = ("forward_other", "backward_other"), []
    for counts, measured in cases.items():
        ((seconds, pace),) = hosts.members(measured, usual)
        slower = {kind: n * pace_of for kind, n, pace_of in zip(kinds, counts, pace, strict=True)}
        equations.append(hosts.Equation("x", seconds, slower))
    assert hosts.least_squares(equations, kinds) == pytest.approx([20e-6, 30e-6], rel=1e-6)
    plain = MeasuredCase("layers", "passes", {}, (0, 1), {"time_s": 9.0, "each_s": [8.0, 9.0]})
    assert hosts.members(plain, usual) == [(8.0, (1.0, 1.0)), (9.0, (1.0, 1.0))]
    assert hosts.usual_pace(Cases((plain,), ())) is None


def test_layers_give_the_shipped_figures_and_are_met_by_them() -> None:
    """The fit to layers as training issues them, in every layout, at the speed that probes beside them tell; they go up
    and down by a sixth from one to the next."""
    fitted = launch_fit.fit(read(LAYERS), load_profile("h200-sxm-141gb"))
    found, shipped = fitted.figures["host.launch_s.eager"], load_profile("h200-sxm-141gb").host.launch_s["eager"]
    assert shipped.forward_s == pytest.approx(found["forward_s"], rel=1e-3)
    assert shipped.backward_s == pytest.approx(found["backward_s"], rel=1e-3)
    # Updates of one tensor were measured with the optimizers, not with layers.
    around = {kind: seconds for kind, seconds in shipped.around_s.items() if kind != "update"}
    assert around == pytest.approx(found["around_s"], rel=1e-3)
    errors = [abs(point.error) for point in fitted.points if point.group != "launch.modules"]
    assert statistics.fmean(errors) < 0.06
    assert max(errors) < 0.2


@pytest.mark.slow
def test_parts_of_tokens_are_told_from_exchanges_by_cases_of_unlike_numbers_alone() -> None:
    """With experts of one model only, as many go with every exchange, which then has the time of both."""
    cases = read(LAYERS)
    alone = [case for case in cases.rows if not str(case.params.get("part")).startswith("join_")]
    profile = load_profile("h200-sxm-141gb")
    around = launch_fit.fit(replace(cases, rows=tuple(alone)), profile).figures["host.launch_s.eager"]["around_s"]
    assert not {"forward_part", "backward_part"} & around.keys()
    assert around["exchange"] > profile.host.launch_s["eager"].around_s["exchange"]


@pytest.mark.parametrize("shortcuts", [True, False])
@pytest.mark.parametrize(("main", "autograd"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (2.0, 0.4)])
def test_two_threads_issue_at_their_own_speeds(main: float, autograd: float, shortcuts: bool) -> None:
    """Forward three kernels of 4 us by the main thread; then autograd's, at ``autograd`` times its speed: three kernels
    of 5 us, an all-reduce of 8 us in line, one of 16 us that a hook issues, and what is run again, 4 us; the
    optimizer's 9 us are the main one's again. No kernel takes any time."""
    built = ideal_cluster(2)
    built = replace(built, gpus=tuple(replace(on, host_speed=main, autograd_speed=autograd) for on in built.gpus))
    blocks = {
        "F": Block("f", tuple(Compute(f"f{n}", Fixed(0.0), "F") for n in range(3))),
        "B": Block(
            "b",
            (
                Compute("again", Fixed(0.0), "R"),
                *(Compute(f"b{n}", Fixed(0.0), "B") for n in range(3)),
                Collective("sum", "all_reduce", 0.0, "tp", "tp"),
            ),
        ),
        "O": Block("o", (Compute("o", Fixed(0.0), "O"),)),
    }
    compute = tuple(Step(phase, block, phase=phase) for phase, block in blocks.items())
    lanes = {"compute": compute, "dp": (Step("r", Collective("grads", "all_reduce", 0.0, "dp", "dp"), ("B",)),)}
    program = Program((Role("r", lanes),), (0, 0), {"dp": PAIR, "tp": PAIR})
    table = {"forward_other": 4e-6, "backward_other": 5e-6, "tp_all_reduce": 8e-6, "bucket": 16e-6, "optimizer": 9e-6}
    timeline = simulate(program, built, replace(Costs.ideal(), launch=table), fold=shortcuts, coalesce=shortcuts)
    taken = (12e-6 + 9e-6) / main + (4e-6 + 15e-6 + 8e-6 + 16e-6) / (main * autograd)
    assert timeline.end_s.max() == pytest.approx(taken, rel=1e-9)


@pytest.mark.parametrize(("main", "autograd"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25)])
def test_the_main_thread_cuts_graphs_and_posts_transfers(main: float, autograd: float) -> None:
    """The first half of a split backward pass of two products, 2 us each, behind the start of autograd, 3 us, and the
    cut of their graph, 7 us for each; a send of 5 us that waits for it. The first two are autograd's, the others the
    main thread's. Of the second half each product is autograd's, and its call, 11 us, the main one's."""
    block = Block("i", (Compute("i0", PRODUCT, "B"), Compute("i1", PRODUCT, "B")))
    send = Step("s", PointToPoint("send", "send", 8.0, "pp", "pp", peer=1), after=("i",))
    role = Role("r", {"compute": (Step("i", block, phase="I"),), "out": (send,)})
    table = {"backward_matmul": 2e-6, "autograd": 3e-6, "split": 7e-6, "p2p": 5e-6, "weights": 11e-6}
    speeds, costs = HostSpeeds(main, main * autograd), replace(Costs.ideal(), launch=table)
    assert speeds.issue_s(costs, Compute("w", PRODUCT, "W"), "W") == pytest.approx(
        2e-6 / speeds.autograd + 11e-6 / main
    )
    assert speeds.issue_s(costs, Compute("w", PRODUCT, "W"), "B") == pytest.approx(2e-6 / speeds.autograd)
    first, last = host_work(role, costs, speeds)
    assert first.start_s == pytest.approx(3e-6 / speeds.autograd + 14e-6 / main)
    assert last.issues == (("s", pytest.approx(5e-6 / main)),)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("speed", [0.5, 1.0, 4.0])
def test_a_slower_host_issues_everything_later(speed: float, fold: bool) -> None:
    """Two ranks, the second's host at ``speed``: three kernels of no length launched in 4 us each, an all-reduce issued
    in 8 us on the compute lane, then one in 16 us on a lane of its own: 36 us in all, and both wait for the slower."""
    built = ideal_cluster(2)
    built = replace(built, gpus=(built.gpus[0], replace(built.gpus[1], host_speed=speed)))
    kernels = tuple(Compute(f"b{n}", Fixed(0.0), "B") for n in range(3))
    inline = Collective("sum", "all_reduce", 0.0, "tp", "tp")
    grads = Collective("grads", "all_reduce", 0.0, "dp", "dp")
    lanes = {"compute": (Step("b", Block("b", (*kernels, inline)), phase="B"),), "dp": (Step("r", grads, ("b",)),)}
    program = Program((Role("r", lanes),), (0, 0), {"dp": PAIR, "tp": PAIR})
    table = {"backward_other": 4e-6, "tp_all_reduce": 8e-6, "bucket": 16e-6}
    timeline = simulate(program, built, replace(Costs.ideal(), launch=table), fold=fold)
    assert timeline.end_s.max() == pytest.approx(36e-6 / min(speed, 1.0), rel=1e-9)


def test_nodes_say_how_fast_their_hosts_are() -> None:
    data = cluster_data("dgx_h100")[0]
    built = build_cluster(load_cluster(data | {"node": data["node"] | {"host_speed": 0.5}}))
    assert {gpu.host_speed for gpu in built.gpus} == {0.5}


def _played(layout: str, *, fold: bool, coalesce: bool) -> tuple[Program, Timeline, Costs]:
    """A narrow model in ``layout``, in eager PyTorch on H200s, as it was measured."""
    params = {"model": "moe" if layout == "ep" else "gpt", "layers": 4, "layout": layout, "batches": 2}
    workload = narrow(params, "hgx_h200_4gpu")
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"), pytorch.FRAMEWORK)
    program = build_program(workload)
    return program, simulate(program, build_cluster(workload.cluster), costs, fold=fold, coalesce=coalesce), costs


@pytest.mark.parametrize("layout", one_in(2, LAYOUTS))
def test_a_narrow_model_is_issued_in_the_time_that_its_ops_take_the_host(layout: str) -> None:
    """The clock, with every collective and hand-over played, and the sum over what the program issues that the fit goes
    by: the GPU adds its last kernels, waiting for the other rank what is not the host's. Without shortcuts the same."""
    program, timeline, costs = _played(layout, fold=True, coalesce=True)
    longest = max(costs.launched_s(_issued(role)) for role in program.roles)
    assert 1.0 <= timeline.end_s.max() / longest < 1.25
    check(program, timeline)
    plain = _played(layout, fold=False, coalesce=False)[1]
    assert plain.end_s.max() == pytest.approx(timeline.end_s.max(), rel=1e-9)


def _issued(role: Role) -> Counter[str]:
    counts = Counter[str]()
    for _, kind, n in issued_by(role):
        counts[kind] += n
    return counts

"""The power limit as a budget over the step: the clock at which the mean is at the limit, found by playing."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import simulator
from simulator.config.profile import load_profile
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.power import Drawn, PowerBudget, load_class, longer
from simulator.engine.gpu_clocks import UNSETTLED
from simulator.errors import InputError
from simulator.frameworks import pytorch
from simulator.hardware.power import Load, Power
from simulator.program import Attention, Block, Fixed, Matmul, Memory, kernels_of
from tests.support.grids import grid
from tests.support.jobs import job

HIGHEST = 2e9


AVERAGED_S = 0.05


def budget(
    exponent: float = 2.0, speed: float = 1.0, *, stream_w: float = 500.0, ceiling: float = HIGHEST
) -> PowerBudget:
    """Products alone draw the limit of 700 W at 1.5 GHz, where their prices hold."""
    follows = {"speed_exponent": speed, "power_exponent": exponent, "highest_clock_hz": ceiling}
    product = Load(watts=700, clock_hz=1.5e9, priced_at_hz=1.5e9, **follows)
    constant = {"clock_hz": HIGHEST, "priced_at_hz": HIGHEST, "highest_clock_hz": HIGHEST, "speed_exponent": 0}
    stream = Load(watts=stream_w, power_exponent=exponent, **constant)
    loads: dict[Any, Load] = {"matmul": product, "attention": product, "memory": stream, "communication": stream}
    loads["arithmetic"] = loads["norm"] = product
    return PowerBudget(
        Power(
            limit_w=700,
            averaged_s=AVERAGED_S,
            idle_w=100,
            highest_clock_hz=HIGHEST,
            loads=loads,
            kind="assumed",
            source="test",
        )
    )


def clock_hz(found: PowerBudget, at_hz: float, length_s: float, **seconds: float) -> float:
    """Of a step whose kernels of each class last so long, evenly spread, and draw all of what their class does."""
    given: dict[Any, float] = dict(seconds)
    return found.clock_hz(found.trace([Drawn(0.0, length_s, given, given)], length_s), at_hz)


def in_turns(found: PowerBudget, busy_s: float, rest_s: float, at_hz: float = HIGHEST) -> float:
    """Of a step that is products on end, ``busy_s`` at ``at_hz``, and then nothing."""
    products = Drawn(0.0, busy_s, {"matmul": busy_s}, {"matmul": busy_s})
    return found.clock_hz(found.trace([products], busy_s + rest_s), at_hz)


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("speed", [0.5, 1.0])
@pytest.mark.parametrize("length_s", [1e-4, 0.01, 0.1, 3.0, 100.0])
def test_products_alone_keep_the_clock_at_which_they_were_measured(
    exponent: float, speed: float, length_s: float
) -> None:
    """They draw the limit there, so that the mean over any time without pauses is the limit, however long it was said
    to be at another clock."""
    found = budget(exponent, speed)
    for at_hz in (1e9, 1.5e9, HIGHEST):
        assert clock_hz(found, at_hz, length_s, matmul=length_s) == pytest.approx(1.5e9, abs=2e6)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0])
def test_waiting_saves_for_products(share: float, exponent: float) -> None:
    """With products for a share s of the time (at the clock that is found), evenly spread, s * 600 W * (f / 1.5 GHz)^e
    = 600 W, so f = 1.5 GHz * s^(-1/e), up to the highest clock. Waits of w then belong to products of w s / (1 - s)."""
    expected_hz = min(1.5e9 * share ** (-1 / exponent), HIGHEST)
    busy_s = share / (1 - share)
    assert clock_hz(budget(exponent), expected_hz, busy_s + 1.0, matmul=busy_s) == pytest.approx(expected_hz, abs=2e6)


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_is_saved_does_not_last(share: float) -> None:
    """Products on end, then a pause. In turns much shorter than the time over which the limit averages (T), as if both
    were spread evenly. In turns much longer the mean has sunk to nothing when products begin, and with the 600 W * (2 /
    1.5)^2 = 1067 W that they draw above idle at the highest clock it is at the limit of 600 W above idle again after
    T ln(1067 / 467): till then the highest clock holds, from then on that of products alone. Clocks fall in between."""
    even_hz = min(1.5e9 * share**-0.5, HIGHEST)
    found = budget()
    turns = [1e-3, 0.02, 0.1, 0.5, 10.0]
    clocks = [in_turns(found, share * turn, (1 - share) * turn, 1.5e9) for turn in turns]
    assert clocks == sorted(clocks, reverse=True)
    assert in_turns(found, share * 1e-3 * 1.5e9 / even_hz, (1 - share) * 1e-3, even_hz) > 1.5e9
    fast_s = AVERAGED_S * math.log(1067 / 467)
    busy_s, rest_s = 10 * share, 10 * (1 - share)  # at 1.5 GHz; exponent 1: cycles stay
    slow_s = busy_s - fast_s * HIGHEST / 1.5e9
    assert clocks[-1] == pytest.approx(1.5e9 * busy_s / (fast_s + slow_s), rel=2e-3)
    assert rest_s > 8 * AVERAGED_S


def test_where_the_pause_is_does_not_matter() -> None:
    """A step repeats: pauses before, between or after the products leave them the same, on the whole."""
    found = budget()

    def of(*starts: float) -> float:
        each = 0.4 / len(starts)
        spans = [Drawn(at, at + each, {"matmul": each}, {"matmul": each}) for at in starts]
        return found.clock_hz(found.trace(spans, 1.0), 1.5e9)

    assert of(0.0) == pytest.approx(of(0.6), rel=2e-3)
    assert of(0.0) == pytest.approx(of(0.3), rel=2e-3)
    assert of(0.1, 0.6) > of(0.3)


@pytest.mark.parametrize(("length_s", "pieces"), [(0.01, 1), (0.05, 2), (0.06, 3), (0.1, 4), (100.0, 512)])
def test_a_step_is_cut_into_two_pieces_for_each_time_that_the_limit_averages(length_s: float, pieces: int) -> None:
    """The limit averages over 50 ms, so that pieces last 25 ms at most; a long step has 512, and a short one is one."""
    busy = {"matmul": length_s}
    trace = budget().trace([Drawn(0.0, length_s, busy, busy)], length_s)
    assert trace.pieces_s == pytest.approx([length_s / pieces] * pieces)


def test_streams_that_are_held_down_leave_products_at_the_highest_clock() -> None:
    """Streams fill the first half of 100 s, draw more than the limit, and are no slower for it. Products fill 0.3 of
    the second half: 0.3 * 1067 W are below 600 W, and their clock is the highest. The step lasts as it does at that
    clock. Streams alone have the clock at which they draw 600 of their 700 W above idle."""
    found = budget(stream_w=800.0)
    streams = Drawn(0.0, 50.0, {"memory": 50.0}, {"memory": 50.0})
    products = Drawn(50.0, 100.0, {"matmul": 15.0}, {"matmul": 15.0})
    assert found.clock_hz(found.trace([streams, products], 100.0), HIGHEST) == HIGHEST
    alone_hz = HIGHEST * math.sqrt(600 / 700)
    assert clock_hz(found, HIGHEST, 100.0, memory=100.0) == pytest.approx(alone_hz, rel=2e-3)


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e3])
def test_clocks_turn_on_ratios_of_watts(scale: float) -> None:
    """A GPU whose every figure in watts is a thousandth has the same clocks."""
    found = budget()
    loads = {kind: replace(load, watts=load.watts * scale) for kind, load in found.model.loads.items()}
    model = replace(found.model, limit_w=700 * scale, idle_w=100 * scale, loads=loads)
    for share in (0.6, 0.8, 1.0):
        clocks = [in_turns(one, share, 1.0 - share) for one in (found, PowerBudget(model))]
        assert clocks[0] == pytest.approx(clocks[1], abs=1e6)
        assert clocks[0] < HIGHEST


def test_no_clock_above_the_highest_of_a_class() -> None:
    """Products that no clock above 1.6 GHz makes faster take 15/16 of their price there and above, and draw no more."""
    found, kernel = budget(ceiling=1.6e9), Matmul(64, 64, 64)
    for hz in (1.6e9, 1.8e9, HIGHEST):
        assert found.slowness(kernel, hz) == pytest.approx(15 / 16)
        assert found.drawn_w("matmul", hz) == pytest.approx(600 * (16 / 15) ** 2)
    assert clock_hz(found, 1.6e9, 1.0, matmul=0.8) == HIGHEST  # 0.8 * 683 W is below 600 W
    assert clock_hz(found, 1.6e9, 1.0, matmul=0.9) < 1.6e9


def test_what_draws_as_much_as_the_limit_leaves_nothing() -> None:
    """Streams of 700 W at the highest clock draw less at 1.5 GHz, but more than an idle GPU: clocks lie between those
    beside idle time and products alone, and below those beside streams of 400 W."""
    clocks = [clock_hz(budget(stream_w=watts), 1.5e9, 2.0, matmul=1.0, memory=1.0) for watts in (100.0, 400.0, 700.0)]
    assert HIGHEST >= clocks[0] > clocks[1] > clocks[2] > 1.5e9


def test_each_class_follows_the_clock_by_its_own_exponent() -> None:
    """At 2 GHz products and attention with exponent 1/2 take sqrt(3/4) of what they take at 1.5 GHz; streams and what
    is of no class stay."""
    found = budget(speed=0.5)
    for kernel in (Matmul(64, 64, 64), Attention(1, 1, 1, 64, 64, 64), Memory("gelu", 1.0, 1.0)):
        assert found.slowness(kernel, HIGHEST) == pytest.approx(0.75**0.5)
    assert found.slowness(Memory("copy", 1.0, 1.0), 1e9) == found.slowness(Fixed(1.0), 1e9) == 1.0


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(
    ("cluster", "calibration"), [("dgx_h100", "h100-sxm-80gb"), ("hgx_h200_4gpu", "h200-sxm-141gb")]
)
def test_the_mean_over_a_step_is_near_the_limit(cluster: str, calibration: str, layers: int) -> None:
    """Large products, attention and streams, played: what all kernels draw at their rank's clock, and an idle GPU
    through the whole step, is at most the limit on average, within what a clock may be off when it counts as settled
    (0.5 %, so 1 % of power), and less only by what an optimizer step saves for longer than the mean remembers. The
    products are faster than alone, and slower than at the highest clock."""
    workload = job(
        model__hidden=8192, model__heads=64, model__layers=layers, training__seq=2048, training__global_batch=2
    )
    result = simulator.run(workload | {"cluster": {"name": cluster}, "calibration": calibration})
    power, spans = result.costs.power, result.spans
    assert power is not None
    clock_hz = spans.clocks_hz[0]
    blocks = [step.op for _, _, step in result.program.roles[0].steps() if isinstance(step.op, Block)]
    drawn_j = 0.0
    for kernel in (compute.kernel for block in blocks for op in block.ops for compute in kernels_of(op)):
        kind = load_class(kernel)
        assert kind is not None
        seconds = result.costs.kernel_s(kernel, result.costs.gpu, clock_hz)
        drawn_j += seconds * result.costs.intensity(kernel) * power.drawn_w(kind, clock_hz)
    assert 0.85 < (power.model.idle_w + drawn_j / spans.length_s) / power.model.limit_w < 1.01
    assert power.model.loads["matmul"].clock_hz < clock_hz < power.highest_hz


def test_bubbles_raise_clocks() -> None:
    """The same layers with one micro-batch a step: a stage of two (four) waits at least half (three quarters) of it, so
    that its clock is above that of a rank which has all layers; more so the longer it waits."""
    large = {"model__hidden": 8192, "model__heads": 64, "training__seq": 4096, "training__global_batch": 1}
    place = {"cluster": {"name": "hgx_h200_4gpu"}, "calibration": "h200-sxm-141gb"}
    alone, halves, quarters = (
        simulator.run(job(**large) | {"parallelism": {"pp": stages}} | place).spans.clocks_hz for stages in (1, 2, 4)
    )
    assert alone[0] < min(halves.values())
    assert max(halves.values()) < min(quarters.values())


def test_clocks_that_never_settle_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first play is at the clocks of a step without waiting, and stages wait: they need a second one."""
    placed = {"cluster": {"name": "hgx_h200_4gpu"}, "calibration": "h200-sxm-141gb", "parallelism": {"pp": 4}}
    large = job(model__hidden=8192, model__heads=64, training__seq=4096, training__global_batch=1) | placed
    assert UNSETTLED not in simulator.run(large).warnings
    # The package has a function of the module's name.
    monkeypatch.setattr(importlib.import_module("simulator.engine.simulate"), "MOST_PLAYS", 1)
    assert UNSETTLED in simulator.run(large).warnings


@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 10.0])
def test_a_gpu_of_another_speed_leaves_the_clocks_of_others(speed: float) -> None:
    """Two replicas meet once a step. The step is as long as that of two slow GPUs, or of two usual ones where one is
    faster, to what clocks may be off: that one waits saves it energy, and the other none."""
    large = job(model__hidden=8192, model__heads=64, training__seq=2048, training__global_batch=8)
    large |= {"parallelism": {"dp": 2, "zero": 0}, "calibration": "h100-sxm-80gb"}

    def step_s(*speeds: float) -> float:
        scales = [{"gpu": f"node0.gpu{gpu}", "speed_scale": one} for gpu, one in enumerate(speeds)]
        return simulator.run(large | {"cluster": {"name": "dgx_h100", "overrides": scales}}).spans.length_s

    slowest = min(speed, 1.0)
    assert step_s(1.0, speed) == pytest.approx(step_s(slowest, slowest), rel=0.005)


@pytest.mark.parametrize("size", [256, 1024, 4096])
def test_what_leaves_units_idle_draws_less(size: int) -> None:
    """Energy goes with FLOPs: intensity times seconds is FLOPs over the rate of a large product, whatever the size."""
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"))
    product, large = Matmul(size, size, size), Matmul(8192, 8192, 8192)
    drawing_s = costs.intensity(product) * costs.kernel_s(product, costs.gpu)
    assert drawing_s / product.flops == pytest.approx(costs.kernel_s(large, costs.gpu) / large.flops)
    assert costs.intensity(Matmul(256, 256, 256)) < 0.2 < costs.intensity(product) or size == 256


@pytest.mark.parametrize("nbytes", [1e4, 1e6, 1e8, 1e10])
def test_streams_draw_while_their_bytes_move(nbytes: float) -> None:
    """A kernel of start + bytes / rate draws for the second part: all of its time in the limit of many bytes."""
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"), pytorch.FRAMEWORK)
    curve = load_profile("h200-sxm-141gb").kernels.memory.eager["copy"]
    kernel = Memory("copy", nbytes, nbytes)
    seconds = costs.kernel_s(kernel, costs.gpu)
    assert costs.intensity(kernel) * seconds == pytest.approx(seconds - curve.start_s)
    assert costs.intensity(Memory("copy", 1e13, 1e13)) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("direction", [False, True])
def test_attention_on_few_sms_is_priced_at_a_higher_clock(direction: bool) -> None:
    """Alone, what keeps half of the SMs busy draws half, so that the limit leaves it the highest clock: there it takes
    its price. What draws as much as the attention that the class was measured with takes (priced at / highest) ^
    exponent of it, and both follow the clock alike."""
    costs = Costs.from_profile(load_profile("h200-sxm-141gb"), pytorch.FRAMEWORK)
    assert costs.power is not None
    load, highest_hz = costs.power.model.loads["attention"], costs.power.highest_hz
    few = Attention(1, 8, 8, 1024, 1024, 128, backward=direction)
    large = Attention(4, 16, 16, 4096, 4096, 128, backward=direction)
    assert costs.intensity(few) < 0.6
    assert costs.intensity(large) == pytest.approx(1.0)
    faster = (load.priced_at_hz / load.highest_clock_hz) ** load.speed_exponent
    for kernel, expected in ((few, 1.0), (large, faster)):
        price = costs.kernel_s(kernel, costs.gpu)
        assert costs.kernel_s(kernel, costs.gpu, highest_hz) == pytest.approx(expected * price)
        slower_hz = load.highest_clock_hz / 1.2
        slowed = costs.kernel_s(kernel, costs.gpu, slower_hz) / costs.kernel_s(kernel, costs.gpu, highest_hz)
        assert slowed == pytest.approx(1.2**load.speed_exponent)


def test_without_a_power_section_nothing_is_played_twice() -> None:
    result = simulator.run(job())
    assert result.costs.power is None
    assert result.spans.clocks_hz == {}


@pytest.mark.parametrize(("schedule", "fold"), grid(["1f1b", "zb_h1"], [False, True], every=2))
def test_clocks_do_not_turn_on_how_a_step_is_played(schedule: str, fold: bool) -> None:
    """Passes cut at their collectives, or played in one event each, draw the same over the same time."""
    parallel = {"pp": 2, "tp": 2, "dp": 2, "zero": 2 if schedule == "1f1b" else 0, "schedule": schedule}
    large = job(model__hidden=4096, model__heads=32, training__seq=2048, training__global_batch=16)
    placed = large | {"parallelism": parallel, "cluster": {"name": "dgx_h100"}, "calibration": "h100-sxm-80gb"}
    plain, quick = (
        simulator.run(placed, set={"simulation.coalesce": coalesce, "simulation.fold": fold}).spans
        for coalesce in (False, True)
    )
    assert set(plain.clocks_hz.values()) != {None}
    assert plain.clocks_hz == quick.clocks_hz
    assert plain.length_s == pytest.approx(quick.length_s, rel=1e-9)


def test_what_a_pass_draws_is_spread_alike_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communication inside a pass belongs to it, as one event or as many: what is averaged, before clocks are rounded
    to 1 MHz, is the same to a rounding."""
    traces: list[list[Any]] = []
    plain = PowerBudget.clock_hz

    def noted(self: PowerBudget, trace: Any, at_hz: float) -> float:
        traces[-1].append(trace)
        return plain(self, trace, at_hz)

    monkeypatch.setattr(PowerBudget, "clock_hz", noted)
    large = job(model__hidden=4096, model__heads=32, training__seq=2048)
    placed = large | {"parallelism": {"tp": 4, "dp": 2, "zero": 1}, "cluster": {"name": "dgx_h100"}}
    for coalesce in (False, True):
        traces.append([])
        simulator.run(placed, set={"simulation.coalesce": coalesce})
    assert len(traces[0]) == len(traces[1]) > 1
    for cut, whole in zip(*traces, strict=True):
        assert cut.pieces_s == pytest.approx(whole.pieces_s, rel=1e-9)
        assert set(cut.seconds) == set(whole.seconds)
        for kind, seconds in whole.seconds.items():
            assert cut.seconds[kind] == pytest.approx(seconds, rel=1e-9, abs=1e-9 * float(whole.pieces_s.sum()))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("matmul", "highest_clock_hz", 2.5e9),
        ("matmul", "clock_hz", 2.1e9),
        ("communication", "watts", 50.0),
        ("memory", "power_exponent", 1e6),
    ],
)
def test_figures_that_no_gpu_has_are_refused(kind: Any, key: str, value: float) -> None:
    model = as_data(budget().model)
    model["loads"][kind][key] = value
    with pytest.raises((InputError, ValidationError), match=key):
        validated(Power, model)


def test_above_its_highest_clock_a_class_is_as_at_it() -> None:
    """One rule for prices, watts and the pieces of a step: above it kernels take and draw what they do at the
    class's highest; below, time goes with clock ^ -speed_exponent."""
    model = load_profile("h200-sxm-141gb").power
    assert model is not None
    of_h200, product = PowerBudget(model), Matmul(8192, 8192, 8192)
    load = model.loads["matmul"]
    own_hz, low_hz = load.highest_clock_hz, 0.5 * load.highest_clock_hz
    for above_hz in np.linspace(own_hz, model.highest_clock_hz, 5)[1:]:
        assert of_h200.slowness(product, above_hz) == of_h200.slowness(product, own_hz)
        assert of_h200.drawn_w("matmul", above_hz) == of_h200.drawn_w("matmul", own_hz)
        assert longer(load, low_hz, above_hz) == pytest.approx(2**load.speed_exponent)
        assert longer(load, above_hz, low_hz) == pytest.approx(2**-load.speed_exponent)
    clocks = np.array([low_hz, own_hz, model.highest_clock_hz])
    assert of_h200.drawn_w("matmul", clocks) == pytest.approx([of_h200.drawn_w("matmul", float(hz)) for hz in clocks])
    ratio = of_h200.slowness(product, low_hz) / of_h200.slowness(product, own_hz)
    assert ratio == pytest.approx(longer(load, low_hz, own_hz))

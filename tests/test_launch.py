"""Host costs by kind of op: what is issued, what it takes, and that small models run at the pace of the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from calibration.fit import launch as launch_fit
from calibration.fit.cases import read
from simulator.cluster.ideal import ideal_cluster
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.costs.launch import issued
from simulator.engine import simulate
from simulator.program import Attention, Block, Comm, Compute, Fixed, Matmul, Memory, Program, Role, Step
from tests.quick import ISSUED

MEASURED = Path(__file__).parent.parent / "calibration" / "measurements" / "h100-sxm-80gb"
PRODUCT, NORM = Matmul(8, 8, 8), Memory("norm", 1.0, 1.0)


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (Compute("qkv", PRODUCT, "F"), "forward_matmul"),
        (Compute("qkv", PRODUCT, "R"), "forward_matmul"),
        (Compute("qkv", PRODUCT, "W"), "backward_matmul"),
        (Compute("norm", NORM, "F"), "forward_norm"),
        (Compute("norm", Memory("rms_norm_bwd", 1.0, 1.0), "B"), "backward_norm"),
        (Compute("core", Attention(1, 1, 1, 8, 8, 8), "F"), "forward_attention"),
        (Compute("gelu", Memory("activation", 1.0, 1.0), "B"), "backward_other"),
        (Compute("adam", Memory("optimizer", 1.0, 1.0), "O"), "optimizer"),
        (Comm("x", "all_reduce", 8.0, "tp", "tp"), "collective"),
        (Comm("x", "send", 8.0, "pp", "pp", peer=1), "p2p"),
    ],
)
def test_an_op_is_issued_as_its_kind(op: Compute | Comm, kind: str) -> None:
    assert issued(op) == kind
    assert kind in ISSUED


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
    fitted = launch_fit.fit(read(MEASURED), load_profile("h100-sxm-80gb")).figures
    for implementation, shipped in load_profile("h100-sxm-80gb").host.launch_s.items():
        found = fitted[f"host.launch_s.{implementation}"]
        assert shipped.forward_s == pytest.approx(found["forward_s"], rel=1e-3)
        assert shipped.backward_s == pytest.approx(found["backward_s"], rel=1e-3)
        assert shipped.collective_s == pytest.approx(found["collective_s"], rel=1e-3)

"""What follows a step's backward passes is charged for where it happens, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import run
from simulator.step_result import StepResult
from simulator.units import DTYPE_BYTES
from tests.support.jobs import job


def played(**changes: Any) -> StepResult:
    return run(job(**{"parallelism__dp": 4} | changes))


def seconds(result: StepResult, name: str) -> float:
    """Of all kernels of a rank whose name has ``name`` in it."""
    rows = result.timeline
    chosen = rows[rows["name"].str.contains(name, regex=False) & (rows["rank"] == rows["rank"].min())]
    return float((chosen["end_s"] - chosen["start_s"]).sum())


def moved(result: StepResult, name: str) -> float:
    """Bytes that kernels of this name read and write on a rank."""
    steps = [step for _, _, step in result.program.roles[0].steps()]
    ops = [op for step in steps for op in getattr(step.op, "ops", ())]
    return float(sum(op.kernel.bytes for op in ops if op.name == name))


@pytest.mark.parametrize("zero", [2, 3])
def test_states_that_are_not_divided_gather_nothing(zero: int) -> None:
    """hsdp 1 puts a whole state on every rank, as without ZeRO: nothing is whole for a while beside it."""
    whole, alone = played(), played(parallelism__zero=zero, parallelism__hsdp=1)
    assert alone.to_dict()["memory"]["peak_allocated_bytes"] == whole.to_dict()["memory"]["peak_allocated_bytes"]
    sharded = played(parallelism__zero=zero).to_dict()["memory"]["per_stage"][0]["contents"]
    assert sharded["gathered"] > 0


@pytest.mark.parametrize(
    ("zero", "away", "zeroed"), [(0, "none", True), (2, "none", True), (1, "cpu", True), (2, "cpu", False)]
)
def test_buffers_are_cleared_where_there_are_any(zero: int, away: str, zeroed: bool) -> None:
    """Under ZeRO-2 with the optimizer on the host gradients are handed over as they are made."""
    result = played(parallelism__zero=zero, parallelism__offload={"optimizer": away})
    assert (moved(result, "optimizer.zero gradients") > 0) == zeroed


@pytest.mark.parametrize(("implementation", "name"), [("fused", "optimizer.adam"), ("foreach", "optimizer.addcmul")])
def test_a_frozen_second_moment_is_only_read(implementation: str, name: str) -> None:
    """Adam reads w, g, m, v and writes w, m, v, 7 times 4 bytes a parameter in one kernel; 1-bit Adam writes no v, and
    where each operation is a kernel has none that does."""
    plain, frozen = (
        moved(played(training__optimizer={"implementation": implementation}, parallelism__grad_compression=kind), name)
        for kind in ("none", "1bit")
    )
    assert frozen == (pytest.approx(plain * 6 / 7) if implementation == "fused" else 0.0)
    assert plain > 0


@pytest.mark.parametrize(("zero", "copies"), [(0, 2), (1, 1)])
def test_copies_to_buckets_take_time(zero: int, copies: int) -> None:
    """All gradients are read and written once for the bucket, and once more after an all-reduce."""
    section = {"parallelism__zero": zero, "parallelism__bucket_bytes": 2_000_000}
    plain, copied = played(**section), played(**section, parallelism__copy_to_buckets=True)
    gradients = plain.memories[0].static.state.gradients
    assert DTYPE_BYTES[plain.workload.training.grad_dtype] == 4
    assert moved(copied, "dp.copy grads") == pytest.approx(2 * gradients, rel=1e-6)
    assert moved(copied, "dp.copy back grads") == pytest.approx(2 * gradients * (copies - 1), rel=1e-6)
    assert seconds(plain, "dp.copy") == 0.0 < seconds(copied, "dp.copy")
    assert copied.spans.step_time_s > plain.spans.step_time_s


def test_waiting_for_servers_is_exposed_communication() -> None:
    """Between a push and a pull servers update weights: workers wait for dp then, and have no optimizer to run but the
    clearing of buffers."""
    result = played(parallelism__data_parallel="parameter_server")
    parts = result.to_dict()["time_breakdown_s"]
    rows = result.timeline
    updates = rows[(rows["kind"] == "server_update") & (rows["rank"] == rows["rank"].min())]
    updating = float((updates["end_s"] - updates["start_s"]).sum())
    assert parts["optimizer"] < 0.1 * updating
    assert parts["exposed"]["dp"] > 0.5 * updating > 0


@pytest.mark.parametrize(("layout", "kind", "other"), [((4, 1), "tp", "pp"), ((1, 4), "pp", "tp")])
def test_a_norm_that_is_validated_later_is_of_the_ranks_that_agree(
    layout: tuple[int, int], kind: str, other: str
) -> None:
    """Without a pipeline nothing is sent between stages, be the optimizer in step or not."""
    tp, pp = layout
    keys = {"parallelism__dp": 1, "parallelism__tp": tp, "parallelism__pp": pp, "parallelism__optimizer_sync": False}
    result = played(**keys, training__grad_clip=1.0)
    assert result.timeline["name"].str.contains("grad norm").any()
    communication = result.to_dict()["communication"]
    assert communication[kind]["time_s"] > 0
    assert communication[other]["time_s"] == 0

"""Memory over time of hand-made Timelines: peaks, what is in them, and the advice that follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from simulator.analysis.memory import (
    advice,
    memory_curve,
    memory_of_ranks,
    memory_report,
    overhead_bytes,
    worst_per_stage,
)
from simulator.model import StateBytes
from simulator.schedules import SCHEDULES
from simulator.units import GiB
from tests.timelines import Span, pipeline, template, timeline

STATE = StateBytes(weights=2 * GiB, gradients=5 * GiB, optimizer=12 * GiB)


def workload(**changes: Any) -> Any:
    """A workload of 8 layers with the attributes that advice reads."""
    parts = {
        "model": {"layers": 8, "heads": 16, "kv_heads": 16, "hidden": 1024, "attention": "flash"},
        "training": {"seq": 1024, "micro_batch": 1, "recompute": SimpleNamespace(granularity="none")},
        "parallelism": {
            "tp": 1, "pp": 2, "dp": 4, "vpp": 1, "zero": 0, "schedule": "1f1b", "sequence_parallel": False,
            "layers_per_stage": (4, 4), "plan": SCHEDULES["1f1b"], "stages_of": lambda rank: (rank,),
        },
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        parts[section][name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in parts.items()})


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_1f1b_holds_as_many_activations_as_the_depth_that_is_left(p: int, m: int) -> None:
    # 1 GiB a micro-batch: stage s holds min(m, p - s) of them, beside its 19 GiB of state and half a GiB of overhead.
    play = pipeline("1f1b", p, m, activation=GiB)
    memories = memory_of_ranks(play, dict.fromkeys(range(p), STATE), dict.fromkeys(range(p), 0.5 * GiB))
    for memory in memories:
        expected = min(m, p - memory.stage)
        assert memory.activations == pytest.approx(expected * GiB)
        assert memory.in_flight == expected
        assert memory.allocated == pytest.approx((19 + expected) * GiB)
        assert memory.total == pytest.approx((19.5 + expected) * GiB)


def test_workspace_counts_only_while_its_op_runs() -> None:
    # 0-1 holds 4, 1-2 needs 3 for itself beside them: 7 at 1 s. The third op allocates as the second gives back.
    op = template(("a", "norm", "compute", 1.0))
    play = timeline(
        [
            Span(0, "compute", op, 0.0, alloc=4.0, stage=0, microbatch=0),
            Span(0, "compute", op, 1.0, workspace=3.0, free=4.0, phase="B", stage=0, microbatch=0),
            Span(0, "compute", op, 2.0, alloc=5.0, free=5.0, stage=0, microbatch=1),
        ]
    )
    (memory,) = memory_of_ranks(play, {0: StateBytes(0, 0, 0)}, {0: 0.0})
    assert (memory.activations, memory.workspace, memory.peak_at_s) == (7.0, 3.0, 1.0)
    times, held, _ = memory_curve(play, 0)
    assert times[-1] == 3.0
    assert held[-1] == 0.0


def test_report_takes_the_fullest_rank_of_each_stage() -> None:
    play = pipeline("1f1b", 2, 4, activation=GiB)
    both = memory_of_ranks(play, {0: STATE, 1: STATE}, {0: 0.0, 1: 3 * GiB})
    report = memory_report(both, capacity_bytes=24 * GiB)
    assert report["fits"]
    assert report["peak_bytes"] == 23 * GiB  # stage 1: 19 of state, 1 of activations, 3 of overhead
    assert report["peak_allocated_bytes"] == 21 * GiB  # stage 0: 19 and 2
    for row in report["per_stage"]:
        parts = ("weights", "gradients", "optimizer", "activations", "buffers")
        assert sum(row[part] for part in parts) == pytest.approx(row["peak"])
    assert not memory_report(both, capacity_bytes=22 * GiB)["fits"]
    assert [memory.stage for memory in worst_per_stage(both)] == [0, 1]


def test_advice_names_what_is_lacking_and_what_each_change_gives() -> None:
    play = pipeline("1f1b", 2, 4, activation=4 * GiB)
    memories = memory_of_ranks(play, {0: STATE, 1: STATE}, {0: 0.0, 1: 0.0})
    assert advice(memories, 80 * GiB, workload()) == []
    lines = advice(memories, 20 * GiB, workload())
    # 19 + 2 x 4 = 27 GiB of 20. ZeRO-1 over 4 replicas leaves a quarter of 12 GiB; halving everything frees 13.5 GiB;
    # full recompute keeps 2 x 4 inputs of 2 MiB (1,024 x 1,024 x 2 bytes) and one layer (1 GiB) of the 8 GiB.
    assert lines[0] == "stage 0 needs 27.0 GiB, 7.0 GiB more than the 20.0 GiB of its GPU"
    assert "parallelism.zero: 1 would free about 9.0 GiB: enough" in lines
    assert "training.recompute: full would free about 7.0 GiB: not enough alone" in lines
    assert "parallelism.tp: 2 would free about 13.5 GiB: enough" in lines
    # With 2 layers of capacity less nothing suffices alone; the first changes that do together are named.
    lines = advice(memories, 12 * GiB, workload())
    assert lines[-1] == "together: parallelism.zero: 1, training.recompute: full"


def test_advice_knows_what_does_not_help() -> None:
    # One replica has nobody to share the optimizer with; full recompute is already on; 16 heads do not split in 32.
    play = pipeline("1f1b", 2, 4, activation=4 * GiB)
    memories = memory_of_ranks(play, {0: STATE, 1: STATE}, {0: 0.0, 1: 0.0})
    spent = workload(
        parallelism__dp=1, parallelism__tp=16, training__recompute=SimpleNamespace(granularity="full"), model__layers=2
    )
    assert advice(memories, 20 * GiB, spent)[1:] == ["all of these together are not enough"]


def test_gpipe_is_told_of_1f1b_and_unfused_attention_of_selective_recompute() -> None:
    play = pipeline("gpipe", 2, 8, activation=GiB)
    memories = memory_of_ranks(play, {0: STATE, 1: STATE}, {0: 0.0, 1: 0.0})
    # Stage 0 holds 8 GiB where 1F1B holds 2; attention is 5 a s / h = 80 of 34 + 80 of what a layer keeps.
    lines = advice(memories, 20 * GiB, workload(parallelism__schedule="gpipe", model__attention="unfused"))
    assert "parallelism.schedule: 1f1b would free about 6.0 GiB: not enough alone" in lines
    assert f"training.recompute: selective would free about {8 * 80 / 114:.1f} GiB: not enough alone" in lines


def test_overhead_grows_with_communicators() -> None:
    assert 0 < overhead_bytes(0) < overhead_bytes(1) < overhead_bytes(4) < 3 * GiB

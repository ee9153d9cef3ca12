"""What is said to make a job fit, against simulating the job with that change."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.analysis.advice import CANDIDATES, advice, changed, needed_bytes
from simulator.analysis.memory import RankMemory
from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.model import StateBytes
from simulator.units import GiB

JOBS: dict[str, dict[str, Any]] = {
    # Unfused attention with dropout: selective recompute and flash attention save much.
    "pipeline": {"parallelism.pp": 2, "parallelism.dp": 2},
    "gpipe": {"parallelism.pp": 2, "parallelism.dp": 2, "parallelism.schedule": "gpipe"},
    # Chunks of a rank keep different amounts: the last one has the logits of a large vocabulary.
    "chunks": {
        "parallelism.pp": 2,
        "parallelism.dp": 2,
        "parallelism.vpp": 2,
        "parallelism.schedule": "interleaved",
        "model.kv_heads": 4,
        "model.vocab": 128_000,
        "model.activation": "swiglu",
    },
    "fp32 without sequence parallelism": {
        "parallelism.tp": 2,
        "parallelism.dp": 2,
        "parallelism.sequence_parallel": False,
        "parallelism.scatter_gather_p2p": True,
        "training.precision": "fp32",
    },
    # One replica: more tensor or pipeline parallelism needs more GPUs, and there is nobody to share the optimizer with.
    "one replica": {"parallelism.tp": 2, "parallelism.pp": 4, "model.dropout": 0.0},
}


def job(changes: dict[str, Any]) -> Workload:
    base: dict[str, Any] = {
        "name": "tiny",
        "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50_000, "attention": "unfused", "dropout": 0.1},
        "training": {"seq": 1024, "micro_batch": 2, "global_batch": 16},
        "cluster": "dgx_a100",
    }
    return load_workload(base, changes)


def simulated(workload: Workload) -> float:
    peak: float = run(workload).to_dict()["memory"]["peak_bytes"]
    return peak


@pytest.mark.parametrize("name", JOBS)
def test_what_a_change_is_said_to_need_is_what_the_changed_job_needs(name: str) -> None:
    workload = job(JOBS[name])
    now = simulated(workload)
    assert needed_bytes(workload) == pytest.approx(now, rel=0.03)
    found = [step for candidate in CANDIDATES if (step := changed(workload, candidate)) is not None]
    assert len(found) >= 4
    for setting, other, needed in found:
        assert needed == pytest.approx(simulated(other), rel=0.03), setting
        assert needed < now


def settings(name: str) -> list[dict[str, Any]]:
    workload = job(JOBS[name])
    return [step[0] for candidate in CANDIDATES if (step := changed(workload, candidate)) is not None]


def test_only_what_is_legal_and_helps_is_proposed() -> None:
    # Both replicas give their GPUs to a wider layout; with one replica the cluster grows instead.
    assert {"parallelism.tp": 2, "parallelism.dp": 1} in settings("pipeline")
    assert {"parallelism.zero": 1} in settings("pipeline")
    assert {"parallelism.tp": 4, "cluster.nodes": 2} in settings("one replica")
    assert {"parallelism.zero": 1} not in settings("one replica")
    # 1F1B has GPipe's bubble and holds less; from 1F1B nothing has less of both.
    assert {"parallelism.schedule": "1f1b"} in settings("gpipe")
    assert not any("parallelism.schedule" in setting for setting in settings("pipeline"))
    # What a legal change needs beside it is part of it.
    both = {"parallelism.sequence_parallel": True, "parallelism.scatter_gather_p2p": False}
    assert both in settings("fp32 without sequence parallelism")


def fullest(total: float) -> RankMemory:
    return RankMemory(0, 1, StateBytes(total, 0.0, 0.0), 0.0, 0.0, 0.0, 0.0, 1)


def test_advice_says_what_lacks_what_is_enough_and_what_is_together() -> None:
    workload = job(JOBS["pipeline"])
    needs = needed_bytes(workload)
    worst = [fullest(needs)]
    assert advice(worst, needs, workload) == []
    zero = changed(workload, CANDIDATES[2])
    assert zero is not None
    lines = advice(worst, zero[2], workload)
    assert lines[0].startswith(f"stage 1 needs {needs / GiB:.1f} GiB, ")
    assert f"parallelism.zero: 1 would free about {(needs - zero[2]) / GiB:.1f} GiB: enough" in lines
    assert not lines[-1].startswith("together")
    # Less than any change alone needs: the first that are enough together, in the order of their cost in speed.
    least = min(step[2] for candidate in CANDIDATES if (step := changed(workload, candidate)) is not None)
    lines = advice(worst, 0.95 * least, workload)
    assert lines[-1].startswith("together: model.attention: flash, parallelism.zero: 1")
    assert all(line.endswith("not enough alone") for line in lines[1:-1])
    assert advice(worst, 0.1 * GiB, workload)[-1].startswith("all of these together are not enough: about ")

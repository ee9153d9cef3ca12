"""What holds of every step, whatever the layout: random legal jobs, played twice."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from simulator.analysis.memory import memory_curve
from simulator.api import Result
from simulator.engine.invariants import check
from simulator.errors import InputError
from tests.jobs import job
from tests.quick import load, play

SPEEDS: list[dict[str, float]] = [{}, {"dp": 0.8}, {"pp": 0.7, "dp": 0.9}, {"tp": 0.9, "pp": 0.9, "dp": 0.5, "cp": 0.7}]


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A small model on up to 16 GPUs, every key that changes a program drawn at random."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    tp, pp, dp = one((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 4), (2, 2, 2), (1, 4, 2), (4, 2, 1), (4, 2, 2), (2, 4, 2))
    cp, method = one((1, "ring"), (1, "ring"), (2, "ring"), (2, "ulysses")) if tp * pp * dp <= 8 else (1, "ring")
    schedule, vpp = one(("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)) if pp > 1 else ("1f1b", 1)
    workload = job()
    workload["model"] |= {
        "layers": pp * vpp * one(1, 2),
        "hidden": 64 * one(1, 2),
        "heads": 4,
        "kv_heads": one(4, 2),
        "vocab": one(500, 1000),
        "activation": one("gelu", "swiglu"),
        "norm": one("layernorm", "rmsnorm"),
        "position": one("learned", "rope"),
        "bias": one(True, False),
        "tied_embeddings": one(True, False),
        "attention": one("flash", "unfused") if cp == 1 or method == "ulysses" else "flash",
        "sliding_window": one(None, 10, 64) if cp == 1 or method == "ulysses" else None,
        "dropout": one(0.0, 0.1),
    }
    workload["training"] |= {
        "seq": one(16, 64),
        "micro_batch": one(1, 2),
        "precision": one("bf16", "fp16", "fp32"),
        "grad_dtype": one("fp32", "bf16"),
        "grad_clip": one(None, 1.0),
        "recompute": one("none", "selective", "full", {"granularity": "full", "layers": 1}),
        "implementation": one("eager", "fused", "compiled"),
    }
    workload["training"]["global_batch"] = workload["training"]["micro_batch"] * dp * pp * one(1, 2, 3)
    workload["parallelism"] = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "cp_method": method,
        **({"cp_layout": one("zigzag", "contiguous")} if method == "ring" else {}),
        "vpp": vpp,
        "schedule": schedule,
        "sequence_parallel": tp > 1 and one(True, False),
        "vocab_parallel": one(True, False),
        "zero": one(0, 1, 2, 3),
        "overlap": {key: one(True, False) for key in ("grad_reduce", "p2p", "param_gather", "tp")},
        "bucket_bytes": one(1, 20_000, 25_000_000),
        "rank_order": one("tp-cp-dp-pp", "tp-pp-dp-cp", "dp-cp-tp-pp"),
    }
    if workload["parallelism"]["zero"] == 3:
        workload["parallelism"] |= {"prefetch": one(0, 1, 2), "reshard_after_forward": one(True, False)}
    if workload["parallelism"]["zero"] and dp % 2 == 0:
        workload["parallelism"]["hsdp"] = one(None, 2)
    # There are trees for all-reduces only.
    algorithms = ("auto", "ring") if workload["parallelism"]["zero"] else ("auto", "ring", "tree")
    workload["parallelism"]["collective_algorithm"] = one(*algorithms)
    if tp > 1 and not workload["parallelism"]["sequence_parallel"]:
        workload["parallelism"]["scatter_gather_p2p"] = one(True, False)
    return workload


def leaves(node: dict[str, Any]) -> list[float]:
    return [x for value in node.values() for x in (leaves(value) if isinstance(value, dict) else [value])]


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate, Phase.shrink])
@given(jobs(), st.sampled_from(SPEEDS))
def test_every_legal_job_gives_a_possible_step(description: dict[str, Any], speeds: dict[str, float]) -> None:
    try:
        workload = load(description)
    except InputError:
        reject()
    first, second = play(workload, speeds), play(workload, speeds)
    timeline = first.spans

    # Nothing overlaps, nothing runs before what it needs, links keep to their capacity, bytes are conserved.
    check(first.program, timeline)

    # No rank is done before it has done its own work at full speed.
    work = np.array([template.length_s for template in timeline.templates])[timeline.template]
    in_lane = np.array(timeline.lane_names)[timeline.lane] == "compute"
    for rank in timeline.ranks:
        assert work[(timeline.rank == rank) & in_lane].sum() <= timeline.step_time_s * (1 + 1e-9)

    # Activations are never negative, and all given back at the end.
    for rank in timeline.ranks:
        _, held, workspace, *_ = memory_curve(timeline, rank)
        most = float(held.max())
        assert held.min() >= -1e-9 * most
        assert workspace.min() >= -1e-9 * float(workspace.max())
        assert held[-1] == pytest.approx(0.0, abs=1e-9 * most)
        assert workspace[-1] == pytest.approx(0.0, abs=1e-9 * float(workspace.max()))

    # A step is cut up without rest, twice over: by what ranks do, and along the critical path.
    result = first.to_dict()
    parts = leaves(result["time_breakdown_s"])
    assert min(parts) >= -1e-9 * timeline.step_time_s
    assert sum(parts) == pytest.approx(timeline.step_time_s, rel=1e-9)
    assert sum(part["seconds"] for part in result["critical_path"]) == pytest.approx(timeline.step_time_s, rel=1e-9)

    # The FLOPs of the rows, every rank's, are those that the model's formula gives for the kernels.
    rows = timeline.rows()
    like = np.array([timeline.ranks_like[int(rank)] for rank in rows["rank"]])
    products = np.isin(rows["kind"].astype(str), ["matmul", "attention"])
    flops = float((rows["flops"].astype(float) * like)[products].sum())
    assert flops == pytest.approx(result["hardware_flops_per_step"], rel=1e-9)
    assert result["hardware_flops_per_step"] >= result["model_flops_per_step_causal"] * (1 - 1e-9)

    # The same again, to the last digit; only the clock on the wall may differ.
    assert plain(first) == plain(second)


def plain(result: Result) -> str:
    answer = json.loads(json.dumps(result.to_dict()))
    del answer["simulation"]["wall_s"]
    return json.dumps(answer) + result.timeline.to_csv()

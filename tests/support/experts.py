"""Small jobs with experts for tests."""

from __future__ import annotations

from typing import Any

from simulator.api import run
from simulator.step_result import StepResult
from tests.support.jobs import FAST_HOSTS

MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "ffn_hidden": 256}
MLA: dict[str, Any] = {
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def job(**changes: Any) -> dict[str, Any]:
    """Two layers of 8 experts on DGX A100s. ``changes``: dotted keys with __ for the dot; ``moe`` adds to model.moe."""
    workload: dict[str, Any] = {
        "name": "experts",
        "model": {
            "layers": 2,
            "hidden": 256,
            "heads": 8,
            "vocab": 1024,
            "activation": "swiglu",
            "norm": "rmsnorm",
            "position": "rope",
            "bias": False,
            "tied_embeddings": False,
            "moe": MOE,
        },
        "training": {"seq": 128, "global_batch": 32},
        "parallelism": {},
        "cluster": {"name": "dgx_a100", "node": dict(FAST_HOSTS)},
    }
    workload["model"]["moe"] = MOE | changes.pop("moe", {})
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            workload[section][name] = value
        else:
            workload[section] = value
    return workload


def play(simulation: dict[str, bool] | None = None, **changes: Any) -> StepResult:
    return run(job(**changes) | ({"simulation": simulation} if simulation else {}))

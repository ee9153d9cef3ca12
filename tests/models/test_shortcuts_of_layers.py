"""Layers of DeepSeek-V4, encoders and CUDA graphs play alike with every shortcut and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import job
from tests.support.pattern_models import ENCODER, LLAMA, V4
from tests.support.random_checks import same_without_shortcuts
from tests.support.random_plays import Plays

MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 64}
JOBS: dict[str, dict[str, Any]] = {
    "compressed attention in several streams": {
        "model": LLAMA | V4 | {"mixers": ["shared_key", "compressed_sparse", "heavily_compressed"], "moe": MOE},
        "parallelism": {"pp": 2, "dp": 2, "ep": 2, "zero": 1},
    },
    "an encoder": {"model": LLAMA | {"encoder": ENCODER}, "parallelism": {"tp": 2, "pp": 2}},
    "graphs around experts": {
        "model": LLAMA | {"moe": MOE | {"beside_dense": True}, "norm_place": "both"},
        "parallelism": {"pp": 2, "dp": 2, "ep": 2},
        "framework": {"name": "megatron_core", "cuda_graphs": ["attn", "moe_router", "moe_preprocess"]},
        "cluster": {"name": "dgx_h100"},
    },
    "one graph": {
        "model": LLAMA,
        "parallelism": {"pp": 2, "dp": 2},
        "framework": {"name": "megatron_core", "cuda_graphs": ["full_iteration"]},
        "cluster": {"name": "dgx_h100"},
    },
}


@pytest.mark.parametrize("name", JOBS)
def test_shortcuts_change_nothing(name: str) -> None:
    assert list(same_without_shortcuts(Plays(job(**JOBS[name])))) == []

"""CUDA graphs, as Megatron-LM's options ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.config import load_workload
from simulator.launch_scripts.completion import workload_data
from tests.launch_scripts.scripts import COMMAND, script

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 512 "


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn", ("attn",)),
        ("--cuda-graph-impl local", ("attn", "mlp")),
        (
            f"{EXPERTS}--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router",
            ("attn", "moe_router"),
        ),
        (f"{EXPERTS}--external-cuda-graph", ("attn", "moe_router", "moe_preprocess")),
        (
            f"{EXPERTS}--moe-layer-freq ([0]*1+[1]*3) --cuda-graph-impl transformer_engine",
            ("attn", "mlp", "moe_router", "moe_preprocess"),
        ),
        (f"--hybrid-override-pattern {'M-M*' * 8} --cuda-graph-impl transformer_engine", ("attn", "mlp", "mamba")),
        (f"--hybrid-override-pattern {'M-' * 16} --cuda-graph-impl transformer_engine", ("mlp", "mamba")),
        ("--cuda-graph-impl full_iteration", ("full_iteration",)),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", ("full_iteration",)),
        ("--cuda-graph-impl none", ()),
        ("", ()),
    ],
)
def test_graphs_reach_the_workload(options: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Without a list graphs hold all of a layer that they can: of experts what stands before tokens travel."""
    read = script(tmp_path, "a.sh", COMMAND + options)
    workload = load_workload(workload_data(read, "job", "a.sh", "dgx_h100", None, {}))
    assert workload.framework.cuda_graphs == parts
    assert not [line for line in read.ignored if "cuda_graph" in line]


def test_graphs_of_padded_experts_are_told(tmp_path: Path) -> None:
    options = f"{EXPERTS}--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe"
    read = script(tmp_path, "a.sh", COMMAND + options)
    assert "cuda_graphs" not in str(read.workload["framework"])
    assert [line for line in read.ignored if "graphs of attn, moe are not simulated" in line]

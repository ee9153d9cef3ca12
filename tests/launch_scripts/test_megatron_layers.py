"""Megatron-LM's layers and stages that are not all alike: latent attention, windows, hybrids, uneven stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.errors import InputError
from simulator.launch_scripts.completion import workload_data
from tests.launch_scripts.scripts import COMMAND, script, value_at

LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
#: Megatron-LM's defaults of Mamba 2's sizes; heads are 2 * 4096 wide together, 64 each.
STATE = {"head_dim": 64, "state": 128, "groups": 8, "conv_width": 4, "chunk": 128}
#: Options -> keys of the workload; each option is understood, or changes nothing.
KEYS: list[tuple[str, dict[str, Any]]] = [
    ("--multi-latent-attention", {"model.mla": LATENT, "model.position": "rope"}),
    (
        "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-layernorm --kv-channels 100 "
        "--position-embedding-type rope",
        {"model.mla": {**LATENT, "kv_lora_rank": 512, "q_lora_rank": 1536}},
    ),
    ("--kv-channels 64", {"model.head_dim": 64}),
    ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"training.loss": "te_fused"}),
    ("--window-size 1024,0", {"model.sliding_window": 1025}),
    (
        "--window-size '(1024, 0)' --window-attn-skip-freq 6",
        {"model.sliding_window": 1025, "model.mixers": ["window"] * 5 + ["attention"]},
    ),
    (
        f"--window-size 1024,0 --window-attn-skip-freq [{','.join('01' * 16)}]",
        {"model.mixers": ["attention", "window"]},
    ),
    (
        f"--is-hybrid-model --hybrid-override-pattern {'M-M*' * 8} --mamba-num-heads 64 --mamba-num-groups 4 "
        "--hybrid-attention-ratio 0.25 --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec "
        "--squared-relu",
        {
            "model.mixers": ["mamba2", "none", "mamba2", "attention"],
            "model.mlps": ["none", "dense", "none", "none"],
            "model.mamba2": {**STATE, "heads": 64, "groups": 4},
            "model.activation": "relu2",
        },
    ),
    (
        f"--hybrid-layer-pattern {'M-' * 16}",
        {"model.mixers": ["mamba2", "none"], "model.mamba2": {**STATE, "heads": 128}},
    ),
    ("--context-parallel-size 2 --cp-comm-type a2a", {"parallelism.cp_method": "ulysses"}),
    ("--context-parallel-size 2 --cp-comm-type p2p", {"parallelism.cp_method": "ring"}),
    (
        "--num-experts 8 --expert-model-parallel-size 2 --moe-ffn-hidden-size 512 --overlap-moe-expert-parallel-comm "
        "--delay-wgrad-compute --moe-token-dispatcher-type alltoall",
        {"parallelism.overlap.expert_all_to_all": True, "parallelism.overlap.delayed_weight_grad": True},
    ),
    (
        "--num-experts 8 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
        "--moe-router-load-balancing-type seq_aux_loss",
        {"model.moe.balancing_loss": True},
    ),
    ("--no-gradient-accumulation-fusion", {"training.gradient_accumulation_fusion": False}),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5",
        {"parallelism.layers_per_stage": [5, 9, 9, 9]},
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 15",
        {"parallelism.layers_per_stage": [17, 15]},
    ),
    (
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
        {"parallelism.vpp": 2, "parallelism.layers_per_stage": [3, 6, 6, 1, 3, 6, 6, 1]},
    ),
    (
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
        {"parallelism.vpp": 2, "parallelism.schedule": "interleaved"},
    ),
]


@pytest.mark.parametrize(("options", "expected"), KEYS)
def test_layers_and_stages_reach_the_workload(options: str, expected: dict[str, Any], tmp_path: Path) -> None:
    """A window of 1024 tokens has the query's own beside them. Chunks of a rank share its layers evenly."""
    read = script(tmp_path, "a.sh", COMMAND + options)
    assert read.ignored == ()
    data = workload_data(read, "job", "a.sh", "dgx_h100", None, {})
    assert {key: value_at(data, key) for key in expected} == expected
    load_workload(data)


@pytest.mark.parametrize("options", ["--window-size -1,0", "--window-size 9,0 --window-attn-skip-freq 1"])
def test_a_window_that_no_layer_has_changes_nothing(options: str, tmp_path: Path) -> None:
    """-1 tokens are all; every first layer that sees all tokens is every layer."""
    read = script(tmp_path, "a.sh", COMMAND + options)
    assert "sliding_window" not in read.workload["model"]
    assert (read.ignored, "window_size" in read.neutral) == ((), True)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--is-hybrid-model --hybrid-override-pattern M-M*-", "hybrid_override_pattern: has 5 signs"),
        (f"--hybrid-override-pattern {'M-MG' * 8}", "hybrid_override_pattern: has signs of layers"),
        (f"--hybrid-layer-pattern '{'M-' * 16}|'", "hybrid_layer_pattern: has signs of layers"),
        ("--is-hybrid-model", "has layers of other kinds"),
        ("--heterogeneous-layers-config-path a.json", "has layers of other kinds"),
        ("--hybrid-attention-ratio 0.1", "has layers of other kinds"),
        ("--experimental-attention-variant gated_delta_net", "has layers of other kinds"),
        ("--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec", "has layers of other kinds"),
        ("--fp16", "fp16: cannot be on beside bf16"),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
            "32 layers over 4 pipeline ranks do not split into chunks of it",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6",
            "32 layers do not split so over 4 pipeline ranks",
        ),
        ("--decoder-seq-length 4 --global-batch-size -5", "global_batch_size: is negative"),
    ],
)
def test_what_megatron_would_not_run_or_is_not_read_is_refused(options: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        script(tmp_path, "a.sh", COMMAND + options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--num-layers-per-virtual-pipeline-stage 4", "num_layers_per_virtual_pipeline_stage 4: the pipeline has one"),
        ("--decoder-last-pipeline-num-layers 7", "decoder_last_pipeline_num_layers 7: the pipeline has one stage"),
        ("--num-layers 16", "said twice: num_layers 32, of which the last counts"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", "cp_comm_type p2p a2a"),
        ("--window-size 9,0 --window-attn-skip-freq ([1]*3+[0])*8", "window_attn_skip_freq"),
    ],
)
def test_what_does_not_count_is_told(options: str, told: str, tmp_path: Path) -> None:
    ignored = script(tmp_path, "a.sh", COMMAND + options).ignored
    assert [line for line in ignored if line.startswith(told)]

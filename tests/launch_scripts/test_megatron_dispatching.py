"""How tokens get to experts, as Megatron-LM's options say it, or their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.launch_scripts.completion import workload_data
from tests.launch_scripts.scripts import COMMAND, script

EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 512 "
SPREAD = f"{EXPERTS}--expert-model-parallel-size 8 --moe-grouped-gemm "
BRIDGE = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, GPTDatasetConfig, TrainingConfig

def small_pretrain_config():
    model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B").to_megatron_provider(load_weights=False)
    model.expert_model_parallel_size = 8
    {change}
    return ConfigContainer(
        model=model,
        train=TrainingConfig(global_batch_size=8, micro_batch_size=1),
        dataset=GPTDatasetConfig(sequence_length=4096),
        mixed_precision="bf16_mixed",
    )
"""


def dispatch(data: dict[str, Any]) -> tuple[Any, Any]:
    """Return the dispatcher and the fused permutation of a workload that runs; None where they are left out."""
    load_workload(data)
    return data["parallelism"].get("dispatcher"), data["training"].get("fused_permutation")


@pytest.mark.parametrize(
    ("options", "expected", "assumed"),
    [
        ("--moe-token-dispatcher-type alltoall --moe-permute-fusion", ("all_to_all", True), []),
        ("--moe-token-dispatcher-type alltoall", ("all_to_all", False), ["training.fused_permutation: False"]),
        ("--moe-token-dispatcher-type allgather --moe-permute-fusion", ("all_gather", True), []),
        (
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-permute-fusion "
            "--overlap-moe-expert-parallel-comm",
            ("hybridep", True),
            [],
        ),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep --moe-permute-fusion", ("deepep", True), []),
        (
            "--moe-token-dispatcher-type flex --moe-permute-fusion",
            ("deepep", True),
            ["moe_flex_dispatcher_backend: deepep"],
        ),
        ("", ("all_gather", True), ["parallelism.dispatcher: all_gather", "training.fused_permutation: True"]),
    ],
)
def test_a_dispatcher_reaches_the_workload(
    options: str, expected: tuple[Any, Any], assumed: list[str], tmp_path: Path
) -> None:
    """Without options Megatron-LM gathers tokens and permutes by PyTorch's kernels; flex means DeepEP.

    Those kernels are simulated around the all-to-all alone, and what stands in for them is told.
    """
    read = script(tmp_path, "a.sh", COMMAND + SPREAD + options)
    assert dispatch(workload_data(read, "job", "a.sh", "dgx_h100", None, {})) == expected
    lines = [line for line in read.assumed if "dispatcher" in line or "permut" in line]
    assert [line.startswith(start) for line, start in zip(lines, assumed, strict=True)] == [True] * len(assumed)
    assert (read.ignored, [name for name in read.neutral if name != "moe_grouped_gemm"]) == ((), [])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend mori", "its backend is none of"),
        ("--moe-token-dispatcher-type alltoall_seq", "moe_token_dispatcher_type alltoall_seq"),
        ("--moe-token-dispatcher-type allgather --tensor-model-parallel-size 2 --sequence-parallel", "all_gather is"),
        ("--moe-token-dispatcher-type allgather --transformer-impl local", "all_gather is simulated neither with"),
        ("--moe-permute-fusion --transformer-impl local", "moe_permute_fusion: local modules"),
        ("--transformer-impl local", "moe_grouped_gemm: experts of local modules compute one after another"),
    ],
)
def test_a_dispatcher_that_is_not_simulated_is_told(options: str, told: str, tmp_path: Path) -> None:
    """The all-to-all stands in for it, whose permutation is then as the script has it: of PyTorch's kernels."""
    read = script(tmp_path, "a.sh", COMMAND + SPREAD + options)
    data = workload_data(read, "job", "a.sh", "dgx_h100", None, {})
    assert dispatch(data)[0] in ("all_to_all", None)
    assert load_workload(data).training.fused_permutation is False
    assert [line for line in read.ignored if told in line]


def test_ranks_with_all_experts_need_no_dispatcher(tmp_path: Path) -> None:
    """Nothing is gathered, permuted by PyTorch's kernels all the same. One after another is not simulated, and told."""
    read = script(tmp_path, "a.sh", COMMAND + EXPERTS + "--moe-token-dispatcher-type allgather")
    assert dispatch(workload_data(read, "job", "a.sh", "dgx_h100", None, {})) == (None, False)
    assert read.neutral == ("moe_token_dispatcher_type",)
    assert [line for line in read.assumed if line.startswith("experts of a rank compute together")]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("", (None, None)),
        (
            "model.moe_token_dispatcher_type = 'flex'; model.moe_flex_dispatcher_backend = 'hybridep'",
            ("hybridep", None),
        ),
        ("model.moe_permute_fusion = False", (None, False)),
    ],
)
def test_classes_of_a_recipe_have_defaults_of_their_own(change: str, expected: tuple[Any, Any], tmp_path: Path) -> None:
    """Megatron-Bridge's classes set dispatcher and permutation, so that Megatron-LM's defaults count for nothing."""
    read = script(tmp_path, "recipe.py", BRIDGE.replace("{change}", change or "pass"))
    assert dispatch(workload_data(read, "job", "recipe.py", "dgx_h100", 8, {})) == expected
    assert read.ignored == ()

"""Kinds of scripts that hold the settings of FSDP or DeepSpeed: they are read alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.config import load_workload
from simulator.errors import InputError
from simulator.launch_scripts.completion import workload_data
from tests.launch_scripts.scripts import ACCELERATE, AXOLOTL, COMMAND, script


@pytest.mark.parametrize(
    ("words", "zero", "reshard"),
    [
        ("full_shard auto_wrap", 3, None),
        ("shard_grad_op auto_wrap", 3, False),
        ("hybrid_shard auto_wrap", 3, None),
        ("hybrid_shard_zero2 offload", 3, False),
        ("no_shard", 0, None),
    ],
)
def test_strategies_of_fsdp_are_one_in_all_kinds(words: str, zero: int, reshard: bool | None, tmp_path: Path) -> None:
    """The words of transformers' Trainer and the keys of accelerate come to the same; hybrid ones are told."""
    strategy = words.split()[0]
    offload = str("offload" in words).lower()
    trainer = f"torchrun --nproc_per_node 8 a.py --model_name_or_path m --bf16 --fsdp '{words}' --optim adamw_torch\n"
    section = f"{{fsdp_sharding_strategy: {strategy.upper()}, fsdp_offload_params: {offload}}}"
    accelerate = f"distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {section}\n"
    axolotl = AXOLOTL + f"fsdp: [{', '.join(words.split())}]\n"
    for name, text in (("a.sh", trainer), ("a.yaml", accelerate), ("a.yml", axolotl)):
        read = script(tmp_path, name, text)
        parallelism = read.workload["parallelism"]
        assert (parallelism["zero"], parallelism.get("reshard_after_forward")) == (zero, reshard)
        assert ("offload" in parallelism) is ("offload" in words)
        assert any("parallelism.hsdp" in line for line in read.ignored) is strategy.startswith("hybrid")


def test_a_false_value_is_a_value(tmp_path: Path) -> None:
    """FSDP 2's ``fsdp_reshard_after_forward: false`` is SHARD_GRAD_OP, and that option alone is named."""
    text = ACCELERATE.replace("fsdp_sharding_strategy: SHARD_GRAD_OP", "fsdp_reshard_after_forward: false")
    read = script(tmp_path, "accelerate.yaml", text)
    assert read.workload["parallelism"]["reshard_after_forward"] is False
    named = {entry.option for entry in read.understood if entry.key.startswith("parallelism")}
    assert named == {"fsdp_config.fsdp_reshard_after_forward"}


@pytest.mark.parametrize(
    ("options", "zero", "is_assumed"),
    [
        ("--use-torch-fsdp2", 3, False),
        ("--use-torch-fsdp2 --data-parallel-sharding-strategy optim", 3, False),
        ("--use-megatron-fsdp --use-distributed-optimizer", 0, True),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", 3, False),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", 2, False),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0, False),
        ("--use-distributed-optimizer", 1, False),
    ],
)
def test_megatrons_own_fsdp_shards_what_its_strategy_says(
    options: str, zero: int, is_assumed: bool, tmp_path: Path
) -> None:
    """Without one it shards nothing (`DistributedDataParallelConfig`); PyTorch's has no strategy."""
    read = script(tmp_path, "a.sh", f"{COMMAND}{options}\n")
    assert (read.workload["parallelism"]["zero"], read.ignored) == (zero, ())
    assert any(line.startswith("parallelism.zero: 0") for line in read.assumed) is is_assumed


def test_accelerate_reads_deepspeed_as_deepspeed_does(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: none, gradient_clipping: 1.0,
  gradient_accumulation_steps: 4, zero3_init_flag: true}
"""
    read = script(tmp_path, "a.yaml", text)
    alone = script(tmp_path, "ds_config.json")
    assert read.workload["parallelism"] == alone.workload["parallelism"]
    assert (read.accumulation, read.workload["training"]["grad_clip"]) == (4, 1.0)
    assert "deepspeed_config.zero_stage" in {entry.option for entry in read.understood}
    with pytest.raises(InputError, match="is no stage of ZeRO"):
        script(tmp_path, "a.yaml", text.replace("zero_stage: 3", "zero_stage: 7"))


@pytest.mark.parametrize(
    ("shards", "gpus", "expected"),
    [
        ("data_parallel_shard_degree = -1", 16, {"dp": 8, "zero": 3, "hsdp": 4}),
        ("", 16, {"dp": 8, "zero": 3, "hsdp": 4}),
        ("data_parallel_shard_degree = -1", 4, {"dp": 2, "zero": 0}),
        ("data_parallel_shard_degree = 4", 16, {"dp": 8, "zero": 3, "hsdp": 4}),
        ("data_parallel_shard_degree = 1", 4, {"dp": 2, "zero": 0}),
    ],
)
def test_torchtitan_shards_inside_each_of_two_copies(
    shards: str, gpus: int, expected: dict[str, int], tmp_path: Path
) -> None:
    """GPUs over tp 2 and two copies share a copy; where that is one, each replica is whole. Both degrees are told."""
    degrees = f"data_parallel_replicate_degree = 2\n{shards}\ntensor_parallel_degree = 2\n"
    read = script(tmp_path, "a.toml", f"[training]\nlocal_batch_size = 1\nseq_len = 512\n[parallelism]\n{degrees}")
    data = workload_data(read, "job", "a.toml", "dgx_h100", gpus, {"model.preset": "llama3-8b"})
    assert data["parallelism"] == {"tp": 2, **expected}
    load_workload(data)
    written = {f"parallelism.{line.split(' =')[0]}" for line in degrees.split("\n") if line}
    assert written <= {entry.option for entry in read.understood}


def test_copies_and_gpus_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Three replicas are not two copies; two copies of four shards with tp 2 are 16 GPUs and no others."""
    text = "[training]\nlocal_batch_size = 1\nseq_len = 512\n[parallelism]\ndata_parallel_replicate_degree = 2\n"
    with pytest.raises(InputError, match="3 replicas do not divide over 2 copies"):
        workload_data(script(tmp_path, "a.toml", text), "job", "a", "dgx_h100", 3, {"model.preset": "llama3-8b"})
    fixed = script(tmp_path, "a.toml", f"{text}data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\n")
    with pytest.raises(InputError, match="--gpus 16"):
        workload_data(fixed, "job", "a", "dgx_h100", 8, {"model.preset": "llama3-8b"})


@pytest.mark.parametrize("section", [[], True, 2, {"stage": "auto"}, {"stage": -1}])
def test_what_is_no_stage_of_zero_is_refused(section: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is no stage of ZeRO|must be a section"):
        script(tmp_path, "ds_config.json", json.dumps({"zero_optimization": section}))


def test_a_path_of_deepspeed_is_told_from_a_switch(tmp_path: Path) -> None:
    """``--deepspeed`` is a switch of DeepSpeedExamples and a path of transformers' Trainer."""
    (tmp_path / "z.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "odd_key": 1}))
    command = "torchrun --nproc_per_node 8 a.py --model_name_or_path m --bf16 --deepspeed"
    assert "deepspeed" in script(tmp_path, "a.sh", f"{command}\n").ignored
    assert script(tmp_path, "a.sh", f"{command} True\n").workload["framework"] == "hugging_face"
    read = script(tmp_path, "a.sh", f"{command} z.json\n")
    assert (read.workload["framework"], read.workload["parallelism"]["zero"]) == ("hugging_face_deepspeed", 2)
    assert read.ignored == (
        "model_name_or_path m: m is no model known here: give its config.json",
        "deepspeed.odd_key 1",
    )
    (tmp_path / "z.json").write_text("[1]")
    with pytest.raises(InputError, match=r"z\.json: must hold keys and values"):
        script(tmp_path, "a.sh", f"{command} z.json\n")


def test_gradients_of_every_micro_batch_are_reduced_where_the_script_says_so(tmp_path: Path) -> None:
    """Accelerate's ``sync_each_batch`` has effect on sharded models alone, and is named."""
    text = AXOLOTL + "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
    sharded = script(tmp_path, "a.yml", text + "fsdp: [full_shard, auto_wrap]\n")
    assert sharded.workload["parallelism"]["sync_each_micro_batch"] is True
    assert any(entry.option.endswith("sync_each_batch") for entry in sharded.understood)
    assert "sync_each_micro_batch" not in script(tmp_path, "b.yml", text).workload.get("parallelism", {})

"""Launch scripts: parallelism, batch and precision of each kind, what is assumed and ignored, and what is asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from simulator.cli.app import main
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.launch_scripts.completion import settled, workload_data
from simulator.launch_scripts.script import Unsaid
from simulator.launch_scripts.shell import launch_command, options_of
from tests.launch_scripts.scripts import (
    AXOLOTL,
    COMMAND,
    DEEPSPEED,
    LLAMA_FACTORY,
    MEGATRON,
    NEMO,
    SCRIPTS,
    TORCHTITAN,
    script,
    value_at,
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_becomes_the_workload_that_it_runs(name: str, tmp_path: Path) -> None:
    """Replicas are GPUs over tp x pp x cp; the global batch is micro-batch x accumulation x replicas."""
    added = dict(SCRIPTS[name][1])
    gpus = added.pop("gpus", None)
    data = workload_data(script(tmp_path, name), "job", name, "dgx_h100", gpus, added)
    assert {key: value_at(data, key) for key in SCRIPTS[name][2]} == SCRIPTS[name][2]
    load_workload(data)


def test_what_is_not_simulated_is_named_and_what_changes_nothing_too(tmp_path: Path) -> None:
    megatron = script(tmp_path, "megatron.sh")
    assert megatron.gpus == 32
    assert megatron.ignored == ("overlap_moe_magic", "not followed: for NODE in a b")
    assert {"lr", "save", "moe_grouped_gemm"} <= set(megatron.neutral)
    assert "save" in megatron.neutral  # $1, which no one simulates anyway
    assert "parallelism.enable_async_tensor_parallel" in script(tmp_path, "titan.toml").ignored
    assert script(tmp_path, "ds_config.json").ignored == ("zero_optimization.reduce_bucket_size 500000000.0",)
    factory = script(tmp_path, "factory.yaml")
    assert [text for text in factory.assumed if "configs/ds_z3.json, which is not there" in text]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds_z3.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert script(tmp_path, "factory.yaml").workload["parallelism"] == {"zero": 2}


def test_gpus_are_read_from_comments_alone(tmp_path: Path) -> None:
    text = TORCHTITAN.replace("# a preset for 64 H100 GPUs", '[job]\ndescription = "for 32 GPUs"')
    assert script(tmp_path, "titan.toml", text).gpus is None
    assert script(tmp_path, "titan.toml").gpus == 64


@pytest.mark.parametrize(("kind", "recompute"), [("1", "full"), ("2", "ops"), ("3", "ops"), ("op", "ops")])
def test_whole_layers_that_are_recomputed(kind: str, recompute: str, tmp_path: Path) -> None:
    """Every layer whole is full recomputation; one of every three has nothing that is like it, and is told so."""
    read = script(tmp_path, "titan.toml", TORCHTITAN.replace('"op"', f'"{kind}"'))
    assert read.workload["training"]["recompute"] == recompute
    nearest = [line for line in read.assumed if "nearest" in line]
    told = [f"training.recompute: ops, the nearest to one whole layer of every {kind}"]
    assert nearest == (told if kind in "23" else [])


@pytest.mark.parametrize(
    ("name", "added", "told"),
    [
        ("megatron.sh", [], "the machines: the script does not say it"),
        ("ds_config.json", ["--cluster", "dgx_h100"], "the model: the script does not say it"),
        ("axolotl.yml", ["--cluster", "dgx_h100"], "does not say how many GPUs it runs on"),
        ("megatron.sh", ["--cluster", "dgx_h100", "--gpus", "12"], "12 GPUs are no multiple of tp 2 x pp 4 x cp 1"),
        ("megatron.sh", ["--cluster", "dgx_h100", "--gpus", "0"], "out of range"),
        ("megatron.sh", ["--cluster", "dgx_h100", "--set", "parallelism=3"], "parallelism: must be a mapping"),
        (
            "megatron.sh",
            ["--cluster", "dgx_h100", "--set", "training=3"],
            "tokens per sequence: the script does not say",
        ),
        ("megatron.sh", ["--cluster", "dgx_h100", "--set", "parallelism.tp=x"], "parallelism.tp"),
        ("megatron.sh", ["--cluster", "dgx_h100", "--set", "parallelism.tp=0"], "parallelism.tp"),
        ("megatron.sh", ["--node", "dgx_h100"], "--cluster dgx_h100"),
        ("megatron.sh", ["--cluster", "dgx_h10"], "no cluster file of this name"),
    ],
)
def test_what_a_script_does_not_say_is_asked_for(
    name: str, added: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, name)
    with pytest.raises(SystemExit) as caught:
        main(["import", str(tmp_path / name), *added])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("none.sh", "echo hello\nA=1\n", "starts no training"),
        ("other.sh", "python train.py --alpha 1 --beta 2\n", "a training that is not known here"),
        ("bad.toml", "[model\n", "is not TOML"),
        ("list.json", "[1, 2]", "must hold"),
        ("empty.sh", "", "is empty"),
        ("long.sh", 'A="' + "x\n" * 100_001, "is too long for a launch script"),
        ("open.sh", 'A="' + "x\n" * 1000, "starts no training"),
        ("model.json", '{"architectures": ["LlamaForCausalLM"]}', "hf_config"),
        ("other.yaml", "a: 1\n", "is no launch script that is known here"),
        ("clip.sh", MEGATRON.replace("--overlap-moe-magic", "--clip-grad abc"), "clip_grad: is no number"),
        ("drop.sh", MEGATRON.replace("--hidden-dropout 0.0", "--hidden-dropout much"), "is no number"),
        ("experts.sh", MEGATRON.replace("--overlap-moe-magic", "--moe-expert-capacity-factor x"), "is no number"),
        ("norm.toml", TORCHTITAN.replace("seq_len", "max_norm = 'x'\nseq_len"), "training.max_norm: is no number"),
        ("norm.yml", AXOLOTL + "max_grad_norm: x\n", "max_grad_norm: is no number"),
        ("rate.yml", AXOLOTL.replace("0.05", "x"), "lora_dropout: is no number"),
        ("clip.json", json.dumps({**DEEPSPEED, "gradient_clipping": "x"}), "gradient_clipping: is no number"),
        ("clip.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: x}\n", "is no number"),
        ("endless.sh", MEGATRON.replace("--num-layers 32", "--num-layers inf"), "is no whole number"),
        ("nemo.yaml", NEMO.replace("gradient_clip_val: 1.0", "gradient_clip_val: x"), "trainer.gradient_clip_val"),
        ("word.sh", MEGATRON.replace("--num-layers 32", "--num-layers many"), "is no whole number"),
        ("rl.yaml", AXOLOTL + "rl: dpo\n", "one loss per token"),
        ("stage.json", '{"zero_optimization": {"stage": 7}}', "is no stage of ZeRO"),
        ("frozen.yaml", LLAMA_FACTORY.replace(": full", ": freeze"), "is no way of finetuning"),
    ],
)
def test_a_bad_file_gets_one_sentence(name: str, text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        script(tmp_path, name, text)
    assert told in str(caught.value)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.endswith(("yaml", "yml", "json"))])
def test_odd_values_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Each key holds a text and a list in turn; whatever comes of it, nothing but `InputError` is raised."""
    data = yaml.safe_load(SCRIPTS[name][0])
    for section in (data, *(inner for inner in data.values() if isinstance(inner, dict))):
        for key, value in list(section.items()):
            for odd in ("an odd text", [1, "b"]):
                section[key] = odd
                with contextlib.suppress(InputError):
                    workload_data(script(tmp_path, name, json.dumps(data)), "job", name, "dgx_h100", 8, {})
            section[key] = value


def test_steps_of_a_run_give_its_tokens_where_epochs_do_not_decide(tmp_path: Path) -> None:
    """Two GPUs take 2 x 4 sequences of 2,048 tokens each: 500 steps of 16. Transformers' default of -1 means epochs."""
    told = script(tmp_path, "axolotl.yml", f"{AXOLOTL}max_steps: 500\n")
    assert told.steps == 500
    assert workload_data(told, "job", None, "dgx_h100", 2, {})["training"]["total_tokens"] == 500 * 16 * 2048
    chosen = workload_data(told, "job", None, "dgx_h100", 2, {"training.total_tokens": 1e9})
    assert chosen["training"]["total_tokens"] == 1e9
    assert any("max_steps" in text for text in settled(told, {"training.total_tokens": 1e9}).ignored)
    for without in ("", "max_steps: -1\n"):
        epochs = script(tmp_path, "axolotl.yml", AXOLOTL + without)
        assert ("max_steps" in epochs.neutral) == bool(without)
        assert "total_tokens" not in workload_data(epochs, "job", None, "dgx_h100", 2, {})["training"]


def test_steps_of_torchtitan_and_of_megatron_give_tokens_too(tmp_path: Path) -> None:
    """64 GPUs, tp 4: 16 replicas of two sequences of 8,192 tokens. One node, one sequence of 4,096 on each GPU."""
    titan = script(tmp_path, "titan.toml", TORCHTITAN.replace("[training]", "[training]\nsteps = 1000"))
    training = workload_data(titan, "job", None, "dgx_h100", None, {})["training"]
    assert training["total_tokens"] == 1000 * 16 * 2 * 8192
    assert "training.steps" in {entry.option for entry in titan.understood}
    text = COMMAND.replace("--global-batch-size 8", "--train-iters 50")
    training = workload_data(script(tmp_path, "a.sh", text), "job", None, "dgx_h100", None, {})["training"]
    assert training["total_tokens"] == 50 * 8 * 4096


def test_a_whole_batch_may_be_written_with_a_point(tmp_path: Path) -> None:
    """Two sequences, four replicas."""
    read = script(tmp_path, "a.yaml", "distributed_type: NO\n")
    read = dataclasses.replace(read, accumulation=1)
    added = {"model.preset": "llama2-7b", "training.seq": 128, "training.micro_batch": 2.0}
    assert workload_data(read, "job", "a.yaml", "dgx_h100", 4, added)["training"]["global_batch"] == 8


def test_the_written_file_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A workload file with what is assumed above it, the same workload in the JSON, and a run of it."""
    script(tmp_path, "trainer.sh")
    out, result = tmp_path / "job.yaml", tmp_path / "job.json"
    options = ["--cluster", "dgx_h100", "--out", str(out), "--json", str(result)]
    with pytest.raises(SystemExit) as caught:
        main(["import", str(tmp_path / "trainer.sh"), *options])
    assert caught.value.code == 0
    assert "8 GPUs" in capsys.readouterr().out
    assert out.read_text().startswith("# Read by llmsim import from trainer.sh (Hugging Face Trainer arguments).")
    told = json.loads(result.read_text())
    assert load_workload(out) == load_workload({**told["workload"], "name": load_workload(out).name})
    assert {"option": "zero_stage", "key": "parallelism.zero", "value": 2} in told["understood"]


def test_a_job_of_slurm_whose_command_is_in_a_variable(tmp_path: Path) -> None:
    """Nodes and tasks are Slurm's; options are one quoted text, as in scripts of Megatron-LM's first versions."""
    text = """
#SBATCH -p big --nodes=16 --exclusive --ntasks-per-node=8
opts=" \\
  --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \\
  --tensor-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 64 --vocab-file <a file> \\
  --fp16 --checkpoint-activations "
cmd="python -u ${DIR}/pretrain.py $@ ${opts}"
srun -l --output=$DIR/%x.log sh -c "${cmd}"
"""
    data = workload_data(
        script(tmp_path, "slurm.sh", text), "job", "slurm.sh", "dgx_a100", None, {"model.vocab": 51200}
    )
    assert data["parallelism"]["dp"] == 16
    assert data["training"]["recompute"] == "full"
    assert data["training"]["precision"] == "fp16"
    assert script(tmp_path, "slurm.sh", text).ignored == ()


def test_variables_of_a_shell() -> None:
    text = 'A=2\nB=$((A * 3 + 1))\nC="x ${B}"\npython t.py --a $A --b ${B:-9} --c $C --d $D --e ${E:-"5"} --f $(date)'
    text += ' --g "a>$D/b" --h $((D + 1))\n'
    options = options_of(launch_command(text, Path("s.sh")).words)
    assert options == {
        "a": "2", "b": "7", "c": "x 7", "d": Unsaid("$D"), "e": "5", "f": Unsaid("$(date)"), "g": Unsaid("a>$D/b"),
        "h": Unsaid("$((D + 1))"),
    }  # fmt: skip

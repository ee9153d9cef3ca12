"""Shell scripts with several commands, functions and loops, and outputs of commands that are empty."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulator.cli.app import main
from simulator.errors import InputError
from simulator.launch_scripts.script import Unsaid
from simulator.launch_scripts.shell import launch_command, options_of, program_at
from tests.launch_scripts.scripts import COMMAND, DEEPSPEED, script


@pytest.mark.parametrize("written", ["$()", "``", "$( )"])
def test_an_empty_command_has_no_value(written: str) -> None:
    command = launch_command(f"X={written}\ntorchrun train.py --num-layers $X --bf16\n", Path("s.sh"))
    assert options_of(command.words)["num_layers"] == Unsaid(written)


def test_the_last_of_several_commands_counts_and_others_are_named(tmp_path: Path) -> None:
    read = script(tmp_path, "a.sh", f"{COMMAND}\n{COMMAND.replace('--num-layers 32', '--num-layers 16')}\n")
    assert read.workload["model"]["layers"] == 16
    assert [line for line in read.ignored if line.startswith("not followed: torchrun --nproc_per_node 8 pretrain_gpt")]


@pytest.mark.parametrize(
    "start", ["run() {", "function run {", "for i in ${LIST}; do", "while true; do", "if [ -f a ]; then"]
)
def test_a_command_in_what_is_not_followed_is_to_be_written_out(start: str, tmp_path: Path) -> None:
    """The error names what stands in the way; a command beside it is read, and what stands there is told."""
    end = {"{": "}\nrun", "do": "done", "then": "fi"}[start.split()[-1]]
    inner = f"{start}\n  {COMMAND}\n{end}\n"
    with pytest.raises(InputError, match="written out") as caught:
        script(tmp_path, "a.sh", inner)
    assert start.split(";")[0] in str(caught.value)
    read = script(tmp_path, "a.sh", f"{inner}{COMMAND.replace('--num-layers 32', '--num-layers 16')}\n")
    assert read.workload["model"]["layers"] == 16
    assert read.ignored == (f"not followed: {start.split(';')[0]}",)


def test_a_file_that_is_the_value_of_an_option_is_not_the_program(tmp_path: Path) -> None:
    """Options before it are the program's too."""
    layout = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --data-script tok.py"
    read = script(tmp_path, "a.sh", f"{COMMAND.replace('--num-layers', f'{layout} --num-layers')}\n")
    assert (read.workload["parallelism"]["tp"], read.workload["parallelism"]["pp"]) == (4, 2)
    assert read.ignored == ("data_script",)  # a file is no value of an option, but what a switch stands before


@pytest.mark.parametrize(
    "command",
    [
        "python -m torch.distributed.run --nproc_per_node 8 train.py |",
        "srun -m block python -u train.py |",
        "torchrun --nproc_per_node 8 --module pkg.train | --data tok.py",
        "python -m torch.distributed.launch --nnodes 2 -m pkg.train | --data tok.py",
        "accelerate launch --num_processes 8 -m axolotl.cli.train | a.yaml",
    ],
)
def test_the_program_is_the_first_file_or_module_behind_the_launcher(command: str) -> None:
    """The bar stands where its options begin."""
    words = command.split()
    assert program_at(launch_command(command.replace("| ", "").replace("|", "--x 1"), Path("a")).words) == words.index(
        "|"
    )


@pytest.mark.parametrize(("condition", "layers"), [("true", 16), ("false", 32)])
def test_an_elif_without_its_if_is_one(condition: str, layers: int, tmp_path: Path) -> None:
    """Bash refuses such a script; what is read of it does not end in a traceback."""
    text = f'N=32\nelif [ "{condition}" == "true" ]; then\nN=16\nfi\n'
    read = script(tmp_path, "a.sh", f"{text}{COMMAND.replace('--num-layers 32', '--num-layers $N')}\n")
    assert read.workload["model"]["layers"] == layers


def test_an_option_that_set_replaces_is_not_among_the_understood(tmp_path: Path) -> None:
    """The file says 16 sequences a step and --set 8; stage 3 is set as the file has it and stays understood."""
    file, result = tmp_path / "a.json", tmp_path / "told.json"
    file.write_text(json.dumps({**DEEPSPEED, "train_batch_size": 16}))
    sets = ["model.preset=llama2-7b", "training.seq=1024", "training.global_batch=8", "parallelism.zero=3"]
    options = [word for one in sets for word in ("--set", one)]
    with pytest.raises(SystemExit) as caught:
        main(["import", str(file), "--cluster", "dgx_h100", "--gpus", "4", "--json", str(result), "--quiet", *options])
    assert caught.value.code == 0
    told = json.loads(result.read_text())
    understood = {one["option"] for one in told["understood"]}
    assert ("train_batch_size" in understood, "zero_optimization.stage" in understood) == (False, True)
    assert "train_batch_size 16: training.global_batch is set to 8" in told["ignored"]

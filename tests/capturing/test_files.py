"""Files of captured models, and the workloads that name them. No PyTorch is needed for these."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.captured import (
    CapturedInput,
    CapturedKernel,
    CapturedModel,
    CapturedNode,
    CapturedPart,
    CapturedTensor,
    CapturedWeight,
)
from simulator.cli.app import main
from simulator.config import load_workload
from simulator.config.captured_file import read_captured
from simulator.errors import InputError
from simulator.sweeping.key import job_key


def product(name: str, m: int, n: int, k: int, role: str = "fwd") -> CapturedKernel:
    return CapturedKernel(name=name, kernel=f"matmul m={m} n={n} k={k} role={role}")


LAYER = CapturedPart(
    nodes=(
        CapturedNode(
            forward=(product("mm", 16, 8, 8),),
            input_grad=(product("mm bwd", 16, 8, 8, "dgrad"),),
            weight_grad=(product("mm wgrad", 8, 8, 16, "wgrad"),),
            saved=(CapturedTensor(name="input", nbytes=256),),
            weights=(
                CapturedWeight(name="weight", shape=(8, 8), dtype="bf16", gradient="mm wgrad", split_dimension=0),
            ),
        ),
    ),
)
MODEL = CapturedModel(
    **{"format": 1, "name": "Small", "torch": "2.13.0", "micro_batch": 2, "seq": 8, "dtype": "bf16", "hidden": 8},
    **{"heads": 1, "kv_heads": 1, "vocab": 1, "passed_bytes": 256, "one_piece": "", "unsplit": "no plan"},
    **{"widest_split": 1, "parts": (CapturedPart(nodes=()), LAYER), "before": 0, "after": 0},
    layers=(1, 1),
    inputs=(CapturedInput(shape=(2, 8), tokens=True),),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    MODEL.save(tmp_path / "small.json")
    return tmp_path / "small.json"


def job(file: Path, **sections: Any) -> Any:
    training = {"global_batch": 8, **sections.pop("training", {})}
    model = {"captured": str(file), **sections.pop("model", {})}
    return load_workload({"model": model, "training": training, "cluster": "dgx_h100", **sections})


def test_a_file_gives_back_what_was_saved(file: Path) -> None:
    assert read_captured(file) == MODEL
    assert read_captured(file) is read_captured(file)


def test_what_is_left_open_is_what_was_recorded(file: Path) -> None:
    workload = job(file)
    training = workload.training
    assert (training.seq, training.micro_batch, training.precision) == (8, 2, "bf16")
    assert (workload.framework.name, workload.model.layers, workload.microbatches) == ("pytorch", 2, 4)


def test_equal_layers_may_be_more_than_were_recorded(file: Path) -> None:
    assert job(file, model={"layers": 12}).parallelism.layers_per_stage == (12,)
    mixed = replace(MODEL, layers=(0, 1))
    mixed.save(file)
    with pytest.raises(InputError, match="of several kinds"):
        job(file, model={"layers": 12})


def test_a_sweep_knows_a_model_by_what_its_file_holds(file: Path) -> None:
    before = job_key(job(file))
    copy = file.with_name("copy.json")
    copy.write_bytes(file.read_bytes())
    assert job_key(job(copy)) == before
    replace(MODEL, hidden=4).save(copy)
    assert job_key(job(copy)) != before


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"seq": 16}}, "training.seq"),
        ({"training": {"precision": "fp32"}}, "training.precision"),
        ({"training": {"recompute": "selective"}}, "training.recompute.granularity"),
        ({"training": {"loss": "eager"}}, "training.loss"),
        ({"training": {"freeze": ["embedding"]}}, "training.freeze"),
        ({"model": {"hidden": 16}}, "model.hidden"),
        ({"model": {"preset": "gpt2"}}, "model.preset"),
        ({"framework": "megatron_core"}, "framework"),
        ({"framework": "hugging_face", "training": {"optimizer": {"master_weights": True}}}, "training.optimizer"),
        ({"parallelism": {"cp": 2}}, "parallelism.cp"),
        ({"parallelism": {"tp": 2}}, "parallelism.tp"),
        ({"framework": {"version": "2.8"}}, "framework.version"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_recorded_operations_is_refused(file: Path, sections: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as refusal:
        job(file, **sections)
    assert key in str(refusal.value)
    assert "fix:" not in str(refusal.value)  # of what was recorded, nothing but another capture helps


def test_no_fix_is_told_that_is_refused_in_turn(file: Path) -> None:
    """A batch of 7 divides by neither 2 samples x 1 GPU nor 2 x 7; micro_batch: 1 is not what was recorded."""
    with pytest.raises(InputError) as refusal:
        job(file, training={"global_batch": 7}, parallelism={"dp": 1})
    assert refusal.value.fix in ("global_batch: 6", "global_batch: 8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"layers": []}, "has no layers"),
        ({"layers": [7]}, "is no number of a part"),
        ({"layers": [0, 0]}, "no layer has an operation"),
        ({"layers": [1] * 10_001}, "too many layers"),
        ({"extra": 1}, "unknown key"),
    ],
)
def test_files_that_are_no_captured_models_are_refused(file: Path, change: dict[str, Any], message: str) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        read_captured(file)
    file.write_text(file.read_text().replace('"matmul m=16', '"matrix m=16'))
    with pytest.raises(InputError):
        read_captured(file)


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ('"widest_split": 1', '"widest_split": 3', "is no dimension that 3 ranks can share"),
        ('"split_dimension": 0', '"split_dimension": 2', "is no dimension"),
        ('"split_dimension": 0', '"split_dimension": -2', "split_dimension"),
        ('"kernel": "matmul m=16', '"split": ["nonsense"], "kernel": "matmul m=16', "nonsense"),
        ('"kernel": "matmul m=16', '"split": ["role"], "kernel": "matmul m=16', "is no size of its kernel"),
        ('"kernel": "matmul m=16', '"kernel": "matmul m=-16', "has an impossible m"),
        ('"heads": 1', '"heads": 0', "heads"),
        # Keys that contradict each other: the inputs are 2 x 8, nothing attends, and the one weight has 8 x 8 elements.
        ('"micro_batch": 2', '"micro_batch": 4', "micro_batch: is not that of the recorded inputs"),
        ('"seq": 8', '"seq": 16', "seq: is not that of the recorded inputs"),
        ('"heads": 1', '"heads": 2', "heads: is not that of the first attention"),
        ('"vocab": 1', '"vocab": 9', "vocab: is no number of rows of a weight"),
        ('"dtype": "bf16",\n "hidden"', '"dtype": "fp16",\n "hidden"', "dtype: is not the type of most weights"),
        ('"hidden": 8', '"hidden": 7', "passed_bytes: is no multiple of 7 elements"),
        ('"passed_bytes": 256', '"passed_bytes": 128', "keep 256 bytes of what passes between them"),
        ('"passed_bytes": 256', '"passed_bytes": 4096', "passed_bytes: is more than the forward pass moves"),
        ('"passed_bytes": 256', '"passed_bytes": 1e308', "passed_bytes"),
        ('"nbytes": 256', '"nbytes": 1e308', "nbytes"),
        ("    2,\n    8\n", "    8\n", r"inputs\[0\].shape: is no input of this kind"),
        ("    2,\n    8\n", "", r"inputs\[0\].shape: is no input of this kind"),
        ("n=8 k=16", "n=4 k=16", r"parts\[1\].nodes\[0\].weights\[0\].shape: weight: mm wgrad .* 32 elements"),
        ("m=16 n=8 k=8", "m=16 n=8 k=4", r"weights\[0\].shape: weight: mm .* 32 elements"),
        ('"gradient": "mm wgrad"', '"gradient": "nothing"', "is no product beside it"),
        ('"dtype": "bf16"', '"dtype": "bf17"', "dtype"),
    ],
)
def test_what_ranks_cannot_share_or_run_is_refused(file: Path, written: str, instead: str, message: str) -> None:
    assert written in file.read_text()
    file.write_text(file.read_text().replace(written, instead))
    with pytest.raises(InputError, match=message) as refusal:
        read_captured(file)
    assert str(file) in str(refusal.value)


def test_a_shared_size_divides_by_all_ranks_that_may_share_it(file: Path) -> None:
    # 3 ranks cannot have a third of 16 rows each; 2 can have half.
    text = file.read_text().replace('"split_dimension": 0', '"split_dimension": -1')
    text = text.replace('"kernel": "matmul m=16', '"split": ["m"], "kernel": "matmul m=16')
    file.write_text(text.replace('"widest_split": 1', '"widest_split": 2'))
    assert read_captured(file).widest_split == 2
    file.write_text(text.replace('"widest_split": 1', '"widest_split": 3'))
    with pytest.raises(InputError, match=r"parts\[1\]\.nodes\[0\]\.forward\[0\]\.split"):
        read_captured(file)


@pytest.mark.parametrize(
    ("argument", "message"),
    [("module", "is no MODULE:FUNCTION"), ("no_such_module:f", "cannot be imported"), ("json:f", "no such function")],
)
def test_the_command_names_what_it_cannot_call(argument: str, message: str, capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["capture", argument, "--out", str(tmp_path / "m.json")])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_writes_the_file(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    code = "import torch\ndef job():\n    return torch.nn.Linear(8, 4), torch.zeros(3, 8)\n"
    (tmp_path / "tiny_captured_module.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["capture", "tiny_captured_module:job", "--dtype", "bf16", "--out", "m.json"])
    assert end.value.code == 0
    assert "Linear: 36 parameters in bf16" in capsys.readouterr().out
    assert read_captured(tmp_path / "m.json").parameters == 36


def test_frozen_weights_are_told(file: Path, capsys: Any) -> None:
    """Two layers of 8 x 8 weights are frozen, and a million beside each are trained."""
    assert (MODEL.parameters, MODEL.trained_parameters) == (128, 128)
    node = LAYER.nodes[0]
    frozen = replace(node, weight_grad=(), weights=(replace(node.weights[0], gradient="", trainable=False),))
    thin = CapturedNode(weights=(CapturedWeight(name="thin", shape=(1000, 1000), dtype="bf16"),))
    model = replace(MODEL, parts=(CapturedPart(nodes=()), CapturedPart(nodes=(frozen, thin))))
    assert (model.parameters, model.trained_parameters) == (2_000_128, 2_000_000)
    model.save(file)
    text = f"{{model: {{captured: {file}}}, training: {{global_batch: 2}}, cluster: dgx_h100, parallelism: {{dp: 1}}}}"
    (file.parent / "job.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["run", str(file.parent / "job.yaml")])
    assert end.value.code == 0
    assert "2.00 M parameters, 2.00 M trained" in capsys.readouterr().out


def test_attentions_part_of_the_operations_is_counted(file: Path) -> None:
    """A layer has three products of 2 x 16 x 8 x 8. One of scores, 2 x 16 x 8 x 24, reads no weight.

    That is half of the operations, whatever number of tokens the file calls a sample's.
    """
    scores = CapturedNode(forward=(product("scores", 16, 8, 24),))
    model = replace(MODEL, parts=(CapturedPart(nodes=()), CapturedPart(nodes=(*LAYER.nodes, scores))))
    assert model.attention_share(2) == 0.5
    assert replace(model, seq=1, inputs=()).attention_share(2) == 0.5
    assert MODEL.attention_share(2) == 0


@pytest.mark.parametrize("text", ["q_proj", "x:q_proj", "-1:q_proj", ":"])
def test_the_option_of_adapters_is_a_rank_and_names(text: str, capsys: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["capture", "json:loads", "--adapters", text, "--out", str(tmp_path / "m.json")])
    assert end.value.code == 2
    assert "--adapters: is no RANK:NAME" in capsys.readouterr().err


def test_images_are_counted_as_samples(file: Path) -> None:
    """Inputs without tokens are samples of a length of one: what passes in a second are samples."""
    data = json.loads(file.read_text())
    counts = {}
    for seq in (1, data["seq"]):
        changed = {**data, "seq": seq, "inputs": [] if seq == 1 else data.get("inputs", [])}
        file.write_text(json.dumps(changed))
        counts[seq] = simulator.run(job(file)).to_dict()["throughput_counts"]
    assert counts == {1: "samples", data["seq"]: "tokens"}

"""Frameworks: what a workload file may say of them, which defaults follow, and that nothing else knows their names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.config import altered, load_workload
from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS, find_framework
from tests.support.frameworks import COMPILED, DEEPSPEED, MEGATRON, PYTORCH, STACKS
from tests.support.jobs import job

PACKAGE = Path(__file__).resolve().parents[2] / "simulator"
#: Where names of frameworks stand as data: what other tools call keys, whose scripts are read, which software has a
#: recipe, what measured rows were made with, and among which layouts users of one choose.
DATA = {"frameworks", "validation", "launch_scripts", "precisions", "drafting"}
SYNONYMS = PACKAGE / "config" / "synonyms.py"
SOURCES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in DATA and path != SYNONYMS
]


def load(framework: Any = None, **changes: Any) -> simulator.config.Workload:
    return load_workload(job(**({} if framework is None else {"framework": framework}), **changes))


# --- what a file says ---


def test_a_name_alone_and_a_mapping_are_the_same() -> None:
    assert load("pytorch").framework == load({"name": "pytorch"}).framework
    assert load().framework == load(MEGATRON).framework
    assert load_workload(job(framework="pytorch"), {"framework.compile": True}).framework == load(COMPILED).framework


@pytest.mark.parametrize(
    ("framework", "key", "words"),
    [
        ("megatron", "framework.name", ["megatron_core"]),
        ({"name": "pytorch", "spec": "te"}, "framework.spec", ["unknown key", "name, version, compile"]),
        ({"name": "deepspeed", "compile": True}, "framework.compile", ["framework: pytorch"]),
        ({"name": "megatron_core", "version": "0.12"}, "framework.version", ["framework: pytorch"]),
        ({"name": "pytorch", "version": 2.8}, "framework.version", ['version: "2.8", in quotes']),
        ({"name": "pytorch", "version": "new"}, "framework.version", []),
    ],
)
def test_what_a_framework_does_not_know_is_refused(framework: Any, key: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load(framework)
    assert caught.value.key == key
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("implementation", "eager", "framework: pytorch"),
        ("implementation", "compiled", "framework: {name: pytorch, compile: true}"),
        ("implementation", "fused", "framework: megatron_core"),
        ("compile_loss", True, "loss: compiled"),
    ],
)
def test_a_key_that_was_says_what_to_write_now(key: str, value: Any, instead: str) -> None:
    with pytest.raises(InputError, match="unknown key") as caught:
        load(**{f"training__{key}": value})
    assert caught.value.key == f"training.{key}"
    assert instead in str(caught.value)


@pytest.mark.parametrize(
    ("training", "framework", "key"),
    [
        ({"gradient_accumulation_fusion": True}, PYTORCH, "training.gradient_accumulation_fusion"),
        ({"gradient_accumulation_fusion": True}, DEEPSPEED, "training.gradient_accumulation_fusion"),
        ({"loss": "compiled"}, MEGATRON, "training.loss"),
        ({"loss": "fused_linear"}, DEEPSPEED, "training.loss"),
    ],
)
def test_keys_that_a_framework_cannot_do_are_refused(training: dict[str, Any], framework: Any, key: str) -> None:
    with pytest.raises(InputError) as caught:
        load(framework, **{f"training__{name}": value for name, value in training.items()})
    assert caught.value.key == key


# --- defaults ---


def test_defaults_are_the_frameworks() -> None:
    """Megatron adds in products and frees what stages send, and its loss is over a split vocabulary. PyTorch has the
    multi-tensor AdamW, torch.compile compiles the loss. A bucket has 4e7 gradients of 4 bytes in Megatron. DeepSpeed
    copies 5e8 into one, and keeps those in bf16."""
    pipeline = {"pp": 2}
    told = {
        name: (
            work.training.gradient_accumulation_fusion,
            work.training.optimizer.implementation,
            work.training.loss.name,
            work.parallelism.deallocate_pipeline_outputs,
            work.parallelism.copy_to_buckets,
            work.parallelism.bucket_bytes,
            work.training.keep_gradients,
        )
        for name, framework in (("m", MEGATRON), ("p", PYTORCH), ("c", COMPILED), ("d", DEEPSPEED))
        for work in (load(framework, parallelism=pipeline),)
    }
    assert told == {
        "m": (True, "fused", "vocab_parallel", True, False, 160_000_000, False),
        "p": (False, "foreach", "eager", False, False, 25_000_000, False),
        "c": (False, "fused", "compiled", False, False, 25_000_000, False),
        "d": (False, "fused", "vocab_parallel", False, True, 2_000_000_000, True),
    }


def test_what_a_file_says_is_no_default() -> None:
    given = load(PYTORCH, training__optimizer={"implementation": "fused"}, parallelism__pp=2)
    assert given.training.optimizer.implementation == "fused"
    kept = load(DEEPSPEED, training__keep_gradients=False, parallelism={"copy_to_buckets": False, "bucket_bytes": 1})
    assert (kept.training.keep_gradients, kept.parallelism.copy_to_buckets) == (False, False)
    assert kept.parallelism.bucket_bytes == 1


def test_defaults_follow_another_framework() -> None:
    """Defaults are no keys of the file, so that no warning is of one."""
    changed = altered(load(DEEPSPEED, parallelism__dp=2), {"framework": "pytorch"})
    assert not changed.parallelism.copy_to_buckets
    assert not changed.training.keep_gradients
    assert changed.training.optimizer.implementation == "foreach"
    told = simulator.config.warnings(load(DEEPSPEED, parallelism__pp=8))
    assert not [text for text in told if "bucket" in text or "deallocate" in text]


@pytest.mark.parametrize(
    ("version", "fused_norm", "batched"),
    [("1.13", False, True), ("2.8", False, True), ("2.9", True, True), ("2.11", True, True), ("2.12", True, False)],
)
def test_versions_of_pytorch_differ_in_norms_and_sends(version: str, fused_norm: bool, batched: bool) -> None:
    """RMSNorm is a kernel since 2.9, LayerNorm always was; pipelines send in batches up to 2.11."""
    stack = {"name": "pytorch", "version": version}
    work = load(stack, model__norm="rmsnorm", parallelism__pp=2)
    assert (work.training.fused_rms_norm, work.parallelism.batch_p2p) == (fused_norm, batched)
    assert load(stack).training.fused_rms_norm
    assert load({**stack, "compile": True}, model__norm="rmsnorm").training.fused_rms_norm


def test_the_newest_version_is_the_default() -> None:
    work = load(PYTORCH, model__norm="rmsnorm", parallelism__pp=2)
    assert (work.training.fused_rms_norm, work.parallelism.batch_p2p) == (True, False)


# --- the objects ---


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_says_what_it_is(name: str) -> None:
    framework = find_framework(name)
    assert framework.name == name
    assert framework.about
    assert find_framework(name) is framework
    assert "eager" in framework.losses


def test_a_framework_without_versions_or_a_compiler_has_none() -> None:
    with pytest.raises(ValueError, match="version"):
        find_framework(MEGATRON, "0.12")
    with pytest.raises(ValueError, match="not compiled"):
        find_framework(DEEPSPEED, compile=True)


@pytest.mark.parametrize("framework", STACKS)
def test_a_result_names_the_framework(framework: Any) -> None:
    result = simulator.run(job(framework=framework, model__layers=2)).to_dict()
    choice = framework if isinstance(framework, dict) else {"name": framework}
    compiled = choice.get("compile", False)
    assert result["framework"] == {"name": choice["name"], "version": None, "compile": compiled, "cuda_graphs": []}


def test_the_summary_says_whose_kernels_they_are() -> None:
    from simulator.output.summary import opening

    work = job(framework={"name": "pytorch", "version": "2.8", "compile": True}, model__layers=2)
    assert "with pytorch 2.8, compiled" in opening(simulator.run(work).to_dict())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_deepspeed_copies_gradients_into_a_bucket_whatever_is_sharded(zero: int, pp: int) -> None:
    """The bucket is as large as the gradients of so small a model. BF16_Optimizer keeps gradients in bf16 beside those
    in fp32: 2 + 4 bytes of each parameter, whose weight has 2."""
    result = simulator.run(job(framework=DEEPSPEED, parallelism={"dp": 4, "pp": pp, "zero": zero}))
    state = result.memories[0].static.state
    assert result.memories[0].static.bucket == state.gradients
    assert any(label.startswith("copy reduce") for label in result.spans.labels)
    if zero <= 1:
        assert state.gradients == pytest.approx(3 * state.weights)


# --- nothing else knows their names ---


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that are docstrings."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def offenders(path: Path) -> list[str]:
    """Names of frameworks in texts, questions for the name, version or compiler of one, and names of keys that were."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    said = docstrings(tree)
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]
    named = [text for text in texts if re.search(rf"\b({'|'.join(FRAMEWORKS)})\b", text)]
    asks = r"\b(software|framework)\.(name|version|compile|title|about)\b"
    nodes = list(ast.walk(tree)) if re.search(asks, source) else []
    tests = [ast.unparse(node) for node in nodes if isinstance(node, ast.Compare)]
    tests += [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If | ast.IfExp)]
    asked = [text for text in tests if re.search(asks, text)]
    return named + asked + re.findall(r"\bz\.(?:eager|fused|compiled)\b|training\.implementation\b", source)


def test_no_name_of_a_framework_stands_outside() -> None:
    assert len(SOURCES) > 150
    assert not {str(path.relative_to(PACKAGE)): found for path in SOURCES if (found := offenders(path))}


def test_a_question_for_a_name_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "asks.py"
    path.write_text('"""Of pytorch."""\nif workload.software.name == "pytorch" or z.eager:\n    pass\n')
    assert offenders(path) == [
        "pytorch",
        "workload.software.name == 'pytorch'",
        "workload.software.name == 'pytorch' or z.eager",
        "z.eager",
    ]

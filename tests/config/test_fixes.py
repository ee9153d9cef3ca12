"""Fixes that error messages propose: each is typed in, and the job loads."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator.config import load_workload
from simulator.config.section import paths
from simulator.config.workload import Workload
from simulator.errors import InputError, each, raise_all
from tests.support.grids import grid
from tests.support.small_workload import SMALL

KEYS = list(paths(Workload))
SOURCES = Path(__file__).parents[2] / "simulator"


def _box(gpus: int) -> dict[str, Any]:
    return {
        "name": "box",
        "nodes": 1,
        "node": {
            "gpus": {"type": "h100-sxm-80gb", "count": gpus},
            "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9, "latency_s": 1e-6},
            "pcie": {"generation": 5},
        },
    }


def _changes(fix: str, section: str) -> dict[str, Any]:
    """Return the dotted keys that a fix sets: ``tp: 1 with dp: 6`` sets two."""
    changes = {}
    for part in fix.replace(" with ", " and ").split(" and "):
        key, _, value = part.partition(": ")
        dotted = [name for name in KEYS if name == key or name.endswith(f".{key}")]
        inside = [name for name in dotted if name == f"{section}.{key}"]
        key, changed = (inside or dotted)[0], yaml.safe_load(value)
        if isinstance(changed, dict):
            changes |= {f"{key}.{name}": one for name, one in changed.items()}
        else:
            changes[key] = changed
    return changes


def _choices(fix: str) -> list[str]:
    return fix.replace("; or ", ", or ").split(", or ")


def _errors(job: dict[str, Any], changes: dict[str, Any]) -> tuple[InputError, ...]:
    try:
        load_workload(job, changes)
    except InputError as error:
        return each(error)[0]
    return ()


def _typed_in(job: dict[str, Any]) -> list[str]:
    """Return the fixes that were printed; each of a refused job is typed in, and those of the errors that follow.

    The job loads in the end, or what is left has no fix; no key that was mended is refused again.
    """
    first = _errors(job, {})
    for error in first:
        for choice in _choices(error.fix) if error.fix else ():
            typed: dict[str, Any] = {}
            errors: tuple[InputError, ...] = (error,)
            while errors and (fix := choice if not typed else errors[0].fix):
                section = (errors[0].key or "").rpartition(".")[0]
                typed |= _changes(_choices(fix)[0], section)
                errors = _errors(job, typed)
                again = [left for left in errors if left.key in typed]
                if again:
                    pytest.fail(f"{job} with {typed}, as {error} proposed, is refused: {again[0]}", pytrace=False)
    return [error.fix for error in first if error.fix]


def _only_fix(job: dict[str, Any]) -> str:
    """Return the fix of the only error, with any choice of which the job loads."""
    [error] = _errors(job, {})
    assert error.fix
    for choice in _choices(error.fix):
        assert not _errors(job, _changes(choice, (error.key or "").rpartition(".")[0])), choice
    return error.fix


def _job(gpus: int, layout: dict[str, Any], batch: int, seq: int = 1536, **model: Any) -> dict[str, Any]:
    sizes = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 32000} | model
    training = {"seq": seq, "micro_batch": 1, "global_batch": batch}
    return {"model": sizes, "training": training, "parallelism": layout, "cluster": _box(gpus)}


def test_a_split_is_not_proposed_beside_the_key_that_refuses_it() -> None:
    """Eight layers and the embedding make 9, which 8 stages do not divide: without it each stage has one layer."""
    fix = _only_fix(_job(8, {"pp": 8, "account_for_embedding": True}, 8))
    assert fix == "account_for_embedding: false and layers_per_stage: [1, 1, 1, 1, 1, 1, 1, 1]"


def test_a_proposed_cp_fits_the_gpus() -> None:
    """A ring of cp 2 splits into 4 chunks; 17 divides 8194 = 2 * 17 * 241 and not the 2 GPUs. 8192 / 4 is whole."""
    assert _only_fix(_job(2, {"cp": 2, "tp": 1}, 1, seq=8194, position="rope")) == "seq: 8192"


def test_a_proposed_ep_divides_the_gpus() -> None:
    """Of the powers of two that divide 256 experts only 1 divides 3 GPUs."""
    experts = {"experts": 256, "top_k": 8, "ffn_hidden": 512}
    assert _only_fix(_job(3, {"ep": 3}, 3, moe=experts, activation="swiglu", bias=False)) == "ep: 1"


def test_a_proposed_tp_divides_the_gpus() -> None:
    """Of 1, 2, 4, 5, ..., which divide 40 heads, 1 and 2 divide 6 GPUs, and 2 is the nearer to 6."""
    fix = _only_fix(_job(6, {"tp": 6}, 24, layers=2, hidden=5120, heads=40))
    assert fix == "tp: 2; or tp: 1 with dp: 6"


@pytest.mark.parametrize(("gpus", "experts"), grid([3, 6, 8], [0, 6], every=2))
def test_every_fix_of_a_grid_of_layouts_loads(gpus: int, experts: int) -> None:
    """Layouts of all axes on a few GPUs, of which many do not divide: none proposes what is refused in turn."""
    moe = {"moe": {"experts": experts, "top_k": 2, "ffn_hidden": 512}} if experts else {}
    printed = 0
    for tp, cp, pp, ep in ((a, b, c, d) for a in (1, 2, 3) for b in (1, 2) for c in (1, 3) for d in (1, 2, 4)):
        if ep > 1 and not experts:
            continue
        for batch, seq in ((24, 1536), (8, 1026)):
            layout = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
            printed += len(_typed_in(_job(gpus, layout, batch, seq=seq, **moe)))
    assert printed > 5


def test_a_framework_that_lacks_a_kind_of_layer_names_those_that_have_it() -> None:
    job = {"model": {"preset": "gpt-oss-20b"}, "framework": "hugging_face", "training": {"seq": 128, "global_batch": 8}}
    with pytest.raises(InputError) as refused:
        load_workload({**job, "cluster": "dgx_h100"})
    assert "fix:     framework: megatron_core or pytorch" in str(refused.value)
    load_workload({**job, "cluster": "dgx_h100", "framework": "pytorch"})


def test_a_limit_of_other_models_does_not_hide_a_framework() -> None:
    """Hugging Face's norms behind blocks are Gemma's, which GeGLU means; Gemma 2 has it.

    It refuses GeGLU under torch.autocast alone, which a job of torchtitan does not say.
    """
    job = {"model": {"preset": "gemma2-2b"}, "training": {"seq": 128, "global_batch": 8}, "cluster": "dgx_h100"}
    fixes = [error.fix or "" for error in _errors({**job, "framework": "torchtitan"}, {})]
    assert fixes
    assert all("hugging_face" in fix.split() for fix in fixes)
    load_workload({**job, "framework": "hugging_face"})


def test_a_state_space_layer_is_no_wider_than_any_model() -> None:
    """64 heads of 64 are as wide as a model of 64 may have them; one more head is not."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 1000, "mixers": ["mamba2"]}
    job = {"training": {"seq": 128, "global_batch": 8}, "cluster": "dgx_h100"}
    load_workload({**job, "model": {**sizes, "mamba2": {"heads": 64, "head_dim": 64, "state": 16}}})
    with pytest.raises(InputError, match="heads x head_dim is more than 64 times as wide as the model"):
        load_workload({**job, "model": {**sizes, "mamba2": {"heads": 65, "head_dim": 64, "state": 16}}})


def test_sizes_that_the_framework_lacks_are_not_offered() -> None:
    """Hugging Face's models are not split over tensor parallelism, so that of the divisors of 16 heads 1 is left."""
    split = {"framework": "hugging_face", "parallelism.tp": 3, "parallelism.dp": 1}
    with pytest.raises(InputError) as refused:
        load_workload(SMALL, split)
    (tp,) = (error for error in each(refused.value)[0] if error.key == "parallelism.tp")
    assert tp.allowed == "1"


def test_what_two_rules_say_alike_is_said_once() -> None:
    alike = [InputError("is too long", key="training.seq", found=8) for _ in range(2)]
    with pytest.raises(InputError) as refused:
        raise_all([*alike, InputError("is too long", key="training.seq", found=9)])
    assert [error.found for error in each(refused.value)[0]] == [8, 9]


def test_a_key_of_another_section_stands_as_a_file_says_it() -> None:
    """A dotted key is for ``--set``; as a line of a file it would be an unknown key."""
    dotted = re.compile(r"(^|, or |; or )[a-z_]+\.[a-z_.]+: ")
    wrong = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_fix = isinstance(node, ast.keyword) and node.arg == "fix"
            is_fix |= isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["fix"]
            if is_fix:
                texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
                wrong += [(path.name, text) for text in texts if isinstance(text, str) and dotted.search(text)]
    assert not wrong


def test_a_proposed_place_of_offloaded_parts_is_tried_in_its_section() -> None:
    """Its nodes have no drives. What stands beside the key in its section stays as the job says it."""
    layout = {"dp": 8, "zero": 3, "offload": {"optimizer": "nvme", "parameters": "cpu"}}
    job = _job(8, layout, 8)
    job["cluster"]["node"]["host_memory_bandwidth_Bps"] = 300e9
    [fix] = {error.fix for error in _errors(job, {}) if error.key == "parallelism.offload.optimizer"}
    assert fix == "offload: {optimizer: cpu}"
    assert not _errors(job, _changes(fix, ""))


def test_no_stage_of_zero_is_proposed_that_the_framework_lacks() -> None:
    """Replicas of transformers are torch's DDP or fully_shard: nothing is said of stages 1 and 2."""
    section = {"model": {"preset": "llama2-7b"}, "training": {"seq": 128, "global_batch": 8}, "cluster": "dgx_h100"}
    job = {**section, "framework": "hugging_face", "parallelism": {"dp": 8}}
    (error,) = _errors(job, {"parallelism.hsdp": 4})
    assert error.fix == "zero: 3"
    assert "1" not in str(error.allowed)
    assert not _errors(job, {"parallelism.hsdp": 4, "parallelism.zero": 3})

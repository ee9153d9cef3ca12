"""``llmsim check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulator import models
from simulator.config import load_workload
from tests.support.commands import LEGAL, command


def test_check_says_what_the_layout_comes_to(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", workload) == 0
    out, err = capsys.readouterr()
    assert "8 = tp 2 x pp 2 x dp 2" in out
    assert "2 of 2 layers" in out
    assert err == ""


@pytest.mark.parametrize(
    ("changes", "traits"),
    [
        (
            {},
            "13.3 M parameters, 4 layers, hidden 512, 8 heads, gelu, layernorm, learned positions, biases, tied",
        ),
        (
            {"preset": "mixtral-8x7b"},
            "46.7 B parameters (12.9 B active), 32 layers, hidden 4,096, 32 heads (8 of keys and values), "
            "8 experts (top 2), swiglu, rmsnorm, rope",
        ),
    ],
)
def test_check_says_what_the_model_is(
    changes: dict[str, Any], traits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys that nobody gave have GPT's defaults, which are to be seen; numbers of parameters are those of a run."""
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(LEGAL | ({"model": changes} if changes else {})))
    assert command("check", path) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("  model ")]
    assert traits in line
    assert line.endswith("tied embeddings") is not bool(changes)
    assert ("biases" in line) is not bool(changes)
    assert command("check", path, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    job = load_workload(path)
    expected = models.parameters(job), models.active_parameters(job)
    assert (result["params_total"], result["params_active"]) == expected


def test_check_prints_the_members_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """16 ranks as tp 2, dp 4, pp 2, tensor ranks innermost: 0 and 1 share layers, 0, 2, 4 and 6 parameters, and 0 and 8
    are a pipeline. Groups of one rank are none."""
    sizes = (
        "--set",
        "parallelism={tp: 2, pp: 2, dp: 4}",
        "--set",
        "cluster={name: dgx_a100}",
        "--set",
        "training.micro_batch=1",
    )
    assert command("check", "gpt22b_tp8", *sizes, "--groups", "--json", "-") == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert groups["tp"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert groups["dp"] == [[first + 2 * at for at in range(4)] for first in (0, 1, 8, 9)]
    assert groups["pp"] == [[rank, rank + 8] for rank in range(8)]
    assert "cp" not in groups
    assert command("check", "gpt22b_tp8", *sizes, "--groups") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tp 8 groups of 2, ranks that share each layer: 0, 1; 2, 3; 4, 5; 5 more" in out
    assert "dp 4 groups of 4, ranks that hold the same parameters outside experts: all dp and cp ranks" in out
    assert "0-6 by 2; 1-7 by 2; 8-14 by 2; 1 more" in out
    assert command("check", "gpt22b_tp8", *sizes) == 0
    assert "groups" not in capsys.readouterr().out


def test_json_on_standard_output_stands_alone(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", workload, "--json", "-", "--set", "parallelism.dp=1") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["schema_version"], result["command"]) == (1, "check")
    assert result["workload"]["parallelism"]["layers_per_stage"] == [2, 2]
    assert result["warnings"] == ["4 of the 8 GPUs of the cluster have no rank"]
    assert err == "warning: 4 of the 8 GPUs of the cluster have no rank\n"


def test_strict_turns_warnings_into_status_1(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", workload, "--strict") == 0
    assert command("check", workload, "--strict", "--set", "parallelism.dp=1") == 1
    capsys.readouterr()
    assert command("check", workload, "--quiet") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["workload", "cluster"])
def test_schemas_are_printed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", "--schema", kind) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema.get("anyOf", [schema])[-1]["additionalProperties"] is False  # of a cluster that is like no other
    assert command("check", "w.yaml", "--schema", kind) == 2

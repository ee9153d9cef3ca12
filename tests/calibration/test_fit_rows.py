"""Rows of measurements that cannot be fitted, and what is said of them."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from calibration.__main__ import main
from calibration.fit import attention
from calibration.fit.cases import Cases, MeasuredCase, read
from calibration.fit.command import fit
from calibration.fit.row_kinds import MeasuredRow
from simulator.config.profile import load_profile
from simulator.errors import InputError
from tests.support.fitting import ENVIRONMENT, PRODUCT, SHARED, measured_case

MEMORY = {
    "kind": "memory",
    "op": "copy",
    "params": {"rows": 8, "width": 1024},
    "ranks": [0],
    "bytes": 8e6,
    "time_s": 1e-5,
}

REDUCED = {
    "kind": "collective",
    "op": "all_reduce",
    "params": {"bytes": 8},
    "ranks": [0, 1],
    "bytes": 8,
    "time_s": 1e-5,
    "host_s": 1e-6,
}

LAYERS = {"kind": "layers", "op": "passes", "params": {}, "ranks": [0], "time_s": 1.0, "block_s": [[1.0, 1.0]]}

RACED = {
    "kind": "interference",
    "op": "all_reduce",
    "params": {"kernel": "matmul", "bytes": 1024},
    "ranks": [0, 1],
    "kernel_s": 1e-3,
    "kernel_beside_s": 1.2e-3,
}

PROFILED = {"kind": "kernels", "op": "attention", "params": {"of": "attention/bwd length=8"}, "ranks": [0]}

PROBED = {"probe_s": [[0.2, 0.2, 0.2]], "probe_forward_s": [[0.1, 0.1, 0.1]]}


def without(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (MEMORY | {"time_s": 0}, "time_s: is out of range"),
        (MEMORY | {"time_s": -1e-5}, "time_s: is out of range"),
        (MEMORY | {"time_s": math.inf}, "time_s: must be a finite number"),
        (MEMORY | {"time_s": "x"}, "time_s: must be a number"),
        ({k: v for k, v in MEMORY.items() if k != "time_s"}, "time_s: a required key is missing"),
        (MEMORY | {"params": []}, "params"),
        (MEMORY | {"ranks": []}, "ranks"),
        (REDUCED | {"ranks": [0]}, "ranks"),
        ({k: v for k, v in REDUCED.items() if k != "bytes"}, "bytes: a required key is missing"),
        (LAYERS | PROBED | {"probe_s": [[0.2, 0.2]]}, "block_s: unlike lengths"),
        (LAYERS | PROBED | {"block_s": [[1.0]]}, "block_s: unlike lengths"),
        (LAYERS | {"probe_forward_s": [[0.1]]}, "block_s: unlike lengths"),
        (LAYERS | PROBED | {"probe_forward_s": [[0.2, 0.2, 0.2]]}, "probe_forward_s: not less than probe_s"),
        ({k: v for k, v in REDUCED.items() if k != "host_s"}, "host_s: a required key is missing"),
        (MEMORY | {"params": {"rows": -8, "width": 1024}}, "params.rows: is no size of a case"),
        (MEMORY | {"params": {"rows": "many", "width": 1024}}, "params.rows: is no size of a case"),
        (without(SHARED, "series_s"), "series_s: a required key is missing"),
        (SHARED | {"series_s": []}, "series_s"),
        (SHARED | {"series_s": [1e-3, "x"]}, "series_s"),
        (SHARED | {"sm_mhz": [1500, None]}, "sm_mhz"),
        (SHARED | {"sm_mhz": [1500, 0]}, "sm_mhz"),
        (SHARED | {"power_w": [600]}, "sm_mhz: unlike numbers of sm_mhz and power_w"),
        (without(SHARED, "power_w"), "sm_mhz: unlike numbers of sm_mhz and power_w"),
        (without(SHARED, "other_s"), "other_s: a required key is missing"),
        (SHARED | {"share": 1.5}, "share: is out of range"),
        *(
            (SHARED | {"params": without(SHARED["params"], name)}, f"params.{name}: a required")
            for name in SHARED["params"]
        ),
        (
            SHARED | {"kind": "sustained", "params": without(PRODUCT, "dtype")},
            "params.dtype: a required key is missing",
        ),
        (SHARED | {"kind": "sustained", "op": "attention_fwd"}, "params.batch: a required key is missing"),
        ({k: v for k, v in MEMORY.items() if k != "bytes"}, "bytes: a required key is missing"),
        (MEMORY | {"p10_s": "x"}, "p10_s: must be a number"),
        (MEMORY | {"power_w": "x"}, "power_w: must be a number"),
        (MEMORY | {"kind": "matmul", "params": PRODUCT | {"role": "zzz"}}, "params.role: is no size of a case"),
        (MEMORY | {"kind": "matmul", "params": PRODUCT | {"m": 0.5}}, "params.m: is no size of a case"),
        (LAYERS | {"params": {"model": "zzz", "layers": 2}}, "params.model: is no size of a case"),
        (RACED | {"collective_beside_s": "x"}, "collective_beside_s: must be a number"),
        (PROFILED | {"kernels": [["a", "x"]]}, "kernels[0][1]: must be a number"),
        (ENVIRONMENT | {"ranks": "two"}, "ranks: must be a whole number"),
        ({k: v for k, v in ENVIRONMENT.items() if k != "gpu"}, "gpu: measured without a GPU"),
        ({k: v for k, v in ENVIRONMENT.items() if k != "date"}, "date: a required key is missing"),
        ({"kind": 3}, "is not of a measurement"),
        ([], "is not of a measurement"),
    ],
)
def test_a_bad_row_is_said_with_its_line_and_key(row: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (MEMORY, row)))
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert f"a.jsonl, line 2: {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (MEMORY | {"op": "embedding_bwd"}, "params.tokens: a required key is missing"),
        (MEMORY | {"op": "layer_norm", "params": {"rows": 8}}, "params.width: a required key is missing"),
        (MEMORY | {"kind": "matmul", "op": "grouped", "params": PRODUCT}, "params.batch: a required key is missing"),
        (LAYERS, "params.model: a required key is missing"),
        (LAYERS | {"params": {"model": "gpt"}}, "params.layers: a required key is missing"),
        (LAYERS | {"params": {"part": "zzz"}}, "params.part: is not known"),
        (RACED, "collective_s: a required key is missing"),
        (RACED | {"collective_s": 1e-3, "params": {"kernel": "zzz", "bytes": 8}}, "params.kernel: is not known"),
    ],
)
def test_what_a_fit_needs_of_a_row_is_said_with_its_line(row: object, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (ENVIRONMENT, row)))
    with pytest.raises(InputError) as caught:
        fit(read(tmp_path), load_profile("h100-sxm-80gb"), "mine")
    assert f"a.jsonl, line 2: {words}" in str(caught.value)


def test_kernels_of_a_case_that_is_not_told_are_said_with_their_line(tmp_path: Path) -> None:
    row = PROFILED | {"kernels": [["a", 1e-6], ["b", 2e-6]]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (case,) = read(tmp_path).rows
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: params\.of: params\.batch: a required key is missing"):
        attention._around(Cases((case,), ()), load_profile("h100-sxm-80gb"), "cudnn")


def test_part_of_the_layers_is_not_enough() -> None:
    """Forward passes alone say nothing of backward ones."""
    params = {"model": "gpt", "layers": 2}
    case = MeasuredCase("layers", "forward", params, (0,), {"time_s": 1e-3, "params": params})
    with pytest.raises(InputError, match="layers: too few cases to tell what the host takes") as caught:
        fit(Cases((case,), (ENVIRONMENT,)), load_profile("h100-sxm-80gb"), "mine")
    assert "backward_matmul" in str(caught.value)


def test_what_is_measured_can_be_read() -> None:
    """The parameters of every case that `measure` has, on one GPU and on several."""
    pytest.importorskip("torch")
    from calibration.measure.case import KINDS
    from calibration.measure.plan import plan

    for gpus in (1, 4):
        for case in plan("full", KINDS, gpus, gpus, ()):
            data = {"kind": case.kind, "op": case.op, "params": dict(case.params), "ranks": list(case.ranks)}
            assert MeasuredRow.model_validate(data).params == case.params


def test_good_rows_are_read_and_equal_lines_count_once(tmp_path: Path) -> None:
    """Another time of the same case is another measurement."""
    rows = [ENVIRONMENT, MEMORY, MEMORY, MEMORY | {"time_s": 2e-5}, REDUCED, LAYERS, LAYERS | PROBED]
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    cases = read(tmp_path)
    assert [case.seconds for case in cases.rows_of("memory")] == [1e-5, 2e-5]
    assert len(cases.rows) == 5
    assert len(cases.environments) == 1


PACKED = gzip.compress(json.dumps(MEMORY).encode() * 50, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.gz", PACKED[:-20], "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", PACKED[:20] + bytes(10) + PACKED[30:], "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", b"{}", "a.jsonl.gz: cannot be read"),
        ("a.jsonl", b"\xff\xfe", "a.jsonl: is not text"),
        ("a.jsonl", b"", "holds no measurements"),
        ("a.jsonl", json.dumps(ENVIRONMENT).encode(), "holds no measurements"),
        ("a.jsonl", json.dumps(MEMORY | {"kind": "zzz"}).encode(), "holds no measurements"),
        ("a.csv", b"m,n,k,latency\n1,2,x,3\n", "a.csv, line 2: k: is no measured figure"),
        ("a.csv", b"m,n,k,latency\n1,2\n", "a.csv, line 2: k: is no measured figure"),
        ("a.csv", b"m,n,k,latency\n1,2,3,0\n", "a.csv, line 2: latency: is no measured figure"),
    ],
)
def test_a_file_that_is_not_of_measurements_is_said(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert words in str(caught.value)


def test_measurements_of_two_gpus_are_not_mixed(tmp_path: Path) -> None:
    for name, gpu in (("a", "NVIDIA H100 80GB HBM3"), ("b", "NVIDIA H200")):
        lines = [json.dumps(ENVIRONMENT | {"gpu": gpu}), json.dumps(MEMORY)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match="several GPUs"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hold-out", "0"], "not measured on so many GPUs"),
        (["--hold-out", "-1"], "not measured on so many GPUs"),
        (["--hold-out", "16"], "not measured on so many GPUs"),
        (["--hold-out", "2"], "leaves no collective to fit"),
        (["--out", "none/mine.yaml"], "its directory does not exist"),
        (["--out", "."], "--out"),
        (["--out", "mine.json"], "a name that ends in .yaml"),
        (["--out", "a.jsonl"], "is a file that this command reads"),
        (["--plots", "a.jsonl"], "is a file, not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_fit(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (ENVIRONMENT, MEMORY, REDUCED)))
    assert main(["fit", "a.jsonl", "--base", "h100-sxm-80gb", "--out", "mine.yaml", *options]) == 2
    assert words in capsys.readouterr().err


def test_too_few_cases_of_attention_are_said() -> None:
    case = measured_case("attention", "fwd", 1e-4, backend="cudnn", head_dim=128, length=1024)
    with pytest.raises(InputError, match="too few cases of cudnn attention"):
        attention.fit(Cases((case,), (ENVIRONMENT,)), load_profile("h100-sxm-80gb"))

"""`python -m calibration measure`: every case gets a row, a run goes on where it stopped, nothing hangs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from calibration.measure.case import Case, shuffled
from calibration.measure.store import ResultRows, key_of
from simulator.errors import InputError
from tests.support.measurements import ROOT, row

SHIPPED = sorted((ROOT / "calibration" / "measurements").glob("*/*.jsonl.gz"))


def test_rows_are_kept_and_a_line_cut_off_is_measured_again(tmp_path: Path) -> None:
    rows = ResultRows(tmp_path)
    rows.start({"gpu": "A", "command": "measure", "date": "2026-01-01"})
    rows.add(row(1, time_s=1.0))
    rows.add(row(2, error="out of memory"))
    with rows.path.open("a") as stream:
        stream.write('{"kind": "matmul", "op": "m')  # the machine was taken away while it was written
    again = ResultRows(tmp_path)
    assert again.done(failed_too=True) == {key_of(row(1)), key_of(row(2))}
    assert again.done(failed_too=False) == {key_of(row(1))}
    again.add(row(2, time_s=2.0))  # tried again: the later row counts
    assert not ResultRows(tmp_path).failures()


def test_rows_of_two_machines_do_not_mix(tmp_path: Path) -> None:
    ResultRows(tmp_path).start({"gpu": "A", "command": "measure", "date": "2026-01-01"})
    with pytest.raises(InputError, match="another gpu"):
        ResultRows(tmp_path).start({"gpu": "B", "command": "measure", "date": "2026-01-01"})


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").write_text("m,n,k\n1,2,3\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        ResultRows(tmp_path)


@pytest.mark.parametrize("text", ["notes of mine", "notes of mine\n", '{"kind": "matmul", "op": "m\n', '{"a": '])
def test_a_last_line_that_was_not_cut_off_stays(text: str, tmp_path: Path) -> None:
    """One that is cut off has no end, and begins as all do."""
    (tmp_path / "measurements.jsonl").write_text(text)
    with pytest.raises(InputError, match="line 1 is not JSON"):
        ResultRows(tmp_path)
    assert (tmp_path / "measurements.jsonl").read_text() == text


@pytest.mark.parametrize(
    "line", ["[]", "3", "{}", '{"kind": "matmul"}', '{"kind": "a", "op": "b", "params": [], "ranks": []}']
)
def test_a_line_of_another_shape_is_said(line: str, tmp_path: Path) -> None:
    (tmp_path / "measurements.jsonl").write_text(f"{line}\n")
    with pytest.raises(InputError, match="line 1 is not of a measurement"):
        ResultRows(tmp_path)


def test_the_order_is_mixed_and_always_the_same() -> None:
    cases = [Case("matmul", "mm", {"m": m}) for m in range(50)]
    assert shuffled(cases) == shuffled(cases + cases)
    assert shuffled(cases) != cases


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_measurements_say_where_they_come_from(path: Path) -> None:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    environments = [one for one in rows if one["kind"] == "environment"]
    assert environments
    for environment in environments:
        for name in ("gpu", "nvidia_smi", "cuda", "nccl", "nvls", "torch", "date", "command"):
            assert name in environment, name
    keys = Counter(key_of(one) for one in rows if one["kind"] != "environment")
    assert max(keys.values()) == 1
    for one in rows:
        if one["kind"] != "environment" and "error" not in one:
            assert one.get("time_s", 0) > 0 or one.get("kernel_s", 0) > 0 or "kernels" in one, one

"""``llmsim validate``."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from calibration import __main__ as calibration
from simulator.config import load_workload, parse_changes
from simulator.errors import InputError
from simulator.validation import read_rows
from simulator.validation.memory_suite import MEMORY_SUITES
from tests.support.commands import command


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_validate_tells_which_row_it_is_at_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--row", "korthikanti-t5-001", "--row", "korthikanti-t5-002"]
    for path in ("-", os.devnull):
        assert command("validate", "megatron-2022", *rows, "--json", path) == 0
        assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert command("validate", "megatron-2022", *rows, "--json", "-") == 0
    assert "simulating megatron-2022: row 2 of 2" in terminal.getvalue()
    assert len(json.loads(capsys.readouterr().out)["suites"][0]["rows"]) == 2


def test_every_suite_is_printed_as_it_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second suite fails here; what came of the first stands there already."""

    def fails(rows: object) -> None:
        raise InputError("no second suite")

    monkeypatch.setattr("simulator.commands.validate.outcomes_of_memory", fails)
    rows = ["--row", "korthikanti-t5-001", "--row", MEMORY_SUITES["memory"].rows[0]["id"]]
    assert command("validate", "megatron-2022", "memory", *rows) == 2
    out, err = capsys.readouterr()
    assert "korthikanti-t5-001" in out
    assert "no second suite" in err


@pytest.mark.parametrize("columns", [80, 120])
def test_a_narrow_terminal_cuts_nothing_that_is_validated(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, sizes and figures stand whole; what there is no room for is named, and reasons stand below."""
    monkeypatch.setenv("COLUMNS", str(columns))
    ids = ["comm-0033", "comm-0091", "comm-0225"]
    assert command("validate", "collectives", *(word for name in ids for word in ("--row", name))) in (0, 1)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    for words in (*ids, "all_reduce", "reduce_scatter", "4,294,967,296", "17,179,869,184", "predicted", "17.29 ms"):
        assert words in out
    assert ("nvls_tree" in out, "No room for by" in out) == (columns == 120, columns == 80)
    assert "comm-0225 skipped: has neither a latency nor an algbw" in out


STEPS = {"id": "a", "workload": "gpt22b_tp8", "measured_step_s": "1.4"}


def test_a_column_is_read_or_a_label_that_is_named_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels of the shipped tables are nothing to tell; a user's are; one that is nearly a column is not let through,
    and neither is one in capitals."""

    def validate(columns: dict[str, str], *suite: str) -> tuple[int, str, str]:
        table = tmp_path / "mine.csv"
        table.write_text("\n".join(map(",".join, (columns.keys(), columns.values()))) + "\n")
        status = command("validate", *suite, "--rows", table)
        return status, *capsys.readouterr()

    assert validate(STEPS | {"source": "x", "notes": "y", "mfu": "0.4"})[::2] == (0, "")
    status, _, err = validate(STEPS | {"loss": "2.1", "tensor_parallel": "8", "note v1.0": "z"})
    told = "columns taken as labels, which change nothing: loss, tensor_parallel, note v1.0"
    assert (status, err) == (0, f"warning: {told}\n")
    for wrong, right in {"measured_steps_s": "measured_step_s", "vp": "vpp", "n_gpu": "n_gpus", "TP": "tp"}.items():
        status, out, err = validate(STEPS | {wrong: "8"})
        assert (status, out) == (2, "")
        assert f"unknown column\n  found:   '{wrong}'" in err
        assert f"fix:     {right}; or" in err
    copied = {"id": "a", "op": "all_reduce", "size": "8MB", "n_gpus": "8", "nodes": "1", "algbw": "100", "busbw": ""}
    copied |= {"latency_us": "", "hardware": "", "cluster": "dgx_h100"}
    status, _, err = validate(copied | {"date": "x"}, "collectives")
    assert (status, err) == (0, "warning: columns taken as labels, which change nothing: date\n")
    status, _, err = validate(copied | {"algos": "ring"}, "collectives")
    assert status == 2
    assert "fix:     algo; or" in err


@pytest.mark.parametrize("value", ["", " ", "# nothing"])
def test_a_key_set_to_nothing_is_refused_and_to_null_is_the_default(
    value: str, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every command that changes keys: a shell variable that is not set leaves nothing behind the sign."""
    given = [f"parallelism.dp={value}"]
    for name in ("run", "check"):
        assert command(name, workload, "--set", *given) == 2
        err = capsys.readouterr().err
        assert "--set parallelism.dp: has no value" in err
        assert "--set parallelism.dp=null for the default" in err
    changed = ["--set", f"node.gpus.type={value}"]
    assert command("import", write_matrix(tmp_path), *changed) == 2
    assert "--set node.gpus.type: has no value" in capsys.readouterr().err
    for name, more in (("predict", ["--out", "p.json"]), ("compare", ["--measured", str(tmp_path), "--out", "c"])):
        assert calibration.main([name, str(workload), "--set", *given, *more]) == 2
        assert "--set parallelism.dp: has no value" in capsys.readouterr().err
    assert load_workload(workload, parse_changes(["parallelism.dp=null", "seed=~"])).parallelism.dp == 1


def write_matrix(folder: Path) -> Path:
    path = folder / "topo.txt"
    path.write_text("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n")
    return path


def test_a_table_without_the_columns_names_one_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("id\na\n")
    assert command("validate", "--rows", tmp_path / "rows.csv") == 2
    (template,) = re.findall(r"the columns of (\S+)", capsys.readouterr().err)
    assert len(read_rows(Path(template))) > 1

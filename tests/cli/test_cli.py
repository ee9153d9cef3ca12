"""The command line's frame: exit status, messages, output files, and no traceback ever."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import simulator
from calibration import __main__ as calibration
from simulator import models
from simulator.cli import listing
from simulator.cli.app import COMMANDS, main
from simulator.cli.options import parse_ranks
from simulator.cli.outputs import check_outputs, write_json
from simulator.cli.streams import signals_raise
from simulator.cli.terminal import console, table
from simulator.config import load_workload, parse_changes
from simulator.errors import InputError
from simulator.network.collectives import OPERATIONS
from simulator.output.files import writing
from simulator.validation import read_rows
from simulator.validation.memory_suite import MEMORY_SUITES

LEGAL: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000},
    "training": {"seq": 256, "global_batch": 8},
    "parallelism": {"tp": 2, "pp": 2, "dp": 2},
    "cluster": "dgx_a100",
}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(LEGAL))
    return path


def command(*arguments: object) -> int:
    """The exit status of one command."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


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


KINDS = ["models", "topologies", "gpus", "schedules", "profiles", "stacks", "collectives", "workloads", "suites"]


@pytest.mark.parametrize("kind", KINDS)
def test_list_shows_what_is_shipped(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", kind, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows
    assert command("list", kind) == 0
    out = capsys.readouterr().out
    assert all(str(next(iter(row.values()))) in out for row in rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [80, 120])
def test_a_list_that_is_too_wide_leaves_out_columns_and_cuts_no_name_or_number(
    kind: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(listing._ROWS, kind, cache(listing._ROWS[kind]))
    assert command("list", kind, "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    monkeypatch.setenv("COLUMNS", str(width))
    assert command("list", kind) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    names = list(rows[0])
    left_out = re.search(r"No room for (.*?):", " ".join(out.split()))
    shown = names[: -len(left_out[1].split(", "))] if left_out else names
    assert len(shown) >= 2
    for row in rows:
        cells = [f"{row[name]:,}" if isinstance(row[name], int) else str(row[name]) for name in shown]
        assert all(cell in out for cell in cells if " " not in cell)
    monkeypatch.delenv("COLUMNS")
    assert command("list", kind) == 0
    whole = capsys.readouterr().out
    assert "No room" not in whole
    monkeypatch.setenv("COLUMNS", "0")
    assert command("list", kind) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "absent.yaml"], "no such file"),
        (["check", "gpt175b"], "workload gpt175b_3d"),
        (["check"], "WORKLOAD"),
        (["check", "gpt175b_3d", "--set", "parallelism.tp"], "KEY=VALUE"),
        (["check", "gpt175b_3d", "--set", "parallelism.tpp=2"], "tp instead of tpp"),
        (["check", "gpt175b_3d", "--set", "parallelism.pp=[1"], "--set parallelism.pp"),
        (["check", "gpt175b_3d", "--json", "/nowhere/x.json"], "mkdir -p /nowhere"),
        (["check", "gpt175b_3d", "--json", "/tmp"], "is a directory"),
        (["check", "gpt175b_3d", "--set", "calibration=h100-sxm-80gb"], "--set: calibration: "),
        (
            ["collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--calibration", "h100-sxm-80gb"],
            "another GPU",
        ),
        (["run", "gpt175b_3d", "--gantt", "x.bmp"], "ends in .png, a name that ends in .svg"),
        (["run", "gpt175b_3d", "--gantt", ".png"], "a name that ends in .png"),
        (["run", "gpt175b_3d", "--memory", "x.bmp"], "ends in .png, a name that ends in .svg"),
        (["topology", "dgx_a100", "--plot", "-"], "needs a file"),
        (["topology", "dgx_a100", "--nodes", "0"], "--nodes: nodes: "),
        (["run", "gpt175b_3d", "--json", ""], "needs the name of a file"),
        (["run", "gpt175b_3d", "--json", "x" * 5000], "--json: cannot be a file: File name too long"),
        (["run", "gpt175b_3d", "--trace", "x/" * 2500], "--trace: cannot be a file: File name too long"),
        (["run", "x" * 5000], "cannot be a file: File name too long"),
        (["run", "~nosuchuser/x.yaml"], "cannot be a file: Could not determine home directory"),
        (["topology", "~nosuchuser/x.yaml"], "cannot be a file"),
        (["check", "gpt175b_3d", "--set", "calibration=~nosuchuser/x.yaml"], "--set: calibration: cannot be a file"),
        (["check", "gpt175b_3d", "--set", "cluster=~nosuchuser/x.yaml"], "--set: cluster: cannot be a file"),
        (["check", "gpt175b_3d", "--set", "model={hf_config: ~nosuchuser/x}"], "--set: model.hf_config: cannot be"),
        (["run", "gpt175b_3d", "--trace", "-"], "needs a file"),
        (["run", "gpt175b_3d", "--trace-ranks", "all"], "--trace FILE"),
        (["run", "gpt175b_3d", "--trace", "t.json", "--trace-ranks", "0-9999"], "0 to 1535"),
        (["run", "gpt175b_3d", "--trace", "t.json", "--trace-ranks", "3-1"], "0-7,16"),
        (["run", "gpt175b_3d", "--trace", "same.json", "--json", "same.json"], "is the file of"),
        (["run", "gpt175b_3d", "gpt22b_tp8", "--trace", "t.json"], "shows one workload"),
        (["run", "gpt175b_3d", "--kineto", "x.json"], "--kineto"),
        (["run", "gpt175b_3d", "--trace-dir", "missing"], "mkdir -p missing"),
        (["run", "gpt175b_3d", "gpt22b_tp8", "--trace-dir", "."], "shows one workload"),
        (["runn"], "run"),
        (["list", "modelz"], "fix:     models"),
        (["check", "gpt175b_3d", "--set", "parallelism.schedule=1b1f"], "fix:     schedule: 1f1b"),
        (["check", "--schema", "cluste"], "allowed: workload, cluster"),
        ([], "Commands"),
    ],
)
def test_bad_input_is_status_2_with_one_message(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    out, err = capsys.readouterr()
    assert words in out + err
    assert "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\x89PNG\x00", b"a: [", b"a: 1\na: 2", b"- 1", b"model: {layers: 1}"])
def test_a_bad_file_is_status_2_and_is_named(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    for name in ("check", "run"):
        assert command(name, path) == 2
        assert str(path) in capsys.readouterr().err


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert command(name, "--help") == 0
        assert f"llmsim {name} " in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100])
def test_help_fits_into_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is longer than a line, no option is cut in two, no sentence short. Of `collective` every operation is
    followed by its algorithms, on as many lines as that takes."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        for program in ([name, "--help"], ["--help"]):
            assert command(*program) == 0
            lines = capsys.readouterr().out.splitlines()
            assert max(map(len, lines)) <= columns
            assert not [line for line in lines if re.search(r" --[a-z-]*-$", line)]
            assert not [line for line in lines if line.endswith("...") and "[" not in line]
    assert command("collective", "--help") == 0
    shown = capsys.readouterr().out.split("Algorithms: ")[1].split()
    after = {name: shown[shown.index(name) + 1 :] for name in OPERATIONS}
    assert all(set(entry.algorithms) <= {one.rstrip(":") for one in after[name]} for name, entry in OPERATIONS.items())


@pytest.mark.parametrize("name", calibration.COMMANDS)
def test_help_of_calibration_fits_into_the_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        calibration.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r" --[a-z-]*-$", line)]


@pytest.mark.parametrize("name", calibration.COMMANDS)
def test_calibration_is_a_command_too(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its help is that of `python -m calibration`, but for who is called; so is what it refuses."""
    assert command("calibrate", name, "--help") == 0
    shown = capsys.readouterr().out
    assert f"  llmsim calibrate {name} " in shown
    with pytest.raises(SystemExit):
        calibration.main([name, "--help"])
    usual = capsys.readouterr().out.replace("python -m calibration", "llmsim calibrate")
    assert "".join(shown.split()) == "".join(usual.split())
    assert command("calibrate", name, "--no-such-option") == 2
    assert "error: " in capsys.readouterr().err


class Terminal(io.StringIO):
    """A standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 90])
def test_messages_are_broken_between_words(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors, warnings and what `check` prints; what goes on stands under the first word behind the label. A pipe has
    each on one line, as it was."""
    wrong = ["check", "gpt175b_3d", "--set", "parallelism.tpp=2"]
    legal = ["check", "gpt22b_tp8", "--set", "training.recompute=selective", "--set", "model.attention=flash"]
    said: dict[int, list[str]] = {}
    for width in (columns, 0):
        monkeypatch.setenv("COLUMNS", str(width) if width else "")
        assert (command(*wrong), command(*legal)) == (2, 0)
        captured = capsys.readouterr()
        said[width] = captured.out.splitlines() + captured.err.splitlines()
    assert max(map(len, said[columns])) <= columns < max(map(len, said[0]))
    for label in ("  allowed: ", "  model         ", "warning: "):
        (start,) = [number for number, line in enumerate(said[columns]) if line.startswith(label)][:1]
        goes_on = said[columns][start + 1]
        assert len(goes_on) - len(goes_on.lstrip()) == (2 if label == "warning: " else len(label)), goes_on
    assert " ".join(" ".join(said[columns]).split()) == " ".join(" ".join(said[0]).split())


def test_what_is_printed_has_no_blanks_at_the_ends_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["run", "gpt22b_tp8"],
        ["run", "gpt22b_tp8", "gpt22b_tp8"],
        ["list", "gpus"],
        ["topology", "dgx_h100"],
        ["schedule", "1f1b", "--stages", "2", "--microbatches", "4"],
        ["collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--sizes", "1M:4M"],
        ["validate", "megatron-2022", "--row", "korthikanti-t5-001"],
    ):
        assert command(*arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines
        assert not [line for line in lines if line != line.rstrip()]


def test_links_between_gpus_have_their_own_name_in_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for cluster, name in (("mi300x", "xgmi"), ("dgx_h100", "nvlink")):
        assert command("topology", cluster) == 0
        shown = {line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(" node*.gpu")}
        assert command("topology", cluster, "--json", "-") == 0
        links = json.loads(capsys.readouterr().out)["links"]
        listed = {link["kind"] for link in links if link["name"].startswith("node0.gpu")}
        assert shown == listed == {name, "pcie"}


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


def test_python_m_simulator_is_the_same_command(workload: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simulator", "check", workload], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(
        [sys.executable, "-m", "simulator", "check", "x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One line of bash, where ``$llmsim`` is the command."""
    environment = os.environ | {"llmsim": f"{sys.executable} -m simulator", "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        ["bash", "-c", line], env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("arguments", ["check gpt22b_tp8", "check gpt22b_tp8 --json -", "list models", "--help"])
def test_a_standard_output_that_fails_is_one_line_and_status_2(arguments: str, tmp_path: Path) -> None:
    done = shell(f"$llmsim {arguments} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", ["check gpt22b_tp8", "--help"])
def test_a_standard_output_that_is_closed_is_one_line_and_status_2(arguments: str, tmp_path: Path) -> None:
    """The first writing fails, of a command and of the help."""
    done = shell(f"$llmsim {arguments} >&-", tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written: it is closed\n")


@pytest.mark.parametrize("arguments", ["check gpt22b_tp8 --json -", "list models"])
def test_a_reader_that_has_gone_ends_a_command_quietly(arguments: str, tmp_path: Path) -> None:
    done = shell(f"$llmsim {arguments} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_closed_standard_output_does_not_matter_to_a_quiet_command(tmp_path: Path) -> None:
    assert shell("$llmsim check gpt22b_tp8 --quiet --json x.json >&-", tmp_path).returncode == 0
    assert (tmp_path / "x.json").is_file()
    assert shell("$llmsim check absent >&- 2>&-", tmp_path).returncode == 2
    assert shell("PYTHONIOENCODING=ascii $llmsim run gpt22b_tp8", tmp_path).returncode == 0


def test_control_characters_are_shown_and_not_sent(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", workload, "--set", "a\x1b[31m=1") == 2
    assert "a\\x1b[31m" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["[bold]x[/bold] [/red]", "[/]", ":smile: [x]", "x\\"])
def test_brackets_in_a_name_are_no_markup(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(LEGAL | {"name": name, "cluster": {"name": "dgx_a100", "nodes": 1}}))
    for workloads in ([path], [path, path]):
        assert command("run", *workloads) == 0
        assert name in capsys.readouterr().out
    printed = Console(width=100)
    with printed.capture() as captured:
        printed.print(simulator.run(path).summary())
    assert name in captured.get()
    console().print(table([{name: name}], name))
    assert capsys.readouterr().out.count(name) == 3


def test_two_workloads_stand_side_by_side(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "with_recompute.yaml"
    other.write_text(yaml.safe_dump(LEGAL | {"training": LEGAL["training"] | {"recompute": "full"}}))
    assert command("run", workload, other, "--json", tmp_path / "two.json") == 0
    runs = json.loads((tmp_path / "two.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["w", "with_recompute"]
    lines = capsys.readouterr().out.splitlines()
    step_time = next(line for line in lines if "step time" in line)
    assert step_time.split()[-1] == f"{runs[1]['step_time_s'] / runs[0]['step_time_s']:.4g}"
    recompute = next(line for line in lines if line.split()[:1] == ["recompute"])
    assert recompute.split()[1:3] == ["0.00", "s"]  # and no ratio to nothing
    assert len(recompute.split()) == 5


def test_run_is_strict_about_warnings_and_memory(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run", workload, "--quiet", "--strict") == 0
    assert command("run", workload, "--quiet", "--strict", "--set", "parallelism.dp=1") == 1  # GPUs without a rank
    too_large = ["--set", "training.seq=262144", "--set", "model.hidden=8192"]
    assert command("run", workload, "--quiet", *too_large) == 0
    assert command("run", workload, "--quiet", "--strict", *too_large) == 1
    assert "w: memory does not fit" in capsys.readouterr().err
    assert command("check", "--help") == 0
    assert "memory" not in capsys.readouterr().out


def test_ranks() -> None:
    assert parse_ranks("5, 0-2,1", 6, "--ranks") == [0, 1, 2, 5]
    assert parse_ranks("all", 4, "--ranks") == [0, 1, 2, 3]
    for text in ("", "1,", "-1", "a", "1-", "0-6", "2-1", "9" * 30):
        with pytest.raises(InputError, match="--ranks"):
            parse_ranks(text, 6, "--ranks")


def test_no_command_writes_over_its_input(workload: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text("node: {gpus: {type: a100-sxm-80gb, count: 8}, pcie: {generation: 4}}")
    rows = tmp_path / "rows.csv"
    rows.write_text("id\n")
    on_it = ["--set", f"cluster={cluster}"]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments in (
        ["run", workload, "--json", workload],
        ["run", workload, "--trace", tmp_path / "gone" / ".." / "w.yaml"],
        ["run", workload, *on_it, "--json", cluster],
        ["check", workload, *on_it, "--json", cluster],
        ["topology", cluster, "--json", cluster],
        ["collective", "--cluster", cluster, "--op", "all_reduce", "--json", cluster],
        ["validate", "--rows", rows, "--json", rows],
    ):
        assert command(*arguments) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_written_file(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests under nohup has SIGHUP ignored
    try:
        with pytest.raises(SystemExit) as caught, signals_raise(), writing(tmp_path / "x.json.gz") as file:  # noqa: PT012
            file.write(b"half")
            os.kill(os.getpid(), number)
        assert caught.value.code == 128 + number
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        with signals_raise():
            os.kill(os.getpid(), number)  # stays ignored
    finally:
        signal.signal(number, before)


def test_links_and_devices_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "target").read_text()) == {"a": 1}
    write_json(Path(os.devnull), {"a": 1})
    assert not Path(os.devnull).is_file()


def test_a_refused_write_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_json(tmp_path / "gone" / "x", {})
    with pytest.raises(InputError, match="No space left"), writing("/dev/full") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="--json"):
        check_outputs({"--json": tmp_path / "gone" / "x"})


def test_one_micro_batch_is_counted_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("schedule", "1f1b", "--stages", 4, "--microbatches", 1) == 0
    assert "1f1b: 4 ranks, 1 micro-batch\n" in re.sub(r" *\n", "\n", capsys.readouterr().out)


def test_several_schedules_follow_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """``--compare NAME ...``; without it a second name is one too many."""
    sizes = ("--stages", 2, "--microbatches", 4)
    assert command("schedule", "gpipe", *sizes, "--compare", "1f1b", "zb_h1", "--json", "-") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["schedules"]] == ["gpipe", "1f1b", "zb_h1"]
    assert command("schedule", "gpipe", "1f1b", *sizes) == 2
    assert "unexpected extra argument" in capsys.readouterr().err


def test_compared_schedules_do_equal_work(capsys: pytest.CaptureFixture[str]) -> None:
    """8 micro-batches of 1 + 2 on 4 ranks. 1f1b fills and drains for 3 whole passes of a stage: (8 + 3) x 3 = 33. Two
    chunks of half a stage fill and drain in half of that: (8 + 3 / 2) x 3 = 28.5. Of the warm-up's 4 micro-batches on
    the first rank 1f1b holds all, interleaved 11 halves. Every rank of both works for 8 x 3."""
    sizes = ("--stages", 4, "--microbatches", 8, "--compare", "interleaved")
    assert command("schedule", "1f1b", *sizes, "--json", "-") == 0
    reports = json.loads(capsys.readouterr().out)["schedules"]
    assert [report["makespan"] for report in reports] == pytest.approx([33, 28.5])
    busy = [report["makespan"] * (1 - report["bubble_fraction"]) for report in reports]
    assert busy == pytest.approx([24, 24])
    assert command("schedule", "1f1b", *sizes) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    figures = {row[0]: (row[1], row[-1]) for row in rows if row and row[0] in ("1f1b", "interleaved")}
    assert figures == {"1f1b": ("33", "4"), "interleaved": ("28.5", "5.5")}


def test_compared_files_of_other_sizes_do_not_do_the_same_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file has a rank of one chunk, the other two ranks of two: neither the table nor a sentence equates them."""
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text("0F0,0B0\n")
    assert command("schedule", "interleaved", "--stages", 2, "--microbatches", 2, "--csv", two) == 0
    capsys.readouterr()
    assert command("schedule", one, "--compare", two) == 0
    out, err = capsys.readouterr()
    assert "All do the same work" not in out
    assert "the schedules do not do the same work" in err
    assert f"{one}: 1 rank, 1 micro-batch; {two}: 2 ranks, 2 micro-batches" in err
    assert command("schedule", "1f1b", "--compare", two, "--stages", 2, "--microbatches", 2) == 0
    out, err = capsys.readouterr()
    assert "All do the same work" in out
    assert err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", 4], ["--microbatches: is missing", "fix:     a number, such as 8"]),
        ([], ["--stages: is missing", "--microbatches: is missing"]),
        (["--stages", 4, "--microbatches", 0], ["--microbatches: too small"]),
        (["--stages", 4, "--microbatches", 8, "--cost", "F=1,F=2"], ["--cost: F: is given twice"]),
        (["--stages", 4, "--microbatches", 8, "--cost", "F=0"], ["--cost: F: not a cost"]),
        (["--stages", 4, "--microbatches", 8, "--zb-memory-limit", 2], ["--zb-memory-limit: has no meaning"]),
    ],
)
def test_sizes_and_costs_of_a_schedule_are_refused_by_their_options(
    arguments: list[Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("schedule", "1f1b", *arguments) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words)


def test_the_file_of_a_steady_schedule_says_that_it_is_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, hints in (("zb_v", 1), ("1f1b", 0)):
        path = tmp_path / f"{name}.csv"
        assert command("schedule", name, "--stages", 2, "--microbatches", 4, "--csv", path) == 0
        assert capsys.readouterr().err.count("one step") == hints


def test_a_listing_of_workloads_has_every_axis_and_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", "workloads", "--json", "-") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "ep 8" in rows["mixtral_8x7b"]["layout"]
    assert "cp 16" in rows["llama3_405b_131k"]["layout"]
    assert [name for name, row in rows.items() if "does not fit" in row["note"]] == ["deepseek_v3_dualpipe"]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"llmsim {simulator.__version__}, compiled engine\n"


def test_a_table_without_the_columns_names_one_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("id\na\n")
    assert command("validate", "--rows", tmp_path / "rows.csv") == 2
    (template,) = re.findall(r"the columns of (\S+)", capsys.readouterr().err)
    assert len(read_rows(Path(template))) > 1


@pytest.mark.parametrize("together", [[], ["--share-fabric"]])
def test_pictures_of_two_workloads_stand_below_each_other(
    workload: str, together: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One panel per job, numbered, though both have one name; the pipelines on one axis of time."""
    from matplotlib.figure import Figure

    from simulator.output import gantt

    drawn: dict[str, Figure] = {}
    monkeypatch.setattr(gantt, "save_gantt", lambda figure, path: drawn.update({Path(path).stem: figure}))
    pictures = ["--gantt", str(tmp_path / "gantt.png"), "--memory", str(tmp_path / "memory.svg")]
    assert command("run", workload, workload, *together, *pictures, "--quiet") == 0
    for figure in drawn.values():
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        assert [title[:3] for title in titles] == ["1. ", "2. "]
    first, second = drawn["gantt"].axes
    assert first.get_xlim() == second.get_xlim()
    assert set(drawn) == {"gantt", "memory"}


@pytest.mark.parametrize("more", [[], ["--set", f"note={'x' * 100}"]])
def test_pictures_say_what_was_set(
    workload: Path, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the title of the first panel; as much as there is room for."""
    from matplotlib.figure import Figure

    from simulator.output import gantt

    drawn: list[Figure] = []
    monkeypatch.setattr(gantt, "save_gantt", lambda figure, path: drawn.append(figure))
    pictures = ["--gantt", str(tmp_path / "gantt.png"), "--memory", str(tmp_path / "memory.svg")]
    assert command("run", workload, *pictures, "--quiet", "--set", "training.micro_batch=2", *more) == 0
    assert len(drawn) == 2
    for figure in drawn:
        said = figure.axes[0].get_title(loc="right")
        assert said.startswith("training.micro_batch=2")
        assert said.endswith("x...") is bool(more)
        assert len(said) < 90


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_narrow_terminal_breaks_no_figure(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes of collectives stand whole in their lines, however narrow; a matrix of 16 devices (6 characters each) is
    shown where it fits, and said to be there where it does not."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert command("collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--sizes", "1M:1G") == 0
    shown = capsys.readouterr().out
    for power in range(20, 31):
        assert f" {2**power:,} " in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert command("topology", "dgx_h100") == 0
    shown = capsys.readouterr().out
    assert ("No room for how 16 devices are joined" in shown) is (columns < 120)
    assert ("gpu7  NV" in shown) is (columns == 120)
    assert command("topology", "dgx2_v100") == 0
    shown = " ".join(capsys.readouterr().out.split())
    said = "No room for how 24 devices are joined: a wide terminal shows it of up to 24."
    assert said in shown
    monkeypatch.setenv("COLUMNS", "900")
    assert command("topology", "gb200_nvl72") == 0
    assert "No room for how 144 devices" in capsys.readouterr().out

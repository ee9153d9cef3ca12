"""Standard output and files: closed, full, refused, interrupted; no traceback ever."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from simulator.__main__ import main as console_script
from simulator.cli.outputs import check_folder, check_outputs, write_json
from simulator.cli.streams import signals_raise
from simulator.errors import InputError
from simulator.output.files import make_folder, writing
from tests.support.commands import command
from tests.support.grids import one_in

#: Commands that load little; the second is refused.
LIST, ABSENT = "list schedules", "list absent"


def test_python_m_simulator_is_the_same_command() -> None:
    python = [sys.executable, "-m", "simulator"]
    done = subprocess.run([*python, *LIST.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([*python, *ABSENT.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One line of bash, where ``$llmsim`` is the command."""
    environment = os.environ | {"llmsim": f"{sys.executable} -m simulator", "PYTHONPATH": str(Path.cwd())}
    return subprocess.run(
        ["bash", "-c", line], env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("arguments", ["list schedules --json -", "--help"])
def test_a_standard_output_that_fails_is_one_line_and_status_2(arguments: str, tmp_path: Path) -> None:
    done = shell(f"$llmsim {arguments} >/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", ["list schedules", "--help"])
def test_a_standard_output_that_is_closed_is_one_line_and_status_2(arguments: str, tmp_path: Path) -> None:
    """The first writing fails, of a command and of the help."""
    done = shell(f"$llmsim {arguments} >&-", tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: standard output cannot be written: it is closed\n")


def test_a_standard_error_that_fails_changes_nothing(workload: Path, tmp_path: Path) -> None:
    """The job has a warning, of learned positions beside swiglu, which goes nowhere on a full disk."""
    run = f"$llmsim run {workload} --set model.activation=swiglu --quiet"
    assert shell(run, tmp_path).stderr.startswith("warning: ")
    for nowhere in ("2>/dev/full", "2>&-"):
        assert shell(f"{run} {nowhere}", tmp_path).returncode == 0
        assert shell(f"$llmsim {ABSENT} {nowhere}", tmp_path).returncode == 2


def test_an_interrupt_during_imports_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's modules are what is imported first, and for longest."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught, monkeypatch.context() as patch:  # noqa: PT012
        patch.setattr("builtins.__import__", interrupted)
        console_script()
    assert caught.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", one_in(2, ["list schedules", "list gpus --json -"]))
def test_a_reader_that_has_gone_ends_a_command_quietly(arguments: str, tmp_path: Path) -> None:
    done = shell(f"$llmsim {arguments} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_closed_standard_output_does_not_matter_to_a_quiet_command(tmp_path: Path) -> None:
    assert (
        shell("$llmsim schedule gpipe --stages 2 --microbatches 2 --quiet --json x.json >&-", tmp_path).returncode == 0
    )
    assert (tmp_path / "x.json").is_file()
    assert shell(f"$llmsim {ABSENT} >&- 2>&-", tmp_path).returncode == 2
    assert shell(f"PYTHONIOENCODING=ascii $llmsim {LIST}", tmp_path).returncode == 0


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


def test_a_folder_on_a_read_only_disk_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions allow it, for root has all of them; that nothing can be made there shows when it is tried."""

    def read_only(**options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "there").touch()
    check_outputs({"--json": tmp_path / "x"})
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    for name in ("x", "there"):
        with pytest.raises(InputError, match="--json: cannot be written: Read-only file system"):
            check_outputs({"--json": tmp_path / name})
    with pytest.raises(InputError, match="--trace-dir: cannot be written: Read-only file system"):
        check_folder("--trace-dir", tmp_path)
    check_outputs({"--json": Path(os.devnull)})


def test_a_name_that_no_file_can_have_is_bad_input() -> None:
    with pytest.raises(InputError, match="cannot be a file: embedded null character"), writing("x\0.json"):
        pass
    with pytest.raises(InputError, match="cannot be a file: embedded null character"):
        make_folder("x\0")


def test_a_refused_write_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_json(tmp_path / "gone" / "x", {})
    with pytest.raises(InputError, match="No space left"), writing("/dev/full") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="--json"):
        check_outputs({"--json": tmp_path / "gone" / "x"})

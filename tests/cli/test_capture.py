"""`llmsim capture`: a function of the user's that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.cli.app import main


def test_a_function_that_fails_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "failing_module.py").write_text("def job():\n    raise ValueError('no data')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["capture", "failing_module:job", "--out", "m.json"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "failing_module:job: failed: ValueError: no data" in told
    assert "line 2 of" in told

"""Notebooks run from top to bottom without an error, and are small in the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: Notebooks that simulate for more than a few seconds.
SLOW = {
    "choosing_a_layout.ipynb",
    "gpt3_175b_up_to_1536_gpus.ipynb",
    "pipeline_schedules.ipynb",
    "the_network.ipynb",
    "where_a_step_goes.ipynb",
}


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_small(path: Path) -> None:
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name in SLOW else []) for path in NOTEBOOKS],
)
def test_the_code_of_a_notebook_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells one after the other, without a kernel: pictures are made, and not drawn."""
    pytest.importorskip("IPython")
    monkeypatch.chdir(path.parent)
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
            exec(compile("\n".join(lines), path.name, "exec"), names)
    plt.close("all")
    assert len(names) > 5
    assert not capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter and its transport, not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    errors = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "error" or (output.output_type == "stream" and output.name == "stderr")
    ]
    assert not errors

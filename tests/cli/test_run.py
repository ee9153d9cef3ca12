"""``llmsim run``: names, several workloads, pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import simulator
from simulator.cli.terminal import console, table
from tests.support.commands import LEGAL, command
from tests.support.unadvised import without_advice  # noqa: F401


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize("name", ["[bold]x[/bold] [/red] :smile: [x]", "[/]", "x\\"])
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


@pytest.mark.usefixtures("without_advice")
def test_run_is_strict_about_warnings_and_memory(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run", workload, "--quiet", "--strict") == 0
    assert command("run", workload, "--quiet", "--strict", "--set", "parallelism.dp=1") == 1  # GPUs without a rank
    too_large = ["--set", "training.seq=262144", "--set", "model.hidden=8192"]
    assert command("run", workload, "--quiet", *too_large) == 0
    assert command("run", workload, "--quiet", "--strict", *too_large) == 1
    assert "w: memory does not fit" in capsys.readouterr().err
    assert command("check", "--help") == 0
    assert "memory" not in capsys.readouterr().out


def test_run_names_the_files_that_it_writes(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of written files go to standard error, as standard output is JSON here. A quiet run names none."""
    trace, gantt = tmp_path / "step.json", tmp_path / "step.png"
    outputs = ["--json", "-", "--trace", str(trace), "--gantt", str(gantt)]
    assert command("run", workload, *outputs) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[:2] == [f"written: {trace}", f"written: {gantt}"]
    assert json.loads(printed.out)["name"] == "w"
    assert command("run", workload, *outputs, "--quiet") == 0
    assert "written" not in capsys.readouterr().err


def test_traces_of_two_jobs_are_not_mixed(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first job has two stages and a trace of each, ranks 0 and 4; the second would leave that of rank 4."""
    traces, run = tmp_path / "traces", ["run", str(workload), "--quiet", "--trace-dir"]
    for _ in range(2):  # the same files may be replaced
        assert command(*run, traces) == 0
    names = [f"rank{rank}.pt.trace.json.gz" for rank in (0, 4)]
    assert sorted(file.name for file in traces.iterdir()) == names
    capsys.readouterr()
    for other in (["--set", "parallelism.pp=1", "--set", "parallelism.dp=4"], ["--trace-ranks", "0"]):
        assert command(*run, traces, *other) == 2
        err = capsys.readouterr().err
        assert f"{traces}: holds traces of other ranks or steps\n  found:   '{names[1]}'" in err


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

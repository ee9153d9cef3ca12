"""README.md and docs/: commands and Python run, and print what is said that they print; pictures and links exist."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import simulator
from simulator.cli.app import COMMANDS, main
from tests.support.kineto import save_step

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Pages with commands to run, by their path in the project.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
#: What sets up an environment; the wheel's test covers the packaging.
INSTALLS = {"pip install ."}
#: Commands that take more than a few seconds, and one that reads what such a one writes. Pages of sweeps and searches
#: are slow as a whole.
SLOW_PAGES = {"docs/sweep.md", "docs/search.md", "docs/how-to/plan.md"}
SLOW = {
    "llmsim run mixtral_8x7b --set model.moe.token_distribution.skew=0.5 --set training.global_batch=64",
    "llmsim search gpt22b_tp8 --gpus 8 --fix tp=4,8 --fix cp=1 --fix micro_batch=1 --top 2 --why tp=8",
    "llmsim search gpt22b_tp8 --gpus 8 --fix tp=4,8 --fix cp=1 --fix micro_batch=4 --top 1",
    "llmsim run gpt22b_tp8 llama3_8b_dgx_h100 --report both.html --budget-s 10",
    "llmsim run gpt22b_tp8 --report page.html",
    "llmsim init --model llama2-7b --cluster rtx-4090 --gpus 2 --training lora --seq 1024 --yes --out two.yaml",
    "llmsim run two.yaml",
    "llmsim run llama3_70b --set cluster.name=dgx_b200 --set training.fp4=te_nvfp4",
}


class Shown(NamedTuple):
    page: str
    command: str
    output: list[str]


class Code(NamedTuple):
    page: str
    text: str


def blocks(*languages: str) -> list[Code]:
    pattern = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    flags = re.MULTILINE | re.DOTALL
    return [Code(page, block) for page, text in PAGES.items() for block in re.findall(pattern, text, flags=flags)]


def commands() -> list[Shown]:
    """Every command, with the output that stands below it."""
    plain = [
        Shown(page, line, [])
        for page, block in blocks("bash", "sh", "shell")
        for line in block.splitlines()
        if line.strip()
    ]
    shown: list[Shown] = []
    for page, block in blocks("console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                shown.append(Shown(page, line[2:], []))
            elif line.strip():
                shown[-1].output.append(line)
    return plain + shown


def form(shown: Shown) -> tuple[str, ...]:
    """Return page, command and options but for ``--set``, which changes nothing but the values of a workload.

    Of runs of one form that show no output `make test` has the first.
    """
    words = shlex.split(shown.command)
    return shown.page, *(word for word in words if word.startswith("--") and word != "--set")


def cases() -> Iterator[object]:
    """Every command once, where it prints something that is shown rather than elsewhere."""
    seen, forms = INSTALLS.copy(), set[tuple[str, ...]]()
    for shown in sorted(commands(), key=lambda shown: not shown.output):
        if shown.output or shown.command not in seen:
            is_run = shown.command.startswith("llmsim run ")
            repeats = is_run and form(shown) in forms and not shown.output and shown.page != "README.md"
            slow = shown.page in SLOW_PAGES or shown.command in SLOW or repeats
            forms |= {form(shown)} if is_run else set()
            yield pytest.param(shown, id=f"{shown.page}: {shown.command}", marks=[pytest.mark.slow] if slow else [])
        seen.add(shown.command)


def python_cases() -> Iterator[object]:
    for number, code in enumerate(blocks("python")):
        slow = code.page in SLOW_PAGES or re.search(r"simulator\.(search|sweep)\(", code.text) is not None
        yield pytest.param(code.text, id=f"{code.page}: {number}", marks=[pytest.mark.slow] if slow else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the workload files that pages show, under the names they give, and two ranks' traces, recorded and
    simulated. No command needs what another one writes: each may run in a process of its own."""
    path = tmp_path_factory.mktemp("readme")
    save_step(path)
    small = {"model.layers": 2, "training.recompute": "none"}
    simulator.run("llama3_8b_dgx_h100", set=small).save_traces(path, range(2))  # of docs/how-to/traces.md
    on_two = {**small, "parallelism.dp": 2, "training.global_batch": 4}
    simulator.run("llama3_8b_dgx_h100", set=on_two).save_chakra(path)  # of docs/how-to/astra-sim.md
    for _, block in blocks("yaml"):
        if name := re.match(r"# (\S+\.yaml):", block):
            (path / name[1]).write_text(block, encoding="utf-8")
    return path


@pytest.mark.parametrize("shown", list(cases()))
def test_every_command_runs_and_prints_what_is_shown(
    shown: Shown, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands run in this process, which has imported everything. The tests of the wheel start a process."""
    program, *arguments = shlex.split(shown.command)
    if [program, *arguments[:2]] == ["python", "-m", "simulator"]:
        program, arguments = "llmsim", arguments[2:]
    assert program == "llmsim", "a command that this test cannot run"
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 0, out + err
    printed = [" ".join(line.split()) for line in out.splitlines()]
    lines = [" ".join(line.split()) for line in shown.output]
    assert not [line for line in lines if line not in printed], "a page shows what is no longer printed"
    if shown.page == "README.md" and lines:  # which shows the beginning, without a line left out
        assert lines == [line for line in printed if line][: len(lines)]


@pytest.mark.parametrize("code", list(python_cases()))
def test_the_python_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.py").write_text(code, encoding="utf-8")
    runpy.run_path("snippet.py", run_name="__main__")
    assert capsys.readouterr().out


def test_there_is_python() -> None:
    assert blocks("python")


def test_the_readme_fits_on_a_page() -> None:
    assert len(README.splitlines()) <= 150


def test_all_suites_have_a_row_on_the_page_of_accuracy() -> None:
    recorded = pytest.importorskip("simulator.validation.errors").recorded()
    assert set(re.findall(r"^\| `([\w-]+)` \| \d", PAGES["docs/accuracy.md"], flags=re.MULTILINE)) == set(recorded)


def test_all_commands_have_a_section() -> None:
    sections = re.findall(r"^## llmsim (\w+)$", PAGES["docs/reference/commands.md"], flags=re.MULTILINE)
    assert sections == list(COMMANDS)


def test_the_frameworks_that_a_workload_may_name_have_a_row() -> None:
    from simulator.frameworks import FRAMEWORKS

    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES["docs/frameworks.md"], flags=re.MULTILINE))
    assert rows == set(FRAMEWORKS)


def test_every_key_of_a_result_has_a_row() -> None:
    """The keys of a small job's JSON are those that the first column of the page names."""
    import simulator

    result = simulator.run("llama2_7b_zero2", set={"training.global_batch": 8})
    columns = re.findall(r"^\| (`[^|]+) \|", PAGES["docs/reference/result.md"], flags=re.MULTILINE)
    named = [key for column in columns for key in re.findall(r"`(\w+)`", column)]
    assert set(named) == {"command", *result.to_dict()}


@pytest.mark.parametrize("page", ["DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES])
def test_links_into_the_project_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)[)#]", (ROOT / page).read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (ROOT / page).parent.joinpath(target).exists()
    ]
    assert not missing


def test_files_that_the_recipes_name_exist() -> None:
    """CONTRIBUTING.md names the file that each recipe touches."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = [
        name for name in re.findall(r"`((?:simulator|calibration|topologies)/[\w./]+)`", text) if name == name.lower()
    ]
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists()]


def test_pages_are_in_the_navigation_and_pictures_shown_and_small() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.*"):
        shown_in = "".join(PAGES.values()) if path.suffix in (".png", ".svg") else navigation
        assert str(path.relative_to(ROOT / "docs")) in shown_in
        assert path.stat().st_size < 200_000

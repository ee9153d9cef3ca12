"""Commands as functions of Python return what the commands write."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import simulator
from simulator import plot
from simulator.advising.advise import advise
from simulator.cli.app import main
from simulator.commands.schema import schema_of
from simulator.errors import InputError
from tests.support.jobs import job

#: Command as it is typed, and the same in Python.
SAME: dict[str, tuple[list[str], Callable[[], simulator.Result]]] = {
    "check": (["check", "gpt22b_tp8"], lambda: simulator.check("gpt22b_tp8")),
    "collective": (
        ["collective", "--cluster", "dgx_a100", "--nodes", "2", "--op", "all_reduce", "--sizes", "1K:1M:32"],
        lambda: simulator.collective("dgx_a100", "all_reduce", nodes=2, sizes=[2**10, 2**15, 2**20]),
    ),
    "topology": (["topology", "dgx_a100"], lambda: simulator.topology("dgx_a100")),
    "validate": (
        ["validate", "megatron-2022", "--row", "korthikanti-t5-001"],
        lambda: simulator.validate("megatron-2022", only=["korthikanti-t5-001"]),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_function_returns_what_the_command_writes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    typed, call = SAME[name]
    with pytest.raises(SystemExit) as caught:
        main([*typed, "--json", "-"])
    assert caught.value.code == 0
    result = call()
    assert isinstance(result, simulator.Result)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(result.to_dict()))
    assert result.to_dict()["command"] == name
    assert 1 <= len(repr(result).splitlines()) < 8


def test_results_of_commands_have_what_is_asked_of_them() -> None:
    # Two sizes, 1 MiB and 4 MiB, of two ranks joined by NVLink: busbw of an all-reduce of two is its algbw.
    table = simulator.collective("dgx_a100", "all_reduce", sizes="1M:4M:4", ranks=[0, 1]).table()
    assert table["size_bytes"].tolist() == [2**20, 2**22]
    assert table["busbw_Bps"].tolist() == pytest.approx(table["algbw_Bps"].tolist())
    assert isinstance(simulator.topology("dgx_a100").plot(), Figure)
    assert simulator.check(job(parallelism__tp=2)).groups["tp"] == [[0, 1]]
    heard: list[tuple[str, int, int]] = []
    validated = simulator.validate(
        "megatron-2022", only=["korthikanti-t5-001"], max_row=1e-9, watch=lambda *told: heard.append(told)
    )
    assert heard == [("megatron-2022", 1, 1)]
    assert not validated.passed
    assert "NOT MET" in repr(validated)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: simulator.collective("dgx_a100", "all_reduce", ranks=[0, 99]), "does not exist"),
        (lambda: simulator.collective("dgx_a100", "all_reduce", ranks=[0]), "at least two ranks"),
        *(
            (partial(simulator.collective, "dgx_a100", "all_reduce", ranks=ranks), "must be a list of whole numbers")
            for ranks in ([0, "a"], [0.5, 1], [True, 2], 8, "0-7")
        ),
        (lambda: simulator.collective("dgx_a100", "all_reduce", sizes=[2**63]), r"to 2\^63 - 1"),
        (lambda: simulator.collective("dgx_a100", "all_reduce", sizes=[0]), "are no sizes"),
        (lambda: simulator.topology({"name": "dgx_a100", "nodez": 2}), "unknown key"),
        (lambda: simulator.check(job(parallelism__tp=3)), "parallelism"),
        (lambda: simulator.validate("megatron"), "unknown suite"),
        (lambda: simulator.validate("megatron-2022", only=["nobody"]), "no such row"),
    ],
)
def test_what_cannot_be_used_is_said(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


def test_figures_are_attributes() -> None:
    result = simulator.run(job(parallelism__pp=2))
    report = result.to_dict()
    for name in ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "bubble_fraction"):
        assert getattr(result, name) == report[name]
    assert result.peak_bytes == report["memory"]["peak_bytes"]
    assert result.fits is report["memory"]["fits"]
    assert result.headroom_bytes == report["memory"]["capacity_bytes"] - result.peak_bytes
    exposed = sum(report["time_breakdown_s"]["exposed"].values())
    assert result.exposed_communication_fraction == exposed / result.step_time_s


def test_a_notebook_shows_the_key_figures_and_no_markup_of_names() -> None:
    shown = simulator.run({**job(parallelism__pp=2), "name": "<b>mine</b>"})._repr_html_()
    for expected in ("step time", "bubble", "MFU", "waiting for other ranks", "&lt;b&gt;mine"):
        assert expected in shown
    assert "<script" not in shown


@pytest.mark.parametrize("name", ["gantt", "memory", "time_breakdown", "critical_path", "links"])
def test_plots_are_drawn_into_axes(name: str) -> None:
    result = simulator.run(job(parallelism={"pp": 2, "tp": 2}))
    draw: Callable[..., Any] = getattr(plot, name)
    alone = draw(result)
    assert isinstance(alone, Axes)
    assert alone.has_data()
    axes = Figure().subplots()
    assert draw(result, axes) is axes
    assert axes.has_data()


def test_a_sweep_tells_of_every_outcome() -> None:
    heard: list[str] = []
    simulator.sweep(job(), grid={"training.micro_batch": [1, 2]}, jobs=1, watch=lambda one: heard.append(one.status))
    assert heard == ["simulated", "simulated"]


#: Jobs with different keys in their results.
KINDS: dict[str, dict[str, Any]] = {
    "plain": job(),
    "pipeline": job(parallelism={"pp": 2, "tp": 2, "dp": 2}, training__total_tokens=1e9),
    "steady": job(parallelism={"pp": 2, "schedule": "zb_h2"}),
    "async": job(framework="pytorch", parallelism={"dp": 4, "data_parallel": "async"}),
    "offload": job(
        framework="deepspeed", parallelism={"dp": 4, "zero": 3, "offload": {"optimizer": "cpu"}},
    ),
    "adapters": job(framework="hugging_face", training__adapters={"rank": 8, "targets": ["q", "v"]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_results_keep_to_the_schema_that_is_printed(kind: str) -> None:
    import jsonschema  # takes seconds, and only here

    validator = jsonschema.Draft202012Validator(schema_of("result"))
    result = simulator.run(KINDS[kind])
    advised = {**result.to_dict(), "what_to_change": advise(result, budget_s=1.0).to_dict()}
    for answer in (result.to_dict(), advised):
        assert [error.message for error in validator.iter_errors(json.loads(json.dumps(answer)))] == []
    assert list(validator.iter_errors({**result.to_dict(), "step_time": 1.0}))


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["check", "--schema", "result"])
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out) == schema_of("result")


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        ("nvls", {}, "needs NVSwitches that sum up"),
        (
            "hierarchical",
            {"cluster.nodes": 2, "cluster.overrides": [{"gpu": "node0.gpu1", "missing": True}]},
            "1 and 3",
        ),
    ],
)
def test_what_groups_cannot_do_is_refused_by_check_as_by_run(
    algorithm: str, changes: dict[str, object], words: str
) -> None:
    """The switches of A100s do not sum up. A group of four has one GPU in the first node, and three in the next."""
    settings = {"parallelism": {"tp": 4, "pp": 2, "dp": 1, "sequence_parallel": False}, **changes}
    settings["parallelism.collective_algorithm"] = algorithm
    for command in (simulator.check, simulator.run):
        with pytest.raises(InputError, match=words) as caught:
            command("gpt22b_tp8", set=settings)
        assert caught.value.key == "parallelism.collective_algorithm"
        assert caught.value.fix is not None
        assert caught.value.fix.startswith("collective_algorithm: ")


def test_type_checkers_find_the_types() -> None:
    """A package with ``py.typed`` is checked as its sources are annotated."""
    assert (Path(simulator.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("call", "typed", "named"),
    [
        (lambda: simulator.validate(only=["nobody"]), ["validate", "--row", "nobody"], ("only", "--row")),
        (lambda: simulator.validate("nothing"), ["validate", "nothing"], ("suites", "SUITE")),
        (
            lambda: simulator.collective("dgx_a100", "all_reduce", sizes="0"),
            ["collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--sizes", "0"],
            ("sizes", "--sizes"),
        ),
        (
            lambda: simulator.collective("dgx_a100", "all_reduce", calibration="h100-sxm-80gb"),
            ["collective", "--cluster", "dgx_a100", "--op", "all_reduce", "--calibration", "h100-sxm-80gb"],
            ("calibration", "--calibration"),
        ),
        (lambda: schema_of("all"), ["check", "--schema", "all"], ("kind", "--schema")),
    ],
)
def test_errors_name_the_parameter_in_python_and_the_option_of_the_command(
    call: Callable[[], object], typed: list[str], named: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as caught:
        call()
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert (caught.value.file, caught.value.message in said) == (named[0], True)
    assert f"{named[1]}: " in said
    assert "--" not in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "starts"),
    [
        ("one_rtx3090", ["one_rtx3090: 1 node x 1 rtx-3090-24gb = 1 GPU"]),
        ("workstation_2gpu", ["workstation_2gpu: ", "bisection: "]),
        ({"name": "dgx_h100", "nodes": 2}, ["dgx_h100: ", "fabric: ", "bisection: "]),
    ],
)
def test_a_topology_tells_of_no_network_where_there_is_none(
    cluster: Any, starts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One node has no fabric, and one GPU no halves; nor has it routes."""
    lines = simulator.topology(cluster).opening()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    if isinstance(cluster, str):
        with pytest.raises(SystemExit):
            main(["topology", cluster])
        assert ("Routes" in capsys.readouterr().out) == (len(starts) > 1)


def test_a_topology_tells_types_of_gpu_without_a_profile() -> None:
    """Runs need one; a name that is misspelt has its nearest beside it."""
    (warning,) = simulator.topology({"like": "dgx_h100", "node": {"gpus": {"type": "h100-smx-80gb"}}}).warnings
    assert "no profile of h100-smx-80gb is shipped" in warning
    assert "is h100-sxm-80gb meant?" in warning
    assert not simulator.topology("dgx_h100").warnings

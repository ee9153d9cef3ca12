"""Classes of kernels, shares of a step, bins of a timeline."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.__main__ import main
from calibration.compare.comparison import ComparedRun, class_s, order, shares, suites
from calibration.compare.figures import Figures, pipelines
from calibration.compare.kernels import KernelColumns, binned, measured_kernels, simulated_kernels
from calibration.compare.meetings import meetings
from calibration.predict.predictions import read_predictions
from simulator.api import run
from simulator.config.profile import load_profile
from simulator.traces.classes import CLASSES, simulated_class
from simulator.validation.suite import Bounds
from tests.support import runs
from tests.support.comparison import ROOT, SLOWER, figures, with_value

pytestmark = pytest.mark.usefixtures("equal_jobs_are_played_once")


def test_kernels_are_compared_on_the_rank_that_is_furthest_off() -> None:
    """Two ranks take 2 and 1 s of products, 1.5 s each in the mean as simulated: the second is off by a half. Where no
    rank ran a class there is no error; figures from before ranks were told apart are means."""
    simulated, measured = ({"matmul": of} for of in ((1.5, 1.5), (2.0, 1.0)))
    row = ComparedRun(
        "a",
        2,
        "x",
        simulated=replace(figures(1.0), class_s=figures(1.0).class_s | simulated),
        measured=replace(figures(1.0), class_s=figures(1.0).class_s | measured),
    )
    assert class_s(row, "matmul") == (1.0, 1.5)
    assert class_s(row, "copy") == (0.0, 0.0)
    nothing = replace(row.simulated, class_s=row.simulated.class_s | {"waiting": (0.0, 0.0)})
    waited = replace(row.measured, class_s=row.measured.class_s | {"waiting": (1.0, 3.0)})
    assert class_s(replace(row, simulated=nothing, measured=waited), "waiting") == (3.0, 0.0)  # as far off, and more
    assert class_s(replace(row, measured=None), "matmul") == (None, 1.5)
    (found,) = [one for one in suites([row], Bounds(), predicted=False) if one["suite"] == "matmul kernels"]
    assert found["max_abs"] == pytest.approx(0.5)
    assert ComparedRun.from_dict(json.loads(json.dumps(row.to_dict()))) == row
    older = figures(1.0).to_dict() | {"class_s": {"matmul": 1.5}}
    assert Figures.from_dict(older).class_s["matmul"] == (1.5,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_value("format", to=9), "format: no file of predictions"),
        (with_value("changes", to=[]), "changes: must be a mapping"),
        (with_value("profiles", to={"a": 3}), "profiles.a: must be text"),
        (with_value("predictions", to={}), "predictions: must be a list"),
        (with_value("predictions", 0, "workload_sha256", to=1), "predictions[0].workload_sha256: must be text"),
        (with_value("predictions", 0, "figures", to=[]), "predictions[0].figures"),
        (with_value("predictions", 0, "figures", "step_time_s", to="x"), "figures.step_time_s: must be a number"),
        (with_value("predictions", 0, "figures", "class_s", "matmul", to=[-1.0]), "figures.class_s"),
    ],
)
def test_bad_predictions_are_said_with_their_key(
    change: Callable[[dict[str, Any]], Any], words: str, made: Path, tmp_path: Path, capsys: Any
) -> None:
    path, alone = tmp_path / "p.json", str(made / "alone.yaml")
    assert main(["predict", alone, "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    capsys.readouterr()
    command = ["compare", alone, "--measured", str(made / "measured"), "--predictions", str(path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("error: ")


def test_shipped_predictions_are_read() -> None:
    for path in (ROOT / "calibration" / "results").glob("predictions*.json"):
        assert read_predictions(path).figures


def refused_by_all(out: str, made: Path, tmp_path: Path) -> None:
    """A folder for results, by each of the four commands that have one."""
    alone = str(made / "alone.yaml")
    assert main(["compare", alone, "--measured", str(made / "measured"), "--out", out]) == 2
    assert main(["measure", "--device", "cpu", "--out", out]) == 2
    assert main(["train", "--device", "cpu", alone, "--out", out]) == 2
    measured = str(ROOT / "calibration" / "measurements" / "h100-sxm-80gb")
    profile = ["--base", "h100-sxm-80gb", "--out", str(tmp_path / "p.yaml")]
    assert main(["fit", measured, *profile, "--plots", out]) == 2


@pytest.mark.parametrize("name", ["file", "file/out"])
def test_results_go_into_no_file(name: str, made: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("kept")
    refused_by_all(str(tmp_path / name), made, tmp_path)
    said = capsys.readouterr().err
    assert said.count("which is a file" if "/" in name else "is a file, not a folder") == 4
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a folder in which none can be made")
@pytest.mark.parametrize("out", ["/proc", "/proc/x"])
def test_a_folder_that_cannot_be_made_is_said(out: str, made: Path, tmp_path: Path, capsys: Any) -> None:
    refused_by_all(out, made, tmp_path)
    assert capsys.readouterr().err.count("cannot be written to") == 4


def test_shares_of_a_step_are_judged_where_its_profile_took_as_long() -> None:
    """Differences in points of the step: of every run, and of those whose profiled step was no slower than timed ones.
    A run without a pipeline has no bubble, one without a measurement no row."""

    def side(step_s: float, exposed_s: float | None, bubble: float | None) -> Figures:
        return replace(figures(step_s), exposed_s=exposed_s, bubble=bubble)

    def row(name: str, measured: Figures | None, simulated: Figures, profiled: float | None) -> ComparedRun:
        return ComparedRun(name, 2, "w", measured=measured, simulated=simulated, profiled=profiled)

    exposed, bubble = shares(
        [
            row("a", side(2.0, 0.5, 0.2), side(1.0, 0.2, 0.15), 1.02),
            row("b", side(1.0, 0.4, None), side(1.0, 0.1, None), 1.5),
            row("c", side(1.0, 0.1, 0.1), side(1.0, 0.2, 0.3), None),
            row("d", None, side(1.0, 0.1, 0.3), None),
            row("e", side(1.0, 0.0, None), side(1.0, 0.0, None), 1.0),
        ]
    )
    assert [line["id"] for line in exposed["rows"]] == ["a", "b", "c"]
    assert exposed["all"] == {"n": 3} | {
        name: pytest.approx(value) for name, value in {"mean_abs": 0.15, "max_abs": 0.3, "bias": -0.25 / 3}.items()
    }
    assert exposed["as_timed"]["n"] == bubble["as_timed"]["n"] == 1
    for found in (exposed, bubble):
        assert found["as_timed"]["bias"] == pytest.approx(-0.05)
    assert [line["id"] for line in bubble["rows"]] == ["a", "c"]
    assert bubble["all"]["bias"] == pytest.approx(0.075)
    assert [found["all"] for found in shares([])] == [{"n": 0}, {"n": 0}]


def test_order_of_layouts() -> None:
    """Layouts a, b and c do the same work and are measured 1.00, 1.02 and 1.10 s.

    Layouts a and b are too close to have an order. Layouts a and c come in the measured order, b and c do not. Nothing
    is said of d, which does other work.
    """
    rows = [
        ComparedRun(name, 1, work, simulated=figures(simulated), measured=figures(measured))
        for name, work, measured, simulated in (
            ("a", "x", 1.00, 1.00),
            ("b", "x", 1.02, 1.20),
            ("c", "x", 1.10, 1.10),
            ("d", "y", 9.00, 0.10),
        )
    ]
    found = order([*rows, ComparedRun("e", 1, "x", reason="not run")])
    assert (found["pairs"], found["in_measured_order"]) == (2, 1)
    assert [pair["runs"] for pair in found["wrong"]] == [["b", "c"]]
    assert order([replace(rows[0], simulated=figures(5.0)), rows[1]])["pairs"] == 0


def columns(*rows: tuple[int, str, str, float, float]) -> KernelColumns:
    rank, name, kind, start, end = zip(*rows, strict=True)
    return KernelColumns(
        np.array(rank), np.array([CLASSES.index(n) for n in name]), np.array(kind, dtype=object),
        np.array(start, dtype=float), np.array(end, dtype=float),
        np.full(len(rows), np.nan), np.full(len(rows), np.nan),
    )  # fmt: skip


def test_exposure_and_bubble_of_a_case_made_by_hand() -> None:
    """Rank 0 computes 0-4 and 6-8, tp communication 3-5 (1 exposed), pp hand-over 5-7 (1 exposed); rank 1 computes
    2-8 and its gradients reduce 8-10 (2 exposed): 4 in all, 2 a rank. The window is 0-8; rank 0 is busy in 0-5 and
    6-8, rank 1 in 2-8: idle 1 + 2 of 16."""
    kernels = columns(
        (0, "matmul", "", 0, 4), (0, "communication", "tp", 3, 5), (0, "hand-over", "pp", 5, 7),
        (0, "memory", "", 6, 8),
        (1, "matmul", "", 2, 8), (1, "communication", "dp", 8, 10),
    )  # fmt: skip
    assert kernels.exposed_s(2) == pytest.approx(2.0)
    assert kernels.bubble([(0, 1)]) == pytest.approx(3 / 16)
    assert kernels.bubble([]) is None
    assert kernels.seconds(2)["matmul"] == pytest.approx((4.0, 6.0))


def test_bins_hold_every_second_of_a_class() -> None:
    """Shares of bins times their width add up to the kernels' seconds, wherever they begin and end."""
    rng = np.random.default_rng(3)
    edges = np.linspace(0, 10, 38)
    start = np.sort(rng.uniform(0, 9, 60))[::2]
    end = np.minimum(start + rng.uniform(0, 1, 30), np.append(start[1:], 10.0))
    kernels = columns(*((0, "matmul", "", s, e) for s, e in zip(start.tolist(), end.tolist(), strict=True)))
    shares = binned(kernels, 0, [CLASSES.index("matmul")], edges)
    assert (shares @ np.diff(edges))[0] == pytest.approx((end - start).sum())
    for share, low, high in zip(shares[0], edges[:-1], edges[1:], strict=True):
        inside = np.maximum(np.minimum(end, high) - np.maximum(start, low), 0).sum()
        assert share == pytest.approx(inside / (high - low), abs=1e-9)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}, {"pp": 2, "dp": 2}])
def test_classes_hold_all_of_a_simulated_step(tmp_path: Path, layout: dict[str, object]) -> None:
    """Computing classes add up to compute, recompute and optimizer of the breakdown, which other code cuts, each
    kernel less the gap behind it."""
    result = run(runs.workload(tmp_path, "w", layout), set={"training.recompute": "full"})
    kernels, step = simulated_kernels(result), result.to_dict()["time_breakdown_s"]
    n_ranks = result.spans.n_ranks
    seconds = {name: sum(of_ranks) / n_ranks for name, of_ranks in kernels.seconds(n_ranks).items()}
    computing = sum(seconds[name] for name in ("matmul", "attention", "memory", "optimizer"))
    gap = load_profile(result.gpus[0]).kernels.gap_s
    assert gap is not None
    frame = result.spans.select_ranks(range(n_ranks)).frame()
    for parts, found in ((("compute", "recompute", "optimizer"), computing), (("optimizer",), seconds["optimizer"])):
        rows = frame[frame["category"].isin(parts)]
        lengths = (rows["end_s"] - rows["start_s"]).to_numpy()
        assert lengths.sum() / n_ranks == pytest.approx(sum(step[part] for part in parts))
        assert found == pytest.approx(np.maximum(lengths - gap.value, 0.0).sum() / n_ranks)
    assert set(kernels.rank.tolist()) == set(range(n_ranks))
    if "pp" not in layout:
        # Communication that has come up but waits for the host or for other ranks is in flight, as NCCL's kernels are.
        assert kernels.exposed_s(n_ranks) >= sum(step["exposed"].values()) * (1 - 1e-9)
    assert (kernels.bubble(pipelines(result)) is None) == ("pp" not in layout)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "bucket_bytes": 1_000_000}])
def test_a_kernel_is_not_on_the_gpu_before_its_host_has_launched_it(tmp_path: Path, layout: dict[str, object]) -> None:
    """Ranks in step wait for nobody, so that no part of communication is waiting, whether the host is late or early.

    Communication may last longer on an early host, where kernels run beside it.
    """
    path = runs.workload(tmp_path, "w", layout)
    for speed in (0.2, 1000.0):
        kernels = simulated_kernels(run(path, set={"cluster.node.host_speed": speed}))
        seconds, parts = kernels.seconds(2)["communication"], kernels.parts(2)
        assert min(seconds) > 0
        assert parts["transfer"] == pytest.approx(seconds, rel=0.02)
        assert parts["waiting"] == pytest.approx((0.0, 0.0), abs=0.02 * min(seconds))


def test_every_kind_of_kernel_has_a_class() -> None:
    kinds = ("matmul", "grouped_matmul", "attention", "norm", "loss", "all_reduce", "send")
    categories = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "pp", "dp", "offload")
    assert {simulated_class(kind, category) for kind, category in product(kinds, categories)} == set(CLASSES)
    assert simulated_class("grouped_matmul", "recompute") == "matmul"
    assert simulated_class("norm", "optimizer") == "optimizer"


def test_a_timeline_comes_back_as_it_was_written(made: Path) -> None:
    result = run(made / "pp2.yaml")
    read, own = measured_kernels(made / "measured" / "pp2.timeline.csv.gz", meetings(result)), simulated_kernels(result)
    assert (read.code == own.code).all()
    assert (read.kind == own.kind).all()
    assert read.end_s == pytest.approx(own.end_s * SLOWER["pp2"])
    assert read.moves_s == pytest.approx(own.moves_s * SLOWER["pp2"], nan_ok=True)
    assert read.done_s == pytest.approx(own.done_s * SLOWER["pp2"], nan_ok=True)


def test_records_are_those_of_train() -> None:
    """The keys that are read here are the ones that `train` documents."""
    text = (ROOT / "calibration" / "train" / "record.py").read_text()
    for key in ("step_time_s", "steady_allocated_bytes", "exposed_s", "kernels", "sha256", "status", "reason", "date"):
        assert key in text

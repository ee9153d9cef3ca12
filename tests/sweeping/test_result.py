"""The result of a sweep: its table, files and pictures."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from rich.console import Console

import simulator
from simulator.errors import InputError
from simulator.output.sweep_figures import FIGURES, FigureScale, best_first
from simulator.output.sweep_plot import SweptKeys, SweptValues, sweep_plot
from simulator.output.sweep_table import short_names, sweep_summary
from simulator.sweeping.entry import sweep_space
from simulator.sweeping.result import SweepResult
from simulator.sweeping.space import Space, listed, zipped
from tests.support.jobs import job
from tests.support.sweeps import SMALLEST, InProcess, swept

#: Three heads' worth of ranks is refused, and a layer of 16,384 does not fit into 80 GB.
MIXED: dict[str, list[Any]] = {"parallelism.tp": [1, 3, 2], "model.hidden": [256, 16384]}


@pytest.fixture(scope="module")
def mixed() -> SweepResult:
    return swept(MIXED, job(model={"layers": 4, "hidden": 256, "heads": 8, "vocab": 1024}))


def printed(result: SweepResult, width: int = 400, **options: Any) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(result.summary(**options))
    return captured.get()


def test_settings_have_their_units_in_tables_and_none_in_files(tmp_path: Path) -> None:
    """Two speeds of cards, typed as 400Gbps and 800Gbps: so they stand in the table, and in bit/s in the CSV file."""
    key = "cluster.node.nics.bandwidth_bps"
    result = swept({key: [400_000_000_000, 800e9]}, {**SMALLEST, "cluster": "dgx_a100"})
    text = printed(result)
    assert "400Gbps" in text
    assert "800Gbps" in text
    result.save_csv(tmp_path / "points.csv")
    rows = csv.DictReader((tmp_path / "points.csv").read_text().splitlines())
    assert [float(row[key]) for row in rows] == [400e9, 800e9]


def test_intervals_that_nothing_gives_have_a_note() -> None:
    row = {"status": "simulated", "workload": "a", "fits": True, **dict.fromkeys(FIGURES, 1.0)}
    without = {**row, "step_time_low_s": None, "step_time_high_s": None}
    for rows, noted in (([row], False), ([row, without], True)):
        console = Console(width=200, file=io.StringIO())
        console.print(sweep_summary(rows, []))
        assert isinstance(console.file, io.StringIO)
        assert ("no measured step is comparable" in console.file.getvalue()) is noted


def test_a_figure_that_no_point_has_gets_no_column() -> None:
    """Jobs without stages have no bubble; beside one with stages they have a dash."""
    staged = {"status": "simulated", "workload": "a", "fits": True, **dict.fromkeys(FIGURES, 1.0)}
    alone = {name: value for name, value in staged.items() if name != "bubble_fraction"}
    for rows, shown in (([alone], False), ([alone, staged], True)):
        console = Console(width=200, file=io.StringIO())
        console.print(sweep_summary(rows, []))
        assert isinstance(console.file, io.StringIO)
        assert ("bubble" in console.file.getvalue()) is shown


def test_a_table_has_what_fits_first_then_what_does_not_then_what_was_refused(mixed: SweepResult) -> None:
    frame = mixed.table()
    assert isinstance(mixed, simulator.Result)
    assert list(frame.columns[:3]) == ["workload", "parallelism.tp", "model.hidden"]
    assert frame["status"].tolist() == ["simulated"] * 4 + ["refused"] * 2
    assert frame["fits"].tolist()[:4] == [True, True, False, False]
    for fits in (True, False):
        times = frame[frame["fits"] == fits]["step_time_s"].tolist()
        assert times == sorted(times)
    assert frame.loc[2, "error"].startswith("parallelism.tp: 8 heads do not divide by tp 3")
    assert sorted(frame.index) == list(range(6))


def test_a_figure_of_which_more_is_better_is_sorted_downwards(mixed: SweepResult) -> None:
    rates = mixed.table("tokens_per_s")["tokens_per_s"].tolist()
    assert rates[:2] == sorted(rates[:2], reverse=True)


@pytest.mark.parametrize("figure", ["step_time", "fits", "tp"])
def test_a_figure_that_is_none_is_refused(figure: str, mixed: SweepResult) -> None:
    with pytest.raises(InputError, match="is no figure of a point"):
        mixed.table(figure)


def test_equal_points_keep_their_order() -> None:
    rows = [{"status": "simulated", "fits": True, "mfu": 0.5, "n": n} for n in range(3)]
    assert [row["n"] for row in best_first(rows, "mfu")] == [0, 1, 2]


def test_points_without_the_figure_come_after_those_with_it() -> None:
    rows = [{"status": "simulated", "fits": True}, {"status": "simulated", "fits": False, "cost": 1.0}]
    assert best_first(rows, "cost") == [rows[1], rows[0]]


def test_the_summary_counts_ranks_and_says_why(mixed: SweepResult) -> None:
    text = printed(mixed)
    assert "6 points of tiny: 2 fit, 2 do not fit in memory, 2 refused" in text
    lines = text.splitlines()
    (head,) = [line for line in lines if line.strip().startswith("tp")]
    assert head.split()[:4] == ["tp", "hidden", "step", "time"]
    assert "GPUs" in head
    (why,) = [line for line in lines if "do not divide" in line]
    assert why.split()[:5] == ["2", "tp", "3,", "hidden", "256"]
    assert "2 more have figures." in printed(mixed, top=2)
    assert printed(mixed, sort="headroom_bytes").splitlines()[4].split()[:3] == ["tp", "hidden", "headroom"]


def test_many_reasons_are_counted() -> None:
    result = swept({"parallelism.tp": list(range(3, 40, 2))})
    text = printed(result)
    assert "19 points of tiny: 19 refused" in text
    assert "7  " in text
    assert "7 other reasons; --json lists all" in text


def test_the_table_fits_a_narrow_terminal(mixed: SweepResult) -> None:
    text = printed(mixed, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "No room for" in text


def test_names_are_short_where_they_are_clear() -> None:
    keys = ["parallelism.tp", "model.layers", "cluster.nodes", "a.nodes", "x.bubble"]
    assert list(short_names(keys).values()) == ["tp", "layers", "cluster.nodes", "a.nodes", "x.bubble"]


@pytest.mark.parametrize(
    ("figure", "values", "texts"),
    [
        ("step_time_s", [0.0002083, 0.9], ["0.2083 ms", "900.0000 ms"]),
        ("step_time_s", [1.0, 20.0], ["1.000 s", "20.000 s"]),
        ("mfu", [0.4], ["40.0 %"]),
        ("peak_bytes", [2.0**30], ["1.0 GiB"]),
        ("tokens_per_s", [12345.6], ["12,346"]),
        ("n_gpus", [1024], ["1,024"]),
        ("step_time_s", [0.0], ["0.000 s"]),
    ],
)
def test_all_values_of_a_column_have_one_unit(figure: str, values: list[float], texts: list[str]) -> None:
    scale = FigureScale.fitting(FIGURES[figure], values)
    assert [scale.text(value) for value in values] == texts


def test_json_has_every_point_with_its_changes_and_figures_or_error(mixed: SweepResult) -> None:
    answer = json.loads(json.dumps(mixed.to_dict(), allow_nan=False))
    assert list(answer)[:3] == ["schema_version", "command", "warnings"]
    assert (answer["command"], answer["keys"]) == ("sweep", list(MIXED))
    first, refused = answer["points"][0], answer["points"][2]
    assert first["set"] == {"parallelism.tp": 1, "model.hidden": 256}
    assert first["figures"]["step_time_s"] == mixed.rows[0]["step_time_s"]
    assert (refused["status"], refused["figures"]) == ("refused", None)
    assert "do not divide" in refused["error"]
    assert answer["warnings"][0].startswith("7 of the 8 GPUs of the cluster have no rank")
    assert answer["warnings"][0].endswith(" (2 of 6 points)")


def test_a_csv_file_has_a_row_per_point_in_their_order(mixed: SweepResult, tmp_path: Path) -> None:
    mixed.save_csv(tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["model.hidden"] for row in rows] == ["256", "16384"] * 3
    assert float(rows[0]["step_time_s"]) == mixed.rows[0]["step_time_s"]
    assert (rows[2]["step_time_s"], rows[2]["status"], rows[0]["fits"]) == ("", "refused", "true")


def test_lists_in_files_are_json(tmp_path: Path) -> None:
    workload = job(parallelism__pp=2)
    swept({"parallelism.layers_per_stage": [[4, 4], [3, 5]]}, workload).save_csv(tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="") as file:
        assert [row["parallelism.layers_per_stage"] for row in csv.DictReader(file)] == ["[4, 4]", "[3, 5]"]


def test_a_parquet_file_has_typed_columns(mixed: SweepResult, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    mixed.save_parquet(tmp_path / "s.parquet")
    table = parquet.read_table(tmp_path / "s.parquet")
    types = {name: str(table.schema.field(name).type) for name in ("parallelism.tp", "mfu", "fits", "n_gpus", "error")}
    assert types == {"parallelism.tp": "int64", "mfu": "double", "fits": "bool", "n_gpus": "int64", "error": "string"}
    assert table["step_time_s"].to_pylist() == [row.get("step_time_s") for row in mixed.rows]


def test_keys_of_unlike_values_are_texts_in_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    values = {"training.recompute": ["full", {"granularity": "full", "layers": 1}], "training.total_tokens": [1, 2.5e9]}
    swept(values).save_parquet(tmp_path / "s.parquet")
    table = parquet.read_table(tmp_path / "s.parquet")
    assert table["training.recompute"].to_pylist()[::2] == ["full", '{"granularity": "full", "layers": 1}']
    assert table["training.total_tokens"].to_pylist()[:2] == [1.0, 2.5e9]


def test_parquet_without_its_library_says_how_to_install_it(
    mixed: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pyarrow, which is not installed") as caught:
        mixed.save_parquet(tmp_path / "s.parquet")
    assert "llm-cluster-simulator[parquet]" in str(caught.value)
    assert not list(tmp_path.iterdir())


def plotted(
    shape: tuple[int, ...],
    values: list[float],
    fits: list[bool] | None = None,
    names: tuple[str, ...] = ("w",),
    settings: list[tuple[Any, ...]] | None = None,
    figure: str = "step_time_s",
) -> SweptValues:
    """Values of keys a, b, ... whose settings are numbers from 0, unless given."""
    keys = tuple(
        SweptKeys((f"section.{letter}",), tuple((n,) for n in (settings[at] if settings else range(size))))
        for at, (letter, size) in enumerate(zip("abcd", shape, strict=False))
    )
    whole = np.array(values, dtype=float).reshape(len(names), *shape)
    flags = np.array(fits or [True] * whole.size).reshape(whole.shape) & ~np.isnan(whole)
    return SweptValues(names, keys, whole, flags, figure)


def test_of_more_than_two_keys_a_cell_has_the_best_that_fits_over_the_rest() -> None:
    """Along c: 3 and 1 both fit: 1; 2 does not fit, 4 does: 4; neither 6 nor 5 fits: 5, which does not; none at all."""
    nan = float("nan")
    swept_values = plotted((2, 2, 2), [3, 1, 2, 4, 6, 5, nan, nan], [True, True, False, True] + [False] * 4)
    cells = swept_values.reduced()
    np.testing.assert_equal(cells.values, [[[1, 4], [5, nan]]])
    np.testing.assert_equal(cells.fits, [[[True, True], [False, False]]])
    assert swept_values.title() == "step time, in each cell the best over section.c\nbest: 1.000 s with a 0, b 0, c 1"


def test_of_figures_of_which_more_is_better_the_largest_is_best() -> None:
    values = plotted((2, 1, 3), [0.1, 0.3, 0.2, 0.5, 0.4, 0.6], figure="mfu")
    assert values.reduced().values.tolist() == [[[0.1, 0.3, 0.2], [0.5, 0.4, 0.6]]]
    assert values.title() == "MFU\nbest: 60.0 % with a 1, b 0, c 2"


def drawn(values: SweptValues) -> Axes:
    return sweep_plot(values).axes[0]


def test_a_numeric_key_is_a_line_in_the_order_of_its_numbers() -> None:
    """Factors of two stand equally far apart; hollow points do not fit, and a cross has no figure."""
    values = plotted((4,), [1.0, 3.0, float("nan"), 2.0], [True, False, True, True], settings=[(8, 1, 4, 2)])
    axes = drawn(values)
    line, fitting, hollow, cross = axes.lines
    assert list(line.get_xdata()) == [1, 2, 8]
    assert list(line.get_ydata()) == [3, 2, 1]
    assert list(fitting.get_xdata()) == [2, 8]
    assert list(hollow.get_xdata()) == [1]
    assert hollow.get_markerfacecolor() == "white"
    assert list(cross.get_xdata()) == [4]
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4", "8"]
    assert axes.get_ylim()[0] == 0
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["does not fit in memory", "refused or failed"]


def test_words_are_bars_and_several_workloads_stand_side_by_side() -> None:
    axes = drawn(plotted((2,), [1, 2, 3, 4], [True, True, True, False], ("u", "v"), [("1f1b", "gpipe")]))
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_height() > 0]
    assert [bar.get_height() for bar in bars] == [1, 2, 3, 4]
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, False, True]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1f1b", "gpipe"]


def test_two_keys_are_a_heat_map_per_workload_with_the_best_cell_framed() -> None:
    nan = float("nan")
    figure = sweep_plot(plotted((2, 2), [4, 3, 2, 1, 8, 7, nan, 5], [True] * 3 + [False] + [True] * 4, ("u", "v")))
    first, second, bar = figure.axes
    assert [first.get_title(loc="left"), second.get_title(loc="left")] == ["u", "v"]
    assert [text.get_text() for text in first.texts] == ["4.00", "3.00", "2.00", "1.00\ndoes not fit"]
    assert [text.get_text() for text in second.texts] == ["8.00", "7.00", "refused or\nfailed", "5.00"]
    boxes = [patch for axes in (first, second) for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [(box.get_xy(), box.get_hatch(), box.get_fill()) for box in boxes] == [
        ((1, 1), "//", True),
        ((0, 1), None, False),
        ((0, 1), None, True),
    ]
    assert bar.get_ylabel() == "step time (s)"


def test_pictures_of_results_are_drawn_for_every_kind_of_points(mixed: SweepResult) -> None:
    """One key, two, keys that walk together, rows of a list, and a single point per workload."""
    assert len(mixed.plot("mfu").axes) == 2
    walking = Space((SMALLEST,), (*zipped({"seed": [1, 2], "model.layers": [1, 2]}),))
    rows = Space((SMALLEST,), (listed([{"seed": 1}, {"model.layers": 2}]),))
    labels = []
    for space in (walking, rows, Space((SMALLEST, {**SMALLEST, "name": "other"}), ())):
        axes = sweep_space(space, InProcess()).plot().axes[0]
        labels.append([tick.get_text() for tick in axes.get_xticklabels()])
    assert labels == [["1, 1", "2, 2"], ["1, -", "-, 2"], [""]]


@pytest.mark.parametrize(
    ("figure", "needed"),
    [
        ("days", "training.total_tokens"),
        ("gpu_hours", "training.total_tokens"),
        ("cost", "training.total_tokens and cluster.price_per_gpu_hour"),
    ],
)
def test_a_figure_that_no_point_has_is_refused_with_the_keys_that_give_it(
    figure: str, needed: str, mixed: SweepResult
) -> None:
    """Points of tiny have figures, but neither the tokens of a whole run nor a price."""
    for asked in (mixed.table, mixed.plot, mixed.summary):
        with pytest.raises(InputError) as caught:
            asked(figure)
        assert f"no point has this figure, which needs {needed}\n" in str(caught.value)
    assert swept({"parallelism.tp": [3]}).table(figure)["status"].tolist() == ["refused"]


def test_a_figure_that_some_points_have_leaves_the_others_without_it() -> None:
    """The point with tokens is too large; the one that fits has none, so nothing is said of memory."""
    points = [{"training.total_tokens": 1e9, "model.hidden": 32768, "model.layers": 8}, {"seed": 1}]
    result = sweep_space(Space((SMALLEST,), (listed(points),)), InProcess())
    assert [row["fits"] for row in result.rows] == [False, True]
    figure = result.plot("days")
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["does not fit in memory", "without this figure"]
    assert figure.get_suptitle() == "tiny: days\nno point that fits has this figure"
    grid = {"training.total_tokens": [1e9, None], "seed": [1, 2]}
    heat = swept(grid).plot("days").axes[0]
    assert [text.get_text() for text in heat.texts][2:] == ["no figure"] * 2


def test_where_every_point_is_refused_nothing_is_said_of_memory() -> None:
    title = swept({"parallelism.tp": [3, 5]}).plot().get_suptitle()
    assert title == "tiny: step time\nevery point was refused or failed"


def test_no_point_that_fits_is_said_in_the_title() -> None:
    assert plotted((2,), [1, 2], [False, False]).title() == "step time\nno point fits in memory"
    figure = sweep_plot(plotted((2, 2), [float("nan")] * 4))
    assert [text.get_text() for text in figure.axes[0].texts] == ["refused or\nfailed"] * 4


def test_a_few_lines_say_what_the_best_is(mixed: SweepResult) -> None:
    first, second = repr(mixed).splitlines()
    assert first == "6 points of tiny: 2 fit, 2 do not fit in memory, 2 refused"
    assert second.startswith("shortest step: ")
    assert second.endswith("tiny parallelism.tp=1, model.hidden=256") or "parallelism.tp=2" in second
    assert repr(swept({"parallelism.tp": [3]})) == "1 point of tiny: 1 refused"

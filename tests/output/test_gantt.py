"""The Gantt picture: what is drawn where, in which files, and that it tells colours apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from simulator import run, schedule
from simulator.errors import InputError
from simulator.output.gantt import compare_gantt, gantt, save_gantt
from simulator.output.gantt_boxes import Picture, usual_box_s
from simulator.output.gantt_panel import IDLE_COLOUR, PHASE_COLOUR, SHARE_COLOUR, filled_points, lighter
from simulator.timeline import CATEGORIES
from tests.support.timelines import Span, pipeline, template, timeline


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_files_of_each_kind_are_whole_and_the_same_twice(tmp_path: Path, suffix: str) -> None:
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    for name in ("a", "b"):
        save_gantt(gantt(pipeline("1f1b", 3, 4, comm=0.25)), tmp_path / f"{name}.{suffix}")
    content = (tmp_path / f"a.{suffix}").read_bytes()
    assert content.startswith(magic)
    assert content == (tmp_path / f"b.{suffix}").read_bytes()


def test_another_suffix_is_refused_with_the_nearest_fix(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        save_gantt(gantt(pipeline("gpipe", 2, 2)), tmp_path / "picture.jpeg")
    assert caught.value.fix == "picture.png"
    assert list(tmp_path.iterdir()) == []


def texts(figure: Figure, panel: int = 0) -> list[str]:
    return [text.get_text() for text in figure.axes[panel].texts]


def test_every_box_has_its_micro_batch_where_numbers_fit() -> None:
    figure = gantt(pipeline("1f1b", 4, 8), title="a title")
    assert len(figure.axes) == 1
    assert sorted(texts(figure)) == sorted(str(mb) for mb in range(8) for _ in range(2 * 4))
    assert figure.axes[0].get_title(loc="left") == "a title"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        f"stage {i} (rank {i})" for i in range(4)
    ]


def test_rows_of_ranks_with_several_chunks_have_the_name_of_the_rank() -> None:
    """Rank 0 of two runs the stages 0 and 2: neither is its name."""
    figure = gantt(pipeline("interleaved", 2, 4, 2))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 0", "rank 1"]


def test_a_chunk_of_a_bare_schedule_does_its_part_of_a_micro_batchs_work() -> None:
    """Two chunks a rank do half of F = 1 and B = 2 each: whole ones would flatter 1F1B."""
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        boxes = Picture.arrange(schedule(name, 4, 8, chunks).spans, "").boxes
        assert boxes.end_s - boxes.start_s == pytest.approx(np.where(boxes.phase == "F", 1.0, 2.0) / chunks)


def test_one_micro_batch_alone_is_not_numbered() -> None:
    assert texts(gantt(pipeline("1f1b", 4, 1))) == []


@pytest.mark.parametrize("microbatches", range(30, 97, 22))
def test_what_is_enlarged_is_less_than_the_whole(microbatches: int) -> None:
    whole, *zooms = gantt(pipeline("1f1b", 4, microbatches)).axes
    shown = sum(high - low for low, high in (zoom.get_xlim() for zoom in zooms))
    assert shown <= 0.8 * whole.get_xlim()[1] * (1 + 1e-9)


def test_long_steps_get_their_beginning_and_end_enlarged() -> None:
    play = pipeline("1f1b", 12, 96)
    figure = gantt(play)
    whole, begin, end = figure.axes
    assert texts(figure, 0) == []
    assert begin.get_xlim()[0] == 0.0
    assert end.get_xlim()[1] == pytest.approx(play.step_time_s)
    assert {"0", "1"} <= set(texts(figure, 1))
    assert "95" in texts(figure, 2)
    assert whole.get_xlim() == (0.0, pytest.approx(play.step_time_s))


def test_short_transfers_are_as_dark_as_the_time_that_they_fill() -> None:
    """Two bars of 0.2 points fill the first point of row 0 by 0.4.

    A third bar fills its next two points by 0.3 and 0.2. A bar of row 1 fills one by 0.1.
    """
    row, start, end = np.array([0, 0, 0, 1]), np.array([0.1, 0.5, 1.7, 3.0]), np.array([0.3, 0.7, 2.2, 3.1])
    rows, points, filled = filled_points(row, 10 * start, 10 * end, 10.0)
    assert list(zip(rows.tolist(), points.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 3)]
    assert filled == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_gathers_of_a_fifth_of_the_time_are_no_solid_lane() -> None:
    """ZeRO-3 gathers a layer at a time, in less than a point each: the lane is paler than the colour, and the caption
    says so. A pipeline's schedule, whose passes have no transfers beside them, says nothing."""
    work = {
        "model": {"layers": 100, "hidden": 2048, "heads": 16, "vocab": 1024},
        "training": {"seq": 2048, "global_batch": 48},
        "parallelism": {"dp": 8, "zero": 3},
        "cluster": "dgx_h100",
    }
    figure = gantt(run(work).spans)
    assert "pale lanes" in figure.legends[0].get_title().get_text()
    assert "pale lanes" not in gantt(pipeline("gpipe", 2, 4)).legends[0].get_title().get_text()
    parts = [part for part in figure.axes[0].collections if isinstance(part, PolyCollection)]
    drawn = {to_hex(colour).upper() for part in parts for colour in np.asarray(part.get_facecolor())}
    assert lighter(SHARE_COLOUR["dp"], 0.7) in drawn


def test_axes_of_a_notebook_are_drawn_into() -> None:
    figure = Figure()
    axes = figure.subplots()
    assert gantt(pipeline("gpipe", 2, 2), axes, unit="F") is figure
    assert axes.get_xlabel() == "time (F)"
    assert figure.axes == [axes]


def test_schedules_share_one_time_axis() -> None:
    figure = compare_gantt({"gpipe": pipeline("gpipe", 4, 8), "short": pipeline("gpipe", 4, 2)})
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["gpipe", "short"]


def test_a_box_is_divided_by_the_shares_of_its_time() -> None:
    # Backward: 2 s recompute, 1 s of all-reduce, 5 s of its own; in two pieces, 2 s apart, it is still one box.
    first = template(("re", "matmul", "recompute", 2.0), ("ar", "all_reduce", "tp", 1.0), phase="B")
    second = template(("mm", "matmul", "compute", 5.0), phase="B")
    shared = {"phase": "B", "microbatch": 0, "stage": 0, "label": "0B0"}
    play = timeline([Span(0, "compute", first, 0.0, **shared), Span(0, "compute", second, 5.0, **shared)])
    boxes = Picture.arrange(play, "").boxes
    assert boxes.start_s.tolist() == [0.0]
    assert boxes.end_s.tolist() == [10.0]
    shares = dict(zip(CATEGORIES, boxes.share[0].tolist(), strict=True))
    assert shares["recompute"] == pytest.approx(0.2)
    assert shares["tp"] == pytest.approx(0.1)
    assert shares["compute"] == pytest.approx(0.5)


def test_steps_without_a_micro_batch_are_not_joined_over_a_wait() -> None:
    op = template(("norm", "optimizer", "optimizer", 1.0), phase="O")
    shared = {"phase": "O", "label": "optimizer"}
    play = timeline([Span(0, "compute", op, 0.0, **shared), Span(0, "compute", op, 9.0, **shared)])
    assert Picture.arrange(play, "").boxes.end_s.tolist() == [1.0, 10.0]


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(3),
        # Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: protanopia, deuteranopia, tritanopia.
        np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
        np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
        np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
    ],
    ids=["normal", "protanopia", "deuteranopia", "tritanopia"],
)
def test_colours_stay_apart_with_any_colour_vision(matrix: np.ndarray) -> None:
    used = {*PHASE_COLOUR.values(), *SHARE_COLOUR.values(), IDLE_COLOUR}

    def linear(colour: str) -> np.ndarray:
        value = np.array(to_rgb(colour))
        return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)

    def seen(colour: str) -> np.ndarray:
        value = np.clip(matrix @ linear(colour), 0, 1)
        return np.where(value <= 0.0031308, 12.92 * value, 1.055 * value ** (1 / 2.4) - 0.055)

    for one, other in itertools.combinations(sorted(used), 2):
        assert np.linalg.norm(seen(one) - seen(other)) > 0.15, (one, other)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_lists_what_is_drawn_and_nothing_else() -> None:
    """GPipe idles and has whole backwards; one rank alone never idles; beside a split backward, green means both."""
    assert legend(gantt(pipeline("gpipe", 2, 2))) == ["forward", "backward", "idle"]
    assert legend(gantt(pipeline("gpipe", 1, 4))) == ["forward", "backward"]
    both = compare_gantt({name: schedule(name, 2, 4).spans for name in ("gpipe", "zb_h1")})
    assert legend(both)[1:3] == ["backward, or its input gradient", "backward: weight gradient"]


def test_a_long_legend_stays_inside_the_figure() -> None:
    """All categories at once."""
    ops = [template((kind, "op", kind, 1.0), phase="B") for kind in CATEGORIES if kind != "optimizer"]
    spans = [
        Span(0, "compute", op, float(i), phase=phase, microbatch=i, stage=i % 2, chunk=i % 2, label=f"{i}")
        for i, (op, phase) in enumerate(zip(ops, "FBIWFBIW", strict=True))
    ]
    figure = gantt(timeline(spans))
    figure.draw_without_rendering()
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert len(legend(figure)) > 10
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert box.y1 < min(axes.get_window_extent().y0 for axes in figure.axes)


def test_pieces_of_a_pass_do_not_choose_the_zoom() -> None:
    """One backward in 100 pieces beside 40 whole ones: a box of the zoom is a whole one."""
    whole = [Span(0, "compute", template(("mm", "matmul", "compute", 1.0)), float(i), microbatch=i) for i in range(40)]
    piece = template(("mm", "matmul", "compute", 0.01), phase="F")
    cut = [Span(0, "compute", piece, 40 + i / 100, microbatch=40, label=f"x{i}") for i in range(100)]
    boxes = Picture.arrange(timeline([*whole, *cut]), "").boxes
    assert usual_box_s(boxes) == pytest.approx(1.0)


def test_a_job_without_a_pipeline_has_no_bubble_in_its_title() -> None:
    work = {
        "model": {"layers": 2, "hidden": 512, "heads": 8, "vocab": 1000},
        "training": {"seq": 256, "global_batch": 8},
        "cluster": "dgx_a100",
    }
    titles = [run(work, set={"parallelism.pp": pp}).gantt().axes[0].get_title(loc="left") for pp in (1, 2)]
    assert ["bubble" in title for title in titles] == [False, True]

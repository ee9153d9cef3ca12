"""The page of results: what is in it, what it weighs, and what a browser makes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.advising.advise import advise
from simulator.cli.app import main
from simulator.output.page import timeline_data
from simulator.output.page.document import PageJob, page, save_page
from simulator.output.page.timeline_data import TimelineData
from simulator.output.summary import price_lines
from tests.support.browser import CHROMIUM, drive, tab
from tests.support.jobs import job
from tests.support.timelines import pipeline

PIPELINE = job(parallelism={"tp": 2, "pp": 2, "dp": 2}, training={"seq": 512, "global_batch": 16, "recompute": "full"})


def page_job(work: Any, budget_s: float = 0.0) -> PageJob:
    result = simulator.run(work)
    report = {**result.report, "what_to_change": advise(result, budget_s=budget_s).to_dict()}
    return PageJob(report, result.spans, result.played, result.memories)


def words(text: str) -> str:
    """Return the text of a page without pictures."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", text[text.index("<body>") :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", body))


def test_a_page_has_the_verdict_the_changes_and_the_reasons() -> None:
    one = page_job(PIPELINE, budget_s=60.0)
    seen = words(page([one], changed="training.seq=512"))
    best = one.report["what_to_change"]["changes"]
    assert best
    for expected in (
        "changed by training.seq=512", "step time", "nothing comparable was measured", "fits",
        "each by itself", best[0]["options"], "Where a GPU's time goes", "exposed tp communication",
        "What bounds the step", "matmul",
        "Memory over time", "busiest links", "node0.gpu0.nvlink:tx", "How far to trust it",
    ):  # fmt: skip
        assert expected in seen.replace("&#39;", "'"), expected


def test_a_page_says_of_precision_and_prices_what_the_terminal_says() -> None:
    """The recipe of products in 8 bits stands in the subtitle, and kinds of prices below the profile's name."""
    eight = {**PIPELINE, "training": {**PIPELINE["training"], "fp8": {"recipe": "te_delayed"}}, "cluster": "dgx_h100"}
    one = page_job(eight)
    seen = words(page([one]))
    assert "products in 8 bits (te_delayed) on 8 GPUs" in seen
    assert " of the dense fp8 peak of 1978.9 TFLOP/s" in seen
    (line,) = price_lines(one.report["calibration"])
    assert line in seen
    assert f"{one.report['calibration']['kind']} figures, {one.report['calibration']['date']}" in seen


@pytest.mark.slow
def test_the_largest_shipped_page_is_below_5_mb(tmp_path: Path) -> None:
    save_page([page_job("gpt175b_3d")], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 5e6


def test_of_a_very_long_step_both_ends_are_drawn_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages run 20 micro-batches forward and backward: of 80 passes of a unit of time those in the middle go."""
    whole = TimelineData.arrange(pipeline("gpipe", 2, 20))
    assert not whole.left_out
    assert whole.gap == (0.0, 0.0)
    monkeypatch.setattr(timeline_data, "MOST_BARS", 30)
    data = TimelineData.arrange(pipeline("gpipe", 2, 20))
    assert "of 80 passes" in data.left_out
    begin, end = data.gap
    left = sorted(data.boxes["left"].tolist())
    assert left == sorted(one for one in whole.boxes["left"].tolist() if not begin <= one < end)
    assert 26 <= len(left) <= 30  # passes that begin together go together
    assert (left[0], left[-1]) == (min(whole.boxes["left"]), max(whole.boxes["left"]))
    assert data.length == whole.length
    assert len(data.inside["first_piece"]) == len(left) + 1


def test_two_jobs_stand_side_by_side_on_equal_pages_and_names_are_no_markup() -> None:
    jobs = [page_job({**PIPELINE, "name": name}) for name in ("tiny", "<script>alert(1)</script>")]
    first, second = page(jobs), page(jobs)
    assert first == second
    assert "<script>alert" not in first
    seen = words(first)
    for expected in ("1. tiny", "2. &lt;script&gt;alert(1)&lt;/script&gt;", "Side by side", "step time"):
        assert expected in seen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--report", "page.pdf"], "no file of this kind"),
        (["--report", "missing/page.html"], "its directory does not exist"),
        (["--budget-s", "3"], "none is asked for"),
        (["--budget-s", "-1", "--advise"], "greater than or equal to 0"),
        (["gpt22b_tp8", "--share-fabric", "--advise"], "jobs that have a cluster alone"),
        (["gpt22b_tp8", "--share-fabric", "--report", "page.html"], "jobs that have a cluster alone"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["run", "gpt22b_tp8", *options])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_run_writes_the_page_the_changes_and_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "gpt22b_tp8", "--report", str(tmp_path / "page.html"), "--json", "-"])
    assert caught.value.code == 0
    assert '"what_to_change": {' in capsys.readouterr().out
    assert "gpt22b_tp8" in (tmp_path / "page.html").read_text(encoding="utf-8")


_FRAME = """(() => {
  const view = Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name("job0-timeline"))
  view.el.scrollIntoView({block: "center"})
  const place = view.el.getBoundingClientRect(), frame = view.frame.bbox
  return [place.left + frame.left, place.top + frame.top, frame.width, frame.height]
})()"""
_TOOLTIPS = """(() => {
  const texts = []
  const walk = (node) => {
    if (String(node.className ?? "").includes("tooltip-content")) texts.push(node.textContent)
    for (const inner of [...(node.shadowRoot?.childNodes ?? []), ...node.childNodes]) walk(inner)
  }
  walk(document.body)
  return texts.join(" ")
})()"""
_RANGE = """(() => {
  const range = Bokeh.documents[0].get_model_by_name("job0-timeline").x_range
  return [range.start, range.end]
})()"""


_LINES = """(() => {
  const timeline = Bokeh.documents[0].get_model_by_name("job0-timeline")
  const boxes = Bokeh.documents[0].get_model_by_name("job0-boxes").data_source.data
  const pixels = timeline.inner_width / (timeline.x_range.end - timeline.x_range.start)
  return Array.from(boxes.line).map((line, box) => [line, (boxes.right[box] - boxes.left[box]) * pixels])
})()"""
_ZOOM = """Bokeh.documents[0].get_model_by_name("job0-timeline").x_range.setv({start: START, end: END})"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_lines_part_those_boxes_that_are_wide_enough(tmp_path: Path) -> None:
    """A last backward pass is cut into buckets, pieces far narrower than a usual pass: those get no lines until they
    are wide."""
    work = job(
        model={"layers": 32, "hidden": 512, "heads": 8, "vocab": 1024},
        parallelism={"pp": 2, "dp": 4, "bucket_bytes": 2**20},
        training={"seq": 512, "global_batch": 128},
        framework="megatron_core",
    )
    one = page_job(work)
    save_page([one], tmp_path / "page.html")

    async def visit() -> None:
        async with tab(tmp_path / "page.html", tmp_path / "browser", 1400, 900) as seen:
            await seen.until(f"window.Bokeh && Bokeh.documents.length > 0 && {_LINES}.some(([line]) => line > 0)")
            whole = await seen.value(_LINES)
            assert [bool(line) for line, _ in whole] == [width > 4 for _, width in whole]
            assert not all(line for line, _ in whole)
            length = TimelineData.arrange(one.timeline).length
            await seen.value(_ZOOM.replace("START", str(0.95 * length)).replace("END", str(length)))
            near = await seen.value(_LINES)
            assert [bool(line) for line, _ in near] == [width > 4 for _, width in near]
            assert sum(line > 0 for line, _ in near) > sum(line > 0 for line, _ in whole)
            assert seen.problems == []

    drive(visit)


def test_passes_that_follow_at_once_are_joined_below_their_boxes() -> None:
    """Two stages run 3 micro-batches forward, then backward.

    The forward passes of a stage are one run, and so are its backward passes. Stage 0 waits for the first of these.
    """
    data = TimelineData.arrange(pipeline("gpipe", 2, 3))
    spans = list(zip(data.runs["left"].tolist(), data.runs["right"].tolist(), strict=True))
    seconds = sum(right - left for left, right in spans)
    assert seconds == pytest.approx(float((data.boxes["right"] - data.boxes["left"]).sum()))
    assert len(spans) < len(data.boxes["left"])
    assert len(set(spans)) == len(spans)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_zooms_shows_what_is_under_the_pointer_and_finds(tmp_path: Path) -> None:
    one = page_job(PIPELINE)
    save_page([one], tmp_path / "page.html")
    data = TimelineData.arrange(one.timeline)
    box = next(at for at, name in enumerate(data.boxes["name"]) if name == "B3 backward" and data.boxes["row"][at] == 1)
    middle = float(data.boxes["left"][box] + data.boxes["right"][box]) / 2 / data.length

    async def visit() -> None:
        async with tab(tmp_path / "page.html", tmp_path / "browser", 1400, 900) as seen:
            # The pass chosen first is drawn: pictures are there, and scripts have run.
            title = 'Bokeh.documents[0].get_model_by_name("job0-inside").title.text'
            await seen.until(f"window.Bokeh && Bokeh.documents.length > 0 && {title}.includes('B0')")
            left, top, width, height = await seen.value(_FRAME)
            x, y = left + middle * width, top + 0.7 * height  # in the second of two rows
            for step in range(3):
                await seen.mouse("mouseMoved", x + step % 2, y)
            tooltip = await seen.until(_TOOLTIPS)
            assert "B3 backward" in tooltip
            assert data.rows[1] in tooltip
            assert f"{float(data.boxes['left'][box]):,.4f} {data.unit}" in tooltip
            begin, end = await seen.value(_RANGE)
            await seen.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
            await seen.until(f"({_RANGE})[1] - ({_RANGE})[0] < {0.9 * (end - begin)}")
            now, until = await seen.value(_RANGE)
            assert now < middle * data.length < until  # around the pointer
            # Micro-batch 3 goes forward and backward through two stages, with a hand-over at each end of two transfers.
            await seen.value('Bokeh.documents[0].get_model_by_name("job0-search").value_input = "3"')
            found = await seen.until('Bokeh.documents[0].get_model_by_name("job0-found").text')
            bars = sum(one == 3 for one in data.bars["microbatch"].tolist())
            assert found == f"{2 * 2 + bars} marked"
            assert all(url.startswith(("file:", "data:")) for url in seen.requests)
            assert seen.problems == []

    drive(visit)

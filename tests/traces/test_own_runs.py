"""Steps that were recorded on one GPU and on two are played to their own length and overlap."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from simulator.traces.kineto import read_trace
from simulator.traces.replay import replay
from tests.support.grids import one_in
from tests.support.kineto import KinetoWriter

RUNS = Path(__file__).resolve().parents[2] / "calibration/results/runs"


def save_run(name: str, folder: Path) -> list[Path]:
    """Write the timeline of a run as its profiler did, a file per rank, without the host's calls."""
    rows = pd.read_csv(RUNS / f"{name}.timeline.csv.gz")
    ranks = sorted(map(int, rows["rank"].unique()))
    files = []
    for rank in ranks:
        trace = KinetoWriter(rank, len(ranks))
        mine = rows[rows["rank"] == rank]
        streams = {stream: number for number, stream in enumerate(mine["stream"].unique(), 7)}
        for row in mine.itertuples():
            group = {}
            if row.name.startswith("nccl"):
                listed = str(ranks)
                group = {"Group size": len(ranks), "Process Group Name": "0", "Process Group Ranks": listed}
            length_us = (row.end_s - row.start_s) * 1e6
            trace.kernel(row.name, streams[row.stream], row.start_s * 1e6, length_us, -1, **group)
        trace.event("user_annotation", "ProfilerStep#1", 0.0, mine["end_s"].max() * 1e6)
        files.append(trace.save(folder / f"rank{rank}.json.gz"))
    return files


def check_replay(files: list[Path]) -> None:
    """Hold a replayed step against the recorded one, by its length and its overlap."""
    played = replay(read_trace(files))
    assert abs(played.error) < 0.02, files
    recorded, again = played.recorded.overlap, played.played.overlap
    assert (recorded is None) == (again is None)
    if recorded is not None and again is not None:
        assert abs(again - recorded) < 0.02, files


def ranks_of(path: Path) -> int:
    return int(pd.read_csv(path, usecols=["rank"])["rank"].max()) + 1


@pytest.mark.slow
def test_every_step_on_one_or_two_gpus_is_played_to_its_length_and_overlap(tmp_path: Path) -> None:
    """Each length is within 2 %, and each overlap within 2 points, of all runs whose timelines are kept."""
    paths = [path for path in sorted(RUNS.glob("*.timeline.csv.gz")) if ranks_of(path) <= 2]
    assert len(paths) >= 40
    for path in paths:
        name = path.name.removesuffix(".timeline.csv.gz")
        folder = tmp_path / name
        folder.mkdir()
        check_replay(save_run(name, folder))


@pytest.mark.parametrize("name", one_in(3, ["ddp2_h3072_l12", "dense_h2048_l24_s2k", "ddp2_no_overlap_h3072_l12"]))
def test_a_recorded_step_is_played_to_its_length_and_overlap(name: str, tmp_path: Path) -> None:
    """Its length is within 2 %, and its overlap within 2 points."""
    check_replay(save_run(name, tmp_path))

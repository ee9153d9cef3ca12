"""Transfers told from waiting: kernels that meet, made by hand, simulated, and of the real runs."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from calibration.compare.kernels import PARTS, measured_kernels, simulated_kernels
from calibration.compare.meetings import Meetings, meetings, moving_s
from simulator.api import run
from simulator.config import load_workload
from tests.support import runs

RUNS = Path(__file__).parents[2] / "calibration" / "runs"
REAL = RUNS.parent / "results" / "runs"


def frame(*rows: tuple[int, str, str, str, float, float]) -> pd.DataFrame:
    """Of rank, stream, kind, name, start and end; a kernel without kind is a product."""
    columns = ("rank", "stream", "kind", "name", "start_s", "end_s")
    made = pd.DataFrame([dict(zip(columns, row, strict=True)) for row in rows])
    return made.assign(**{"class": np.where(made["kind"] == "", "matmul", "communication")})


def reduction(rank: int, start: float, end: float, kind: str = "dp", stream: str = "comm1") -> Any:
    return rank, stream, kind, "AllReduce", start, end


DP = Meetings({"dp": ((0, 1, 2),)}, {})


def test_bytes_move_when_the_last_rank_has_come() -> None:
    """Three ranks come to the first collective at 1, 4 and 2, to the second at 6, 6 and 9, and the second of them
    leaves last; it is one order on each, whatever the order of the rows, the numbers of streams, and what else runs."""
    kernels = [
        reduction(0, 1, 5), reduction(0, 6, 10), (0, "compute0", "", "gemm", 0, 3),
        reduction(1, 4, 5.5, stream="comm7"), reduction(1, 6, 10.5, stream="comm7"),
        reduction(2, 2, 5), reduction(2, 9, 10),
    ]  # fmt: skip
    for order in list(permutations(kernels))[::97]:
        moves, done = moving_s(frame(*order), DP)
        for row, *found in zip(order, moves.tolist(), done.tolist(), strict=True):
            if row[2]:
                assert found == ([4.0, 5.5] if row[4] < 6 else [9.0, 10.5]), row
            else:
                assert np.isnan(found).all()


@pytest.mark.parametrize(
    "kernels",
    [
        [reduction(0, 1, 5), reduction(1, 2, 5)],  # rank 2 has none
        [reduction(0, 1, 5), reduction(1, 2, 5), reduction(2, 1, 5), reduction(2, 6, 7)],
        [reduction(0, 1, 5), reduction(1, 2, 5), reduction(2, 5.1, 6)],  # of another collective: two had gone
        [reduction(rank, 1, 5, "tp") for rank in range(3)],  # whose ranks nobody knows
    ],
)
def test_what_does_not_meet_is_not_told(kernels: list[Any]) -> None:
    assert np.isnan(moving_s(frame(*kernels), DP)[0]).all()


def test_sends_may_have_gone_before_their_receive_comes() -> None:
    """From rank 0 to 1: sent 1-2 and received 5-6, both without waiting; then received from 7 on what is sent at 9."""
    sent, received = ((1.0, 2.0), (9.0, 10.0)), ((5.0, 6.0), (7.0, 10.5))
    kernels = frame(*(reduction(rank, *when, "pp") for rank, own in enumerate((sent, received)) for when in own))
    pair = {"pp": ((0, 1),)}
    moves, done = moving_s(kernels, Meetings(pair, {0: 2, 1: 2}))
    assert moves.tolist() == [1, 9, 5, 9]
    assert done.tolist() == [2, 10.5, 6, 10.5]
    # Torch's 1F1B makes one kernel of a send and a receive: four transfers of a rank in two kernels.
    assert np.isnan(moving_s(kernels, Meetings(pair, {0: 4, 1: 4}))[0]).all()


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"tp": 2}, {"tp": {(0, 1)}}),
        ({"tp": 2, "dp": 2}, {"tp": {(0, 1), (2, 3)}, "dp": {(0, 2), (1, 3)}}),
        ({"pp": 2, "dp": 2}, {"pp": {(0, 2), (1, 3)}, "dp": {(0, 1), (2, 3)}}),
        ({"pp": 4}, {"pp": {(0, 1, 2, 3)}}),
        ({"dp": 4, "zero": 3}, {"dp": {(0, 1, 2, 3)}}),
    ],
)
def test_who_meets_is_what_the_program_says(
    layout: dict[str, object], told: dict[str, set[Any]], tmp_path: Path
) -> None:
    result = run(runs.workload(tmp_path, "w", layout))
    found = meetings(result)
    assert {kind: set(groups) for kind, groups in found.groups.items()} == told
    # A pipeline of two hands over one activation and one gradient per micro-batch; a stage of four has two neighbours.
    assert found.hand_overs == (dict.fromkeys(range(4), 2 * 4) if layout.get("pp") == 2 else {})
    assert meetings(None).groups == {}


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"dp": 2, "bucket_bytes": 1_000_000},
        {"pp": 2, "schedule": "interleaved", "vpp": 2},
    ],
)
def test_transfers_and_waiting_are_all_of_a_simulated_communication(layout: dict[str, object], tmp_path: Path) -> None:
    """Here one side is known: read as a profile, with all kernels of a rank in the order in which they began, the other
    finds the same transfers. The others wait for a slow GPU."""
    path = runs.workload(tmp_path, "w", layout)
    waited = []
    for speed in (1.0, 0.5):
        slow = [{"gpu": "node0.gpu0", "speed_scale": speed}]
        result = run(path, set={"cluster.overrides": slow, "cluster.node.host_speed": 1000.0})
        kernels, n_ranks = simulated_kernels(result), result.spans.n_ranks
        seconds, parts = kernels.seconds(n_ranks), kernels.parts(n_ranks)
        for name, both in PARTS.items():
            assert np.sum([parts[part] or (0.0, 0.0) for part in both], axis=0) == pytest.approx(seconds[name])
        waited.append(sum(parts["waiting"]) / n_ranks)
        rows = pd.DataFrame({"rank": kernels.rank, "stream": "comm0", "kind": kernels.kind, "name": "kernel"})
        rows = rows.assign(start_s=kernels.start_s, end_s=kernels.end_s, **{"class": "communication"})
        mine = (kernels.kind != "") & (kernels.kind != "pp")
        moves, done = moving_s(rows[mine], meetings(result))
        assert moves == pytest.approx(kernels.moves_s[mine])
        assert done == pytest.approx(kernels.end_s[mine])
    if "pp" not in layout:
        assert waited[1] > waited[0] + 1e-4


def test_what_posts_as_its_bytes_come_waits_for_nobody_knows_how_long(tmp_path: Path) -> None:
    for schedule, known in (("gpipe", False), ("interleaved", True)):
        layout = {"pp": 2, "schedule": schedule, "vpp": 2 if known else 1}
        parts = simulated_kernels(run(runs.workload(tmp_path, "w", layout))).parts(2)
        assert min(parts["hand-over transfer"]) > 0
        assert (parts["hand-over waiting"] is not None) == known


@pytest.mark.parametrize(
    "name",
    ["tp2_h3072_l12", "tp2_dp2_h4096_l16", "ddp4_h4096_l16", "fsdp2_h3072_l12", "ep4_h2048_l8_e8", "pp2_zbv_h3072_l12"],
)
def test_kernels_of_real_runs_meet(name: str) -> None:
    """All of them, and their clocks are one: but for a reduction of ``tp2_dp2``, which is of another group, those of a
    collective end within 600 us of each other, and of the smallest, which have no more to do, within 2 us."""
    (path,) = RUNS.glob(f"*/{name}.yaml")
    workload = load_workload(path, {"cluster": "hgx_h200_4gpu", "calibration": "h200-sxm-141gb"})
    known = meetings(run(workload))
    kernels = measured_kernels(REAL / f"{name}.timeline.csv.gz", known)
    parts = kernels.parts(workload.n_ranks)
    kind = "hand-over" if name.startswith("pp2") else "communication"
    transfer, waiting = (parts[part] for part in PARTS[kind])
    assert transfer is not None
    assert waiting is not None
    # Ranks whose kernels end before the last one's make both a little more than all their seconds.
    assert 1 - 0.01 < (sum(transfer) + sum(waiting)) / sum(kernels.seconds(workload.n_ranks)[kind]) < 1.1
    told = ~np.isnan(kernels.moves_s)
    if kind == "communication":
        together = []
        for when in np.unique(kernels.moves_s[told]):
            ends = kernels.end_s[kernels.moves_s == when]
            together.append(np.ptp(ends) < (2e-6 if ends.max() - when < 8e-6 else 6e-4))
        assert sum(together) >= len(together) - 1

"""What the benchmark of large jobs reads, and how it compares that with what is asked."""

from __future__ import annotations

import pytest

from benchmarks.bench_sizes import ROWS, GiB, Most, SizeFigures, with_compared
from simulator.cluster import Cluster


@pytest.mark.parametrize(
    ("row", "n_gpus"),
    [
        ("xml-20k", 20_000),
        pytest.param("xml-576", 20_160, marks=pytest.mark.slow),
        ("slurm-5k", 313_536),
    ],
)
def test_files_of_other_tools_become_clusters(row: str, n_gpus: int) -> None:
    """2,500 nodes of 8 GPUs, 35 of 576; 4,899 leaves of 8 nodes of 8. None is refused."""
    cluster = ROWS[row].prepared()()
    assert isinstance(cluster, Cluster)
    assert len(cluster.gpus) == n_gpus
    assert cluster.route(0, n_gpus - 1)


def test_the_tree_of_slurm_has_5000_switches() -> None:
    cluster = ROWS["slurm-5k"].prepared()()
    # Every switch but the root has one trunk above it.
    assert len(cluster.switches.trunks) == 5_000 - 1


@pytest.mark.parametrize(
    ("figures", "is_kept"),
    [
        (SizeFigures(3.0, GiB), True),
        (SizeFigures(3.01, GiB), False),
        (SizeFigures(1.0, GiB + 1), False),
    ],
)
def test_a_row_is_over_by_its_seconds_or_by_its_memory(figures: SizeFigures, is_kept: bool) -> None:
    assert Most(3, GiB).is_kept("row", {"row": figures}) is is_kept
    assert str(Most(3, GiB)) == "3 s, 1 GiB"


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.59, True), (0.61, False)])
def test_a_row_is_over_by_times_the_seconds_of_another(seconds: float, is_kept: bool) -> None:
    figures = {"small": SizeFigures(0.5, 0), "row": SizeFigures(seconds, 0)}
    assert Most(times=1.2, row="small").is_kept("row", figures) is is_kept


def test_a_row_that_another_is_compared_with_is_run_before_it() -> None:
    assert with_compared(["dense-64k"]) == ["dense-1k", "dense-64k"]
    assert with_compared(["a2a-256"]) == ["a2a-256"]

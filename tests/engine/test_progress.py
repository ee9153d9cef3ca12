"""How far a play is, as both engines tell it."""

from __future__ import annotations

import pytest

from simulator.api import run
from simulator.bounds import EngineChoice
from simulator.config import load_workload
from simulator.engine import Placed, progress, simulate, simulate_together
from simulator.engine.compiled import handle
from simulator.engine.progress import watched
from simulator.program import from_text
from tests.recorded.jobs import JOBS
from tests.support.clusters import nic_cluster
from tests.support.engines import ENGINES
from tests.support.exact import timeline_differences
from tests.support.transfers import IDEAL

#: Two ranks, each of which runs two blocks, of one second and of three, and joins a collective.
TWO_BLOCKS = """
program name=two
block 0 name=short
  compute k F fixed seconds=1.0
block 1 name=long
  compute k F fixed seconds=3.0
role all ranks=0-1
  lane compute
    step a block=0
    step b block=1
  lane dp
    step y after=a
      comm sum all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
group dp 0,1
"""


@pytest.fixture
def told_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event, and every block, is a moment to tell."""
    monkeypatch.setattr(handle, "EVENTS_AT_ONCE", 1)
    monkeypatch.setattr(progress, "BLOCKS_AT_ONCE", 1)


@pytest.mark.usefixtures("told_often")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fold", [True, False])
def test_the_share_is_that_of_blocks_that_have_ended(engine: EngineChoice, fold: bool) -> None:
    """Folded, one rank has two blocks. Played apart, the two ranks have four, which end two by two."""
    shares: list[float] = []
    with watched(shares.append):
        simulate(from_text(TWO_BLOCKS), nic_cluster(2), IDEAL, fold=fold, engine=engine)
    expected = [0.5, 1.0] if fold else [0.25, 0.5, 0.75, 1.0]
    assert [share for share in dict.fromkeys(shares) if share] == expected


@pytest.mark.usefixtures("told_often")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["schedule_1f1b_in_line", "slow_gpu", "dp_fsdp_eager", "moe_list", "no_coalesce"])
def test_every_play_is_told_of_to_its_end_and_is_the_same(engine: str, name: str) -> None:
    workload = load_workload(JOBS[name].workload, {**JOBS[name].changes, "simulation.engine": engine})
    shares: list[float] = []
    with watched(shares.append):
        heard = run(workload).played
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(set(shares)) > 3
    before = len(shares)
    assert list(timeline_differences(heard, run(workload).played)) == []
    assert len(shares) == before


@pytest.mark.usefixtures("told_often")
@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_that_are_played_together_are_told_of_together(engine: EngineChoice) -> None:
    """Each of two jobs, folded to one rank, has two blocks. Those of one second end together, then those of three."""
    cluster = nic_cluster(4)
    jobs = [Placed.on(from_text(TWO_BLOCKS), IDEAL, cluster, nodes) for nodes in ((0, 1), (2, 3))]
    shares: list[float] = []
    with watched(shares.append):
        simulate_together(jobs, cluster, engine=engine)
    assert [share for share in dict.fromkeys(shares) if share] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_small_play_is_told_of_at_its_end(engine: EngineChoice) -> None:
    """Two blocks are fewer than the blocks, and their events fewer than the events, from one word to the next."""
    shares: list[float] = []
    with watched(shares.append):
        simulate(from_text(TWO_BLOCKS), nic_cluster(2), IDEAL, engine=engine)
    assert shares == [1.0]


@pytest.mark.usefixtures("told_often")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_play_that_grows_is_not_told_of(engine: EngineChoice) -> None:
    """Nobody knows how many blocks extensions will bring."""
    shares: list[float] = []
    with watched(shares.append):
        simulate(from_text(TWO_BLOCKS), nic_cluster(2), IDEAL, more=lambda: lambda now: None, engine=engine)
    assert shares == []

"""What passes and transfers take they give back, whatever is combined: nothing leaks from step to step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from simulator.analysis.time.memory_curve import MemoryHistory, memory_curve
from simulator.analysis.training import step_requests
from simulator.analysis.training.activation_lifetimes import activation_events
from simulator.analysis.training.memory import memory_of_ranks
from simulator.analysis.training.memory_requests import MemoryRequests
from simulator.analysis.training.rehearsal import rehearsed_times
from simulator.analysis.training.reserved_memory import ReplayedRank, cached_bytes
from simulator.analysis.training.static_memory import static_memory
from simulator.api import run
from simulator.arrays import Ints
from tests.support.frameworks import COMPILED, MEGATRON
from tests.support.grids import grid
from tests.support.jobs import job

SOFTWARE = {"megatron": MEGATRON, "compiled": COMPILED}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero2": {"dp": 4, "zero": 2},
    "zero2 in a pipeline": {"pp": 2, "dp": 2, "zero": 2},
    "zero3": {"dp": 4, "zero": 3},
    "prefetch": {"dp": 4, "zero": 3, "prefetch": 4},
    "hsdp": {"dp": 4, "zero": 3, "hsdp": 2},
    "split": {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb_h1"},
}


@pytest.mark.parametrize(
    ("layout", "software", "compression"), grid(LAYOUTS, SOFTWARE, ["none", "int8", "fp8"], every=5)
)
def test_a_step_gives_back_what_it_takes(layout: str, software: str, compression: str) -> None:
    """Per rank, bytes taken over a step less bytes given back are none; 16-bit gradients reduce through an fp32 copy
    where products do not accumulate in place."""
    if layout == "hsdp" and compression != "none":
        pytest.skip("refused")
    section = {**LAYOUTS[layout], "grad_compression": compression, "bucket_bytes": 400_000}
    workload = job(framework=SOFTWARE[software]) | {"parallelism": section}
    timeline = run(workload).spans
    for rank in timeline.ranks:
        own = timeline.rank == rank
        taken, given = timeline.alloc_bytes[own].sum(), timeline.free_bytes[own].sum()
        assert taken > 0
        assert taken == pytest.approx(given, rel=1e-9)


#: What cuts passes into pieces.
CUTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "everywhere": {},
    "units": {"zero": 3},
    "layers": {"offload": {"activations": "cpu"}},
    "both": {"zero": 3, "offload": {"activations": "cpu"}},
}


class Replay(NamedTuple):
    """Requests of two steps of some ranks, and how many come before the first step and by the end of each."""

    requests: MemoryRequests
    ends: Ints

    def allocated_after(self, rank: int) -> list[int]:
        """Return the bytes of a rank's tensors that are alive before the first step, and at the end of each."""
        sequences = [len(array) for array in self.requests.sequences.arrays]
        own = self.requests.order[0, self.requests.firsts[rank] : self.requests.firsts[rank + 1]]
        n_requests = np.cumsum([0, *(sequences[number] for number in own)])
        requests = self.requests.in_order(rank)
        return [sum(dict(requests[: n_requests[end]]).values()) for end in self.ends[rank]]

    @property
    def most_allocated(self) -> list[int]:
        """Most bytes that each rank's allocator has handed out, of unlimited memory."""
        limits = [math.inf] * (len(self.requests.firsts) - 1)
        return [most.allocated for most in self.requests.most_bytes(limits, compiled=False)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The replays of a test, two steps of each rank."""
    found: list[Replay] = []
    in_order = step_requests.TimedRequests.in_order

    def remember(timed: step_requests.TimedRequests) -> MemoryRequests:
        requests = in_order(timed)
        times = np.sort(np.concatenate(timed.rows, axis=1)[0])
        behind = np.searchsorted(times, np.column_stack((timed.begins[:, 0], timed.ends + 1)))
        found.append(Replay(requests, behind - requests.firsts[:-1, np.newaxis]))
        return requests

    monkeypatch.setattr(step_requests.TimedRequests, "in_order", remember)
    return found


@pytest.mark.parametrize(
    ("schedule", "recompute", "cut"),
    grid(["1f1b", "zb_h1", "zb_v", "interleaved_zb"], ["none", "full"], CUTS, every=7),
)
def test_the_allocators_replay_ends_empty(schedule: str, recompute: str, cut: str, replays: list[Replay]) -> None:
    """Passes and gathers take blocks and free them all, however passes are cut. The first step leaves the states that
    its update makes, two in fp32 for each weight, and the second nothing more."""
    workload = job(model__hidden=512, training__recompute=recompute)
    vpp = 1 if schedule in ("1f1b", "zb_h1") else 2
    workload["parallelism"] = {"pp": 2, "tp": 2, "dp": 2, "schedule": schedule, "vpp": vpp, **CUTS[cut]}
    workload["simulation"] = {"coalesce": cut != "everywhere"}
    assert run(workload).memories
    (replay,) = replays
    for rank, most in enumerate(replay.most_allocated):
        before, first, second = replay.allocated_after(rank)
        assert most > before
        assert first == second > before


@pytest.mark.parametrize(("schedule", "zero"), grid(["1f1b", "zb_h1", "zb_v", "interleaved_zb"], [0, 3], every=2))
def test_the_replay_hands_out_what_is_counted(schedule: str, zero: int, replays: list[Replay]) -> None:
    """Logits and loss of a large vocabulary, most of what a last stage holds, are let go at the end of torch's input
    gradient, and not taken once more beside it: the replay's most is what is counted, to a few percent of the tensors
    of one layer that it takes one by one."""
    workload = job(model__hidden=512, model__vocab=50304, framework="pytorch", training__seq=2048)
    vpp = 1 if schedule in ("1f1b", "zb_h1") else 2
    workload["parallelism"] = {"pp": 2, "dp": 2, "schedule": schedule, "vpp": vpp, "zero": zero}
    counted = max(memory.allocated for memory in run(workload).memories)
    (replay,) = replays
    assert max(replay.most_allocated) == pytest.approx(counted, rel=0.05)


def test_ranks_that_do_the_same_are_replayed_once(replays: list[Replay]) -> None:
    """Without folding 8 ranks are played, of which each two replicas of four stages do the same in the same order.

    A replay of one rank alone, on the allocator in Python, gives the same memory.
    """
    workload = job(model__layers=4) | {"simulation": {"fold": False}}
    workload["parallelism"] = {"pp": 4, "dp": 2, "zero": 1}
    result = run(workload)
    memories = result.memories
    (replay,) = replays
    assert (len(memories), len(replay.most_allocated)) == (8, 4)
    blas = dict.fromkeys(result.played.ranks, 0.0)
    static = static_memory(result.workload, blas)
    for memory in memory_of_ranks(result.played, static):
        curve = memory_curve(result.played, memory.rank)
        events = activation_events(result.played, curve, static[memory.rank])
        alone = ReplayedRank(curve, events, static[memory.rank], memory.in_flight, math.inf)
        assert cached_bytes(result.played, [alone], compiled=False) == [memory.cached]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_rehearsal_tells_whole_passes_however_they_are_cut(recompute: str) -> None:
    """What a forward pass takes and a weight gradient gives back is not a piece's, but the same whether layers are
    offloaded, sharded, played kernel by kernel, or none of it."""
    told = []
    for cut, section in CUTS.items():
        workload = job(training__recompute=recompute, training__global_batch=4)
        workload["parallelism"] = {"pp": 2, "tp": 2, "dp": 2, "schedule": "zb_h1", **section}
        workload["simulation"] = {"coalesce": cut != "everywhere"}
        times = rehearsed_times(run(workload).played, 2, 1.0)
        told.append((*times.forward_bytes, *times.split_bytes))
    assert all(of_cut == pytest.approx(told[0], rel=1e-6) for of_cut in told)


def test_a_pass_with_fewer_pieces_than_parts_does_not_go_unnoticed() -> None:
    """Without the first piece each other one would be taken for the piece before it."""
    workload = job(model__layers=4) | {"parallelism": {"dp": 2, "zero": 3}}
    result = run(workload)
    rank = result.played.ranks[0]
    static = static_memory(result.workload, {rank: 0.0})[rank]
    curve = memory_curve(result.played, rank)
    assert static.passes_by_part
    first = curve.span == curve.span[result.played.phase[curve.span] == "F"].min()
    without = MemoryHistory(*[column[~first] for column in curve])
    with pytest.raises(ValueError, match="pieces of a pass F of stage 0"):
        activation_events(result.played, without, static)

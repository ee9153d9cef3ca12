"""Work of the host for ops outside of a layer's passes, and for kernels that one call launches."""

from __future__ import annotations

import pytest

from simulator.costs.launch import issued
from simulator.program import (
    AllToAll,
    Collective,
    Comm,
    Compute,
    Fixed,
    GraphPlace,
    HostKind,
    HostOperation,
    Kernel,
    Matmul,
    Memory,
    RecordedWork,
    Tiled,
)


@pytest.mark.parametrize(
    ("kernel", "work"),
    [
        (Fixed(1e-3), {"optimizer": 1}),
        (Memory("optimizer", 1.0, 1.0), {"optimizer": 1}),
        (Memory("optimizer", 1.0, 1.0, parts=21), {"optimizer": 1, "dtensor_update": 21}),
        (Memory("optimizer", 1.0, 1.0, launches=7), {"update": 7}),
        (Memory("optimizer", 1.0, 1.0, launches=7, parts=21), {"update": 7}),
        (Matmul(8, 8, 8), {"update": 1}),
    ],
)
def test_an_optimizer_issues_one_kernel_for_all_tensors_or_some_for_each(kernel: Kernel, work: dict[str, int]) -> None:
    """A kernel of many tensors is one launch, beside which each DTensor is unwrapped. A loop over tensors launches so
    many kernels of one tensor, and a product, as Muon has, is one of those."""
    assert issued(Compute("adam", kernel, "O"), "O") == work


@pytest.mark.parametrize(("way", "phases"), [("forward", "FR"), ("backward", "BW")])
def test_kernels_of_one_call_are_issued_by_what_launches_them(way: str, phases: str) -> None:
    """Linear attention is as many launches as it has kernels. A kernel inside a call of C++ is one more of that call's.
    The first kernel of a CUDA graph launches all of it, behind one copy of its inputs."""
    norm = Memory("norm", 1.0, 1.0)
    for phase in phases:
        assert issued(Compute("scan", Tiled(1.0, 1.0, 1.0, 64, 64, launches=5), phase)) == {f"{way}_other": 5}
        assert issued(Compute("cast", norm, phase, within_call=True)) == {"expert": 1}
        first, inside = (Compute("norm", norm, phase, graph=place) for place in (GraphPlace.FIRST, GraphPlace.INSIDE))
        assert issued(first) == {f"{way}_norm": 1, f"{way}_other": 1}
        assert issued(inside) == {}


@pytest.mark.parametrize(
    ("comm", "work"),
    [
        (HostOperation("x", HostKind.TO_HOST, 8.0, "rank", "offload"), {"d2h": 1}),
        (HostOperation("x", HostKind.FROM_HOST, 8.0, "rank", "offload"), {"h2d": 1}),
        (HostOperation("x", HostKind.HOST_UPDATE, 8.0, "rank", "offload"), {"cpu": 1}),
        (RecordedWork("x", seconds=1.0), {}),
        (Collective("x", "all_gather", 8.0, "dp", "dp", hooks=13), {"gather": 1, "hook": 13}),
        (Collective("x", "all_gather", 8.0, "tp", "tp", graph=GraphPlace.INSIDE), {}),
        (Collective("x", "broadcast", 8.0, "dp", "dp"), {"collective": 1}),
        (Collective("x", "reduce_scatter", 8.0, "tp", "tp"), {"collective": 1}),
        (AllToAll("x", 8.0, "ep", "ep"), {"exchange": 1}),
    ],
)
def test_communication_is_issued_by_what_it_is_for(comm: Comm, work: dict[str, int]) -> None:
    """Copies to and from the host and updates there are kinds of their own. What a profiler recorded costs nothing, nor
    does a collective inside a CUDA graph. Units of ZeRO-3 call hooks beside their collective."""
    assert issued(comm) == work

"""Stacks: a few parameters, one rule from them to transports, and a fit that anyone can repeat."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import simulator
from benchmarks import fit_stacks
from calibration.fit import stacks
from simulator.cli.app import main
from simulator.cluster import build_cluster
from simulator.config import catalog, load_cluster, load_workload
from simulator.config.section import as_data
from simulator.config.stack import check_stack, load_stack
from simulator.config.validation import validated
from simulator.costs import Costs
from simulator.costs.stack import LL128_FRACTION
from simulator.errors import InputError
from simulator.hardware.stack import MAX_PARAMETERS, Stack, StackParameters
from simulator.network.collectives import idle_seconds, plan
from simulator.validation import collectives
from simulator.validation.collectives import CollectiveCase
from simulator.validation.record import predict_collective

H100 = load_cluster("dgx_h100", nodes=2)
#: Microseconds of a hop inside a node, as NCCL's tuner has them (src/graph/tuning.cc, hwLat of rings).
HOP_us = {"ll": 0.6, "ll128": 1.9, "simple": 3.4}
LINK = H100.kinds[0].nvlink
LINE_Bps, LINK_s = LINK.bandwidth_Bps, LINK.latency_s


def stack(protocols: tuple[str, ...] = ("ll", "ll128", "simple"), **parameters: float) -> Stack:
    return validated(
        Stack,
        {
            "schema_version": 1,
            "name": "own",
            "gpu": "h100-sxm-80gb",
            "fabric": "any",
            "software": "any",
            "source": "made up",
            "protocols": list(protocols),
            "parameters": {"start_s": 10e-6, **parameters},
        },
    )


def seconds(of: Stack, op: str, nbytes: float, ranks: range, algorithm: str = "auto") -> float:
    cluster, costs = build_cluster(H100), Costs.from_stack(of)
    return idle_seconds(plan(op, nbytes, ranks, cluster, costs, algorithm), cluster, costs)


@pytest.mark.parametrize("name", catalog.names("stack"))
def test_shipped_stacks_are_few_parameters_with_a_source(name: str) -> None:
    found = load_stack(name)
    assert found.name == name
    assert 1 <= len(found.parameters.told_apart()) <= MAX_PARAMETERS
    assert found.source


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("nbytes", [2.0**10, 2.0**20, 2.0**30])
def test_a_ring_takes_start_hops_bytes_and_filling(n: int, nbytes: float) -> None:
    """2 (n-1) hops, each of the link and of software, which in LL128 and simple is NCCL's multiple of LL's; 2 (n-1)/n
    of the message over a link at the protocol's share of the efficiency; in simple sqrt(half x flow) bytes more, which
    grow no further from full_bytes on; and 1/n handled without a link. The fastest protocol is taken."""
    given: dict[str, float] = {
        "nvlink_hop_s": 0.5e-6,
        "nvlink_efficiency": 0.8,
        "ll_fraction": 0.25,
        "half_bytes": 4e6,
        "full_bytes": 64e6,
        "copy_Bps": 1e12,
    }
    hops, flow = 2 * (n - 1), 2 * (n - 1) / n * nbytes
    shares = {"ll": 0.25, "ll128": LL128_FRACTION, "simple": 1.0}
    filling = {"ll": 0.0, "ll128": 0.0, "simple": math.sqrt(4e6 * min(flow, 64e6))}
    expected = min(
        10e-6
        + hops * (LINK_s + 0.5e-6 * HOP_us[name] / HOP_us["ll"])
        + (flow + filling[name]) / (LINE_Bps * 0.8 * shares[name])
        + nbytes / n / 1e12
        for name in HOP_us
    )
    assert seconds(stack(**given), "all_reduce", nbytes, range(n), "ring") == pytest.approx(expected, rel=1e-9)


def test_each_protocol_is_there_only_where_the_software_has_it() -> None:
    """Without LL a short message takes simple's hops; 2.7 and 14 microseconds are NCCL's for one over the network."""
    lean = {"network_hop_s": 2.7e-6}
    hop = (stack(("ll", "simple"), **lean), stack(("simple",), **lean))
    with_ll, without = (seconds(of, "send", 8, range(0, 9, 8)) for of in hop)
    assert without - with_ll == pytest.approx(14.0e-6 - 2.7e-6, rel=1e-3)


def test_nvls_has_a_share_of_its_own() -> None:
    """(1 + 1/n) S in NVLS, 2 (n-1)/n S in a ring: n 8, so that at equal shares NVLS takes 1.125 / 1.75 of the time."""
    shares = {"nvlink_efficiency": 0.9, "nvls_efficiency": 0.6}
    for large in (2.0**34, 2.0**36):
        times = {name: seconds(stack(**shares), "all_reduce", large, range(8), name) for name in ("nvls", "ring")}
        assert times["nvls"] == pytest.approx(1.125 * large / (0.6 * LINE_Bps), rel=0.01)
        assert times["ring"] == pytest.approx(1.75 * large / (0.9 * LINE_Bps), rel=0.01)


def test_too_many_parameters_and_other_gpus_are_refused() -> None:
    names = [field.name for field in fields(StackParameters)][: MAX_PARAMETERS + 1]
    with pytest.raises(InputError, match="at most 8"):
        stack(**dict.fromkeys(names, 0.25))
    with pytest.raises(InputError, match="stack of another GPU"):
        check_stack(stack(), "a100-sxm-80gb")
    with pytest.raises(InputError, match="lacks simple"):
        stack(("ll",))


def measured(of: Stack) -> list[tuple[CollectiveCase, float]]:
    cases = [
        CollectiveCase("all_reduce", 2.0**power, tuple(range(n)), "ring", H100, "dgx_h100", of, collectives.PARTS[0])
        for n in (4, 8)
        for power in range(10, 33, 2)
    ]
    return [(case, predict_collective(case).seconds) for case in cases]


def test_a_fit_finds_what_made_the_curve_and_leaves_what_it_does_not_show() -> None:
    """Rows of 8 GPUs made by one stack are fitted from another's values; those of 4 GPUs are only predicted. Inside a
    node nothing shows how fast the network is."""
    true = stack(nvlink_hop_s=0.4e-6, nvlink_efficiency=0.75, ll_fraction=0.2)
    rows = measured(true)
    start = stack(nvlink_hop_s=1e-6, nvlink_efficiency=0.6, ll_fraction=0.4, network_efficiency=0.7)
    values = as_data(start.parameters, defaults=False)
    fitted = {"n_gpus": 8, "rows": {"n": 1, "geometric_mean": 0.0}, "begun": values}
    found = stacks.fit(validated(Stack, {**as_data(start, defaults=False), "fitted": fitted}), rows)
    assert found.fitted is not None
    assert found.fitted.rows.n == 12
    assert found.fitted.rows.geometric_mean < 0.02
    assert found.fitted.held_out is not None
    assert found.fitted.held_out.geometric_mean < 0.05
    assert found.parameters.nvlink_efficiency == pytest.approx(0.75, rel=0.03)
    assert found.parameters.network_efficiency == pytest.approx(0.7, rel=0.02)


def test_a_collective_with_a_stack(tmp_path: Path) -> None:
    """No profile is needed, and the JSON says which of the two spoke."""
    out = tmp_path / "out.json"
    arguments = ["--op", "all_reduce", "--sizes", "1G", "--stack", "h100-efa", "--json", str(out), "--quiet"]
    with pytest.raises(SystemExit) as ended:
        main(["collective", "--cluster", "dgx_h100", *arguments])
    assert ended.value.code == 0
    found = json.loads(out.read_text())
    assert (found["stack"], found["calibration"]) == ("h100-efa", None)
    assert found["rows"][0]["time_s"] == pytest.approx(seconds(load_stack("h100-efa"), "all_reduce", 2**30, range(8)))


WORKLOAD: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 1024, "heads": 8, "vocab": 51200},
    "training": {"seq": 1024, "global_batch": 16},
    "parallelism": {"dp": 16},
    "cluster": "dgx_h100",
}


def test_a_workload_with_a_stack() -> None:
    """What carries gradients is the stack's, a slower network."""
    own, slow = (simulator.run(WORKLOAD, set=change).to_dict() for change in ({}, {"stack": "h100-efa-old"}))
    assert slow["communication"]["dp"]["time_s"] > own["communication"]["dp"]["time_s"]
    assert slow["calibration"]["stack"] == "h100-efa-old"
    with pytest.raises(InputError, match="stack of another GPU"):
        load_workload(WORKLOAD, {"stack": "a100-efa"})
    with pytest.raises(InputError, match="no stack file"):
        load_workload(WORKLOAD, {"stack": "h100-effa"})


def test_jobs_that_share_a_cluster_keep_their_stack() -> None:
    """Two jobs that share no link lose as much by an old stack as one job alone does. A link has one stack.

    Hosts are so fast that only the links decide.
    """
    fast = {"cluster.node.host_speed": 1000.0}

    def longer_s(play: Callable[[dict[str, Any]], float]) -> float:
        return play(fast | {"stack": "h100-efa-old"}) - play(fast)

    def shared_s(change: dict[str, Any]) -> float:
        first, second = simulator.share([WORKLOAD, WORKLOAD], set=change).to_dict()["runs"]
        assert first["step_time_s"] == pytest.approx(second["step_time_s"])
        return float(first["step_time_s"])

    alone_s = longer_s(lambda change: float(simulator.run(WORKLOAD, set=change).to_dict()["step_time_s"]))
    assert alone_s > 1e-3
    assert longer_s(shared_s) == pytest.approx(alone_s, rel=1e-3)
    with pytest.raises(InputError, match="stack"):
        simulator.share([WORKLOAD, WORKLOAD | {"stack": "h100-efa"}])


@pytest.mark.parametrize(
    ("name", "words"),
    [("zzz", "zzz"), ("mi300x", "it has no key fitted.begun"), ("mine.yaml", "no row of 64 GPUs names it")],
)
def test_a_stack_that_cannot_be_fitted_is_said(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = {"n_gpus": 64, "begun": {"start_s": 1e-5}, "rows": {"n": 1, "geometric_mean": 0.1}}
    own = as_data(stack(), defaults=False) | {"name": "mine", "fitted": begun}
    Path("mine.yaml").write_text(json.dumps(own))
    assert fit_stacks.main([name]) == 2
    assert words in capsys.readouterr().err

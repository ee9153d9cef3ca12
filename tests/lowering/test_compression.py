"""Gradients reduced in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import run
from simulator.config import load_workload, warnings
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.lowering.passes.compress_gradients import ELEMENT_BYTES
from simulator.step_result import StepResult
from tests.support.exact import assert_same
from tests.support.grids import grid, one_in
from tests.support.jobs import FAST_HOSTS
from tests.support.quick import play_undisturbed

KINDS = ("fp8", "int8", "1bit")
CLUSTERS = {
    "nvlink": {"gpus": 4, "nic_bps": 200e9},
    "slow NICs": {"gpus": 1, "nic_bps": 10e9},
}


def job(gpus: int = 4, nic_bps: float = 200e9, grad_dtype: str = "fp32", **parallelism: Any) -> dict[str, Any]:
    nvlink = {"kind": "nvswitch", "bandwidth_Bps": 300e9, "latency_s": 6e-7} if gpus > 1 else {"kind": "none"}
    return {
        "name": "compressed",
        "model": {"layers": 4, "hidden": 2048, "heads": 16, "vocab": 1024},
        "training": {"seq": 2048, "global_batch": 8, "grad_dtype": grad_dtype},
        "parallelism": {"dp": 4, **parallelism},
        "cluster": {
            "name": "inline",
            "node": {
                "gpus": {"type": "a100-sxm-80gb", "count": gpus},
                "nvlink": nvlink,
                "pcie": {"generation": 4},
                "nics": {"count": gpus, "bandwidth_bps": nic_bps, "latency_s": 2e-6},
            },
            "fabric": {"transport": "tcp"},
        },
    }


def play(**options: Any) -> StepResult:
    result = run(job(**options))
    check(result.program, result.spans)
    return result


def sent(result: StepResult, *names: str) -> float:
    rows = result.timeline[result.timeline["rank"] == 0]
    return float(rows[rows["name"].isin(names)]["nbytes"].sum())


GRADIENTS = tuple(f"dp.{op} grads" for op in ("all_reduce", "reduce_scatter", "all_to_all", "all_gather"))


@pytest.mark.parametrize(("zero", "grad_dtype", "kind"), grid([0, 1, 2, 3], ["fp32", "bf16"], KINDS, every=6))
def test_bytes_fall_by_the_ratio_of_the_elements(kind: str, grad_dtype: str, zero: int) -> None:
    """An all-to-all and an all-gather move (n-1)/n of the message each, as the two halves of a ring's all-reduce do; a
    reduce-scatter moves (n-1)/n, as the all-to-all in its place. So bytes per element decide alone."""
    if kind == "1bit" and zero:
        pytest.skip("momentum is not sharded")
    layout = {"zero": zero, "collective_algorithm": "ring", "grad_dtype": grad_dtype}
    plain, packed = (play(**layout, grad_compression=what) for what in ("none", kind))
    ratio = ELEMENT_BYTES[kind] / {"fp32": 4, "bf16": 2}[grad_dtype]
    assert sent(packed, *GRADIENTS) == pytest.approx(ratio * sent(plain, *GRADIENTS), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_shows(kind: str) -> None:
    """Every bucket is packed once where its gradients are complete, and unpacked after the backward pass; what is not
    summed on the way is added up in between. Nothing of it is there without compression."""
    result = play(grad_compression=kind)
    rows = result.timeline[result.timeline["lane"] == "compute"]
    count = {what: rows[rows["name"] == f"dp.{what} grads"] for what in ("pack", "add", "unpack")}
    buckets = len(count["pack"])
    assert buckets > 1
    assert len(count["unpack"]) == buckets
    assert len(count["add"]) == (0 if kind == "fp8" else buckets)
    backward = rows[rows["phase"].isin(["B", "W"])]
    assert count["pack"]["start_s"].min() < backward["end_s"].max() <= count["unpack"]["start_s"].min()
    assert all((frame["end_s"] > frame["start_s"]).all() for frame in count.values())
    # Packing reads whole gradients of 4 bytes and writes packed ones; 1-bit also what rounding lost, in and out.
    lost = 8 if kind == "1bit" else 0
    params = result.to_dict()["params_total"]
    assert count["pack"]["nbytes"].sum() == pytest.approx(params * (4 + ELEMENT_BYTES[kind] + lost), rel=1e-6)
    plain = play(grad_compression="none").timeline
    assert not plain["name"].str.contains("pack").any()


@pytest.mark.parametrize(
    ("kind", "zero", "added", "unpacked"),
    [
        ("fp8", 0, 0, 1 + 4),
        ("fp8", 1, 0, (1 + 4) / 4),
        ("int8", 0, 1 + 1 / 4, 1 + 4),
        ("int8", 1, 1 + 4 / 4, 0),
        ("1bit", 0, 1 / 8 + 4 / 4 + (1 / 8 + 4) / 4, 1 / 8 + 4),
    ],
)
def test_bytes_of_sums_and_of_unpacking(kind: str, zero: int, added: float, unpacked: float) -> None:
    """Bytes per parameter of 4 ranks, of packed elements of 1 byte or an eighth and gradients of 4. What was exchanged
    is read whole, and a rank's quarter is written: packed, to be gathered and unpacked whole, or with ZeRO as
    gradients. Sums of 1-bit elements also read and write what rounding of the quarter lost, 4 bytes. fp8 is summed on
    its way."""
    result = play(grad_compression=kind, zero=zero)
    rows = result.timeline[(result.timeline["lane"] == "compute") & (result.timeline["rank"] == 0)]
    params = result.to_dict()["params_total"]
    nbytes = {what: rows[rows["name"] == f"dp.{what} grads"]["nbytes"].sum() for what in ("add", "unpack")}
    assert nbytes["add"] == pytest.approx(params * added, rel=1e-6)
    assert nbytes["unpack"] == pytest.approx(params * unpacked, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_wins_over_slow_nics_and_can_lose_over_nvlink(kind: str) -> None:
    """816 MB of gradients all-reduced over NICs of 1.25 GB/s last a second, over NVLink of 300 GB/s milliseconds.

    In buckets of 25 MB these are hidden but for the last bucket, and packing alone takes longer. Hosts hold nothing up,
    and NCCL takes no SMs from kernels.
    """
    gain = {}
    for name, cluster in CLUSTERS.items():
        steps = []
        for what in ("none", kind):
            description = job(**cluster, grad_compression=what, bucket_bytes=25_000_000)
            description["cluster"]["node"] |= FAST_HOSTS
            steps.append(play_undisturbed(load_workload(description)).spans.step_time_s)
        gain[name] = steps[0] / steps[1]
    assert gain["nvlink"] < 1
    assert gain["slow NICs"] > 2


def test_one_bit_is_faster_than_eight_where_the_network_decides() -> None:
    times = [
        play(**CLUSTERS["slow NICs"], grad_compression=kind).spans.step_time_s for kind in ("1bit", "int8", "none")
    ]
    assert times == sorted(times)


def test_one_bit_keeps_what_rounding_lost() -> None:
    """4 bytes per parameter on the sending side, and 4 per parameter of the part that a rank adds up: a quarter."""
    plain, packed = (play(grad_compression=kind).to_dict() for kind in ("none", "1bit"))
    more = packed["memory"]["per_stage"][0]["optimizer"] - plain["memory"]["per_stage"][0]["optimizer"]
    assert more == pytest.approx(plain["params_total"] * (4 + 4 / 4))


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_go_on_beside_the_backward_pass(kind: str) -> None:
    """Buckets are exchanged as they are packed: more than one before the backward pass ends."""
    rows = play(**CLUSTERS["nvlink"], grad_compression=kind).timeline
    backward = rows[(rows["lane"] == "compute") & rows["phase"].isin(["B", "W"])]["end_s"].max()
    first = rows[rows["name"] == ("dp.all_reduce grads" if kind == "fp8" else "dp.all_to_all grads")]
    assert (first["end_s"] < backward).sum() > 1


@pytest.mark.parametrize(
    "section",
    one_in(
        3,
        [
            {"grad_compression": "fp8", "dp": 2, "pp": 2, "zero": 3, "offload": {"optimizer": "cpu"}},
            {"grad_compression": "int8", "dp": 8},
            {"grad_compression": "1bit", "tp": 2, "dp": 2, "pp": 2},
            {"grad_compression": "fp8", "dp": 4, "zero": 2, "offload": {"optimizer": "cpu"}},
            {"grad_compression": "int8", "dp": 4, "zero": 3, "offload": {"activations": "cpu"}},
            {"grad_compression": "int8", "dp": 4, "overlap": {"grad_reduce": False}},
        ],
    ),
)
def test_folding_and_coalescing_change_nothing(section: dict[str, Any]) -> None:
    workload = job(**section)
    workload["cluster"]["node"]["host_memory_bandwidth_Bps"] = 400e9
    short, plain = (run({**workload, "simulation": {"fold": on, "coalesce": on}}) for on in (True, False))
    for result in (short, plain):
        check(result.program, result.spans)
    assert_same(short, plain)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"grad_compression": "1bit", "zero": 1}, ("parallelism.zero", "momentum")),
        ({"grad_compression": "int8", "zero": 2, "hsdp": 2}, ("parallelism.hsdp", "twice")),
        ({"grad_compression": "4bit"}, ("none", "fp8", "int8", "1bit")),
    ],
)
def test_what_compression_does_not_go_with(section: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refusal:
        load_workload(job(**section))
    assert all(word in str(refusal.value) for word in words)


def test_compression_of_nothing_is_said() -> None:
    assert any("saves nothing" in note for note in warnings(load_workload(job(dp=1, grad_compression="fp8"))))

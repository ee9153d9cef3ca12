"""Communication beside kernels inside a pass: `Beside` on the engine, and tensor parallelism that hides so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.costs import Costs, launch
from simulator.engine import simulate
from simulator.engine.invariants import check
from simulator.errors import DeadlockError
from simulator.network.collectives import idle_seconds, plan
from simulator.operations.weights import elements
from simulator.program import Beside, Comm, Compute, ProgramError, comm_of, from_text, kernels_of, to_text
from simulator.step_result import StepResult
from simulator.timeline import Timeline
from tests.support import quick
from tests.support.clusters import HOP_s, NIC_Bps, nic_cluster
from tests.support.exact import compare
from tests.support.jobs import job
from tests.support.quick import ISSUED, ByPurpose

# The engine's part

PROGRAM = """
program name=beside
block 0 name=work
  compute before F fixed seconds=0.5
  beside {n}
    comm "cp.send_recv kv" send_recv nbytes={nbytes} axis=cp purpose=cp
{kernels}
  compute after F fixed seconds=0.25
role all ranks=0-{last}
  lane compute
    step 0F0 block=0 phase=F microbatch=0 stage=0 alloc_bytes=8.0 workspace_bytes=2.0
    step 0B0 block=0 after=0F0 phase=B microbatch=0 stage=0 free_bytes=8.0
group cp {group}
"""


def program(ranks: int, seconds: float, kernels: tuple[float, ...]) -> str:
    lines = "\n".join(f"    compute k{i} F fixed seconds={s}" for i, s in enumerate(kernels))
    group = ",".join(map(str, range(ranks)))
    return PROGRAM.format(n=len(kernels), nbytes=seconds * NIC_Bps, kernels=lines, last=ranks - 1, group=group)


def play(text: str, ranks: int, costs: Costs | None = None, **keys: bool) -> Timeline:
    parsed = from_text(text)
    timeline = simulate(parsed, nic_cluster(ranks), costs or Costs.ideal(), **keys)
    check(parsed, timeline)
    return timeline


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kernels", [(1.0,), (0.5, 0.25, 0.5), (3.0,)])
@pytest.mark.parametrize("short", [True, False])
def test_what_is_beside_takes_the_longer_of_both(ranks: int, kernels: tuple[float, ...], short: bool) -> None:
    """Each pass: half a second, then the longer of a ring exchange of two seconds and its kernels, then a quarter. What
    no kernel hides is exposed."""
    timeline = play(program(ranks, 2.0, kernels), ranks, fold=short, coalesce=short)
    moved = 2.0 + HOP_s
    assert timeline.step_time_s == pytest.approx(2 * (0.75 + max(moved, sum(kernels))), rel=1e-9)
    frame = timeline.frame()
    mine = frame[(frame["rank"] == 0) & (frame["name"] == "cp.send_recv kv")]
    assert list(mine["end_s"] - mine["start_s"]) == pytest.approx([moved] * 2, rel=1e-9)
    assert set(mine["nbytes"]) == {2e9}
    assert len(timeline.ranks) == (1 if short else ranks)
    # What the step holds, it holds once.
    assert timeline.workspace_bytes[timeline.lane == timeline.lane_names.index("compute")].max() == 2.0


def test_a_send_recv_sends_the_message_to_the_next_rank() -> None:
    """Every rank sends and receives one message, whatever their number: as long as one transfer."""
    for ranks in (2, 3, 8):
        shift = plan("send_recv", 1e9, range(ranks), nic_cluster(ranks), Costs.ideal())
        assert shift.sent_bytes == ranks * 1e9
        assert idle_seconds(shift, nic_cluster(ranks), Costs.ideal()) == pytest.approx(HOP_s + 1e9 / NIC_Bps, rel=1e-9)


def test_beside_comes_back_from_text() -> None:
    text = program(3, 2.0, (1.0, 2.0))
    parsed = from_text(text)
    assert from_text(to_text(parsed)) == parsed
    (beside,) = (op for op in parsed.roles[0].lanes["compute"][0].op.ops if isinstance(op, Beside))  # type: ignore[union-attr]
    assert [kernel.name for kernel in beside.kernels] == ["k0", "k1"]


COMM = '    comm "cp.send_recv kv" send_recv nbytes=2000000000.0 axis=cp purpose=cp\n'
KERNEL = "    compute k0 F fixed seconds=1.0\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("beside 1", "beside 4", "not complete"),
        ("beside 1", "beside 0", "beside one kernel or more"),
        (
            'comm "cp.send_recv kv" send_recv',
            'comm "cp.send_recv kv" send peer=1',
            "cannot be in a block; a collective can",
        ),
        (COMM + KERNEL, KERNEL + COMM, "one communication, then"),
    ],
)
def test_what_is_no_beside(old: str, new: str, words: str) -> None:
    text = program(2, 2.0, (1.0,))
    assert old in text
    with pytest.raises(ProgramError, match=words):
        from_text(text.replace(old, new))


def test_a_beside_that_nobody_joins_is_reported() -> None:
    """Rank 1 never exchanges: rank 0 has done its kernels, and waits."""
    text = """
program name=alone
block 0 name=work
  beside 1
    comm kv send_recv nbytes=1.0 axis=cp purpose=cp
    compute k F fixed seconds=1.0
block 1 name=other
  compute k F fixed seconds=1.0
role a ranks=0
  lane compute
    step x block=0
role b ranks=1
  lane compute
    step x block=1
group cp 0,1
"""
    with pytest.raises(DeadlockError, match="rank 0, lane compute, step x: waits for rank 1 to call the other side"):
        simulate(from_text(text), nic_cluster(2), Costs.ideal())


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_what_travels_slows_the_kernels_beside_it(share: float) -> None:
    """Kernels of 3 s beside 2 s of exchange at half speed: 2 s do 1 s of work, so that 2 s are left: 4 s."""
    costs = replace(Costs.ideal(), interference=ByPurpose({"cp": share}))
    timeline = play(program(2, 2.0, (3.0,)), 2, costs)
    moved = 2.0 + HOP_s
    assert timeline.step_time_s == pytest.approx(2 * (0.75 + moved + 3.0 - share * moved), rel=1e-9)


@pytest.mark.parametrize("launch_s", [0.1, 0.4, 2.0])
def test_the_host_launches_what_is_beside_too(launch_s: float) -> None:
    """Six launches a pass. The same with and without coalescing, which works it out ahead of the clock."""
    costs = replace(Costs.ideal(), launch=dict.fromkeys(ISSUED, launch_s) | {"autograd": 0.0})
    text = program(2, 1.0, (0.5, 0.25, 0.5))
    short = play(text, 2, costs)
    plain = play(text, 2, costs, fold=False, coalesce=False)
    assert short.step_time_s == pytest.approx(plain.step_time_s, rel=1e-12)
    assert short.events < plain.events
    if launch_s == 2.0:  # the host decides: the last of 12 launches, and its kernel
        assert short.step_time_s == pytest.approx(12 * launch_s + 0.25, rel=1e-9)


# Tensor parallelism

LARGE: dict[str, Any] = {"layers": 2, "hidden": 4096, "heads": 32, "vocab": 32768}


def make(model_keys: dict[str, Any] | None = None, seq: int = 2048, **parallelism: Any) -> Workload:
    workload = job(training__seq=seq, training__global_batch=2)
    workload["model"] |= {**LARGE, **(model_keys or {})}
    workload["parallelism"] = parallelism
    return quick.load(workload)


def run(on: bool, bandwidth_scale: float = 1.0, **keys: Any) -> StepResult:
    work = make(overlap={"tp": on}, **keys)
    node = work.cluster.node
    slow = replace(node, nvlink=replace(node.nvlink, bandwidth_Bps=node.nvlink.bandwidth_Bps * bandwidth_scale))
    work = work.model_copy(update={"cluster": replace(work.cluster, node=slow)})
    result = quick.play(work)
    check(result.program, result.spans)
    return result


def sent(ops: Iterable[Any], tp: int) -> float:
    share = {
        "all_reduce": 2 * (tp - 1) / tp,
        "all_gather": (tp - 1) / tp,
        "reduce_scatter": (tp - 1) / tp,
        "send_recv": 1.0,
    }
    comms = [comm_of(op) for op in ops if isinstance(op, Comm | Beside)]
    return sum(share[comm.op] * comm.nbytes for comm in comms)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_overlap_moves_the_same_bytes_and_computes_the_same(tp: int, sequence_parallel: bool) -> None:
    """t - 1 exchanges of 1/t are as many bytes as an all-gather or reduce-scatter sends, and t products of 1/t of the
    rows as many FLOPs; memory is the same but for nothing."""
    plain, hidden = (
        models.layer(make(tp=tp, sequence_parallel=sequence_parallel, overlap={"tp": on})) for on in (False, True)
    )
    for name in ("forward", "backward", "input_grad", "weight_grad"):
        a, b = getattr(plain, name), getattr(hidden, name)
        assert sent(b, tp) == pytest.approx(sent(a, tp), rel=1e-12), name
        products = [
            sum(one.kernel.flops for op in ops for one in kernels_of(op) if one.kernel.kind == "matmul")
            for ops in (a, b)
        ]
        assert products[0] == products[1], name
    assert (elements(plain.weights), plain.saved_bytes, plain.workspace_bytes) == (
        elements(hidden.weights),
        hidden.saved_bytes,
        hidden.workspace_bytes,
    )


def test_what_is_chunked_and_what_is_hidden_whole() -> None:
    """With sequence parallelism (t = 4): forward 4 products of a quarter of the rows beside 3 exchanges; backward of a
    column-split layer its gather beside the input gradient, its sum beside the weight gradient. Without: the sum of the
    input gradients alone."""
    part = models.layer(make(tp=4, overlap={"tp": True}))

    def shape(ops: Iterable[Any], name: str) -> list[str]:
        return [
            f"{comm_of(op).op}|{op.kernels[0].name}" if isinstance(op, Beside) else op.name
            for op in ops
            if isinstance(op, Beside | Compute) and any(one.name.startswith(name) for one in kernels_of(op))
        ]

    assert shape(part.forward, "mlp.fc1") == ["send_recv|mlp.fc1"] * 3 + ["mlp.fc1"]
    assert shape(part.forward, "mlp.fc2") == ["mlp.fc2", *["send_recv|mlp.fc2", "mlp.fc2 partial sum"] * 3]
    assert shape(part.backward, "mlp.fc1")[:2] == ["all_gather|mlp.fc1 dgrad", "reduce_scatter|mlp.fc1 wgrad"]
    assert shape(part.backward, "mlp.fc2")[:4] == ["send_recv|mlp.fc2 dgrad"] * 3 + ["mlp.fc2 dgrad"]
    apart = models.layer(make(tp=4, sequence_parallel=False, overlap={"tp": True}))
    assert not any(isinstance(op, Beside) for op in apart.forward)
    assert shape(apart.backward, "mlp.fc1")[:2] == ["mlp.fc1 dgrad", "all_reduce|mlp.fc1 wgrad"]
    assert models.layer(make(overlap={"tp": True})) == models.layer(make())


@pytest.mark.parametrize(("framework", "products", "further"), [("megatron_core", 4, 12 + 6), ("pytorch", 16, 0)])
def test_rings_of_products_are_one_call_of_their_layer(framework: str, products: int, further: int) -> None:
    """Each of a layer's four products goes in a ring of 4; two of the rings have three sums.

    Transformer Engine launches what follows the first product from C++. PyTorch's rings call for each of them.
    """
    workload = make(tp=4, overlap={"tp": True})
    stack = workload.framework.model_copy(update={"name": framework})
    part = models.layer(workload.model_copy(update={"framework": stack}))
    issued = Counter(kind for op in part.forward for one in kernels_of(op) for kind in launch.issued(one))
    assert (issued["forward_matmul"], issued["expert"]) == (products, further)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_it_wins_where_communication_is_long(sequence_parallel: bool) -> None:
    """On NVLinks of a tenth of the bandwidth products hide a part of what was all exposed, and the step is shorter."""
    keys: dict[str, Any] = {"tp": 4, "sequence_parallel": sequence_parallel, "bandwidth_scale": 0.1}
    plain, hidden = run(False, **keys), run(True, **keys)
    assert hidden.spans.step_time_s < 0.97 * plain.spans.step_time_s
    before, after = (result.to_dict()["communication"]["tp"] for result in (plain, hidden))
    assert after["exposed_s"] < 0.9 * before["exposed_s"]
    assert after["exposed_s"] < 0.9 * after["time_s"]
    assert before["exposed_s"] == pytest.approx(before["time_s"], rel=0.01)
    assert after["bytes_per_gpu"] == pytest.approx(before["bytes_per_gpu"], rel=1e-9)


def test_it_loses_where_products_are_too_small_to_cut() -> None:
    """Products of a small model fill the GPU badly already: an eighth of the rows takes nearly as long as all."""
    small = {"hidden": 1024, "heads": 8}
    plain, hidden = run(False, tp=8, seq=1024, model_keys=small), run(True, tp=8, seq=1024, model_keys=small)
    assert hidden.spans.step_time_s > 1.05 * plain.spans.step_time_s


@pytest.mark.parametrize(
    "section",
    [
        {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
        {"tp": 4, "dp": 2, "sequence_parallel": False},
        {"tp": 2, "pp": 2, "cp": 2, "overlap": {"p2p": False, "grad_reduce": False}},
        {"tp": 2, "pp": 2, "schedule": "zb_h1"},
    ],
)
def test_it_plays_exactly(section: dict[str, Any]) -> None:
    overlap = {**section.get("overlap", {}), "tp": True}
    compare({**section, "overlap": overlap, "bucket_bytes": 100_000}, model__layers=2, training__global_batch=8)


def test_the_main_job_stays_a_matter_of_few_events() -> None:
    """A private exchange costs no event of its own where it slows no kernel.

    The job with overlap takes no more events than without.
    """
    plain, hidden = (quick.play_undisturbed(make(tp=8, pp=2, overlap={"tp": on})) for on in (False, True))
    assert hidden.spans.events <= plain.spans.events
    assert hidden.spans.n_rows > plain.spans.n_rows


def test_time_is_cut_up_without_rest() -> None:
    """Shares of the step add up with communication beside kernels, coalesced or not, host-bound or not."""
    for seq in (256, 4096):
        for simulation in ({}, {"coalesce": False}):
            work = job(training__seq=seq, training__global_batch=2)
            work["model"] |= LARGE
            work |= {"parallelism": {"tp": 4, "overlap": {"tp": True}}, "simulation": simulation}
            result = quick.play(load_workload(work))
            answer = result.to_dict()
            step = result.spans.step_time_s
            parts = dict(answer["time_breakdown_s"])
            exposed = parts.pop("exposed")
            assert sum(parts.values()) + sum(exposed.values()) == pytest.approx(step, rel=1e-9)
            assert min(*parts.values(), *exposed.values()) >= -1e-9 * step
            assert sum(part["seconds"] for part in answer["critical_path"]) == pytest.approx(step, rel=1e-9)
            assert exposed["tp"] <= answer["communication"]["tp"]["time_s"] * (1 + 1e-9)

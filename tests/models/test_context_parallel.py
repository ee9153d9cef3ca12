"""Context parallelism: who computes what, what travels, what is held, and that it plays exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from simulator import models
from simulator.config import Workload, load_workload
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.models import Seat
from simulator.operations.shapes import ANY_SEAT
from simulator.operations.weights import elements
from simulator.program import Attention, Beside, Comm, comm_of, kernels_of
from simulator.program.kernels import causal_pairs
from tests.support import quick
from tests.support.exact import compare
from tests.support.grids import every_pair, grid
from tests.support.jobs import job

SEQ, HEADS, KV_HEADS, DIM = 512, 16, 4, 32
HIDDEN = HEADS * DIM
METHODS: list[dict[str, Any]] = [
    {"cp_method": "ring"},
    {"cp_method": "ring", "cp_layout": "contiguous"},
    {"cp_method": "ulysses"},
]


def make(seq: int = SEQ, *, sizes: dict[str, Any] | None = None, **parallelism: Any) -> Workload:
    workload = job()
    workload["model"] |= {"hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS, "position": "rope", **(sizes or {})}
    workload["training"] |= {"seq": seq, "micro_batch": 2}
    workload["parallelism"] = parallelism
    return quick.load(workload)


def kernels(ops: Iterable[Any]) -> list[Attention]:
    return [one.kernel for op in ops for one in kernels_of(op) if isinstance(one.kernel, Attention)]


def sent(ops: Iterable[Any], axis: str = "cp") -> float:
    """Bytes that a rank hands over: all of it is sent in a send_recv, (n - 1) / n in an all-to-all of n ranks."""
    comms = [comm_of(op) for op in ops if isinstance(op, Comm | Beside)]
    assert {comm.op for comm in comms if comm.axis == axis} <= {"send_recv", "all_to_all"}
    return sum(comm.nbytes for comm in comms if comm.axis == axis)


def attention_flops(workload: Workload, seat: Seat = ANY_SEAT) -> float:
    part = models.layer(workload, seat=seat)
    return sum(kernel.flops for kernel in kernels((*part.forward, *part.backward)))


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_contiguous_chunks_load_the_last_rank_and_zigzag_none(cp: int) -> None:
    """Of s^2 / 2 pairs rank r of a contiguous split has (2 r + 1) / 2 cp^2 s^2: the last (2 cp - 1) / cp times the
    mean. Two chunks of 2 cp, one early and one late, give every rank that. All ranks together do the work of one."""
    whole = attention_flops(make())
    work = make(cp=cp, cp_layout="contiguous")
    assert [models.representative_seat(work, Seat(cp=rank)).cp for rank in range(cp)] == list(range(cp))
    each = [attention_flops(work, Seat(cp=rank)) for rank in range(cp)]
    assert sum(each) == pytest.approx(whole, rel=1e-12)
    assert max(each) / (sum(each) / cp) == pytest.approx((2 * cp - 1) / cp, rel=1e-12)
    for balanced in (make(cp=cp), make(cp=cp, cp_method="ulysses")):
        assert {models.representative_seat(balanced, Seat(cp=rank)) for rank in range(cp)} == {Seat()}
        assert attention_flops(balanced) == pytest.approx(whole / cp, rel=1e-12)


@pytest.mark.parametrize("cp", [2, 4])
def test_the_step_is_as_long_as_the_slowest_rank(cp: int) -> None:
    """Attention alone in time: a long sequence, on links that do not matter, whose transfers take nothing from kernels.

    The last rank's kernels of a contiguous split take (2 cp - 1) / cp times the mean of all ranks. A zigzag split's
    take that mean, within 1 %.
    """

    def seconds(**keys: Any) -> list[float]:
        result = quick.play_undisturbed(make(32768, cp=cp, **keys))
        frame = result.timeline
        of_kind = frame[frame["kind"] == "attention"]
        return list((of_kind["end_s"] - of_kind["start_s"]).groupby(of_kind["rank"]).sum())

    uneven, even = seconds(cp_layout="contiguous"), seconds()
    mean = sum(uneven) / cp
    assert len(uneven) == cp
    assert max(uneven) / mean == pytest.approx((2 * cp - 1) / cp, rel=0.03)
    assert max(even) / (sum(even) / len(even)) == pytest.approx(1, abs=0.01)
    assert max(even) < 0.75 * max(uneven)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_ring_bytes(cp: int, tp: int, layout: str) -> None:
    """Keys and values of b s / cp tokens (2 elements of KV heads x width each) make cp - 1 hops forward; backward they
    make them again, and their gradients too."""
    work = make(cp=cp, tp=tp, cp_layout=layout)
    kv = 2 * 2 * 2 * (SEQ // cp) * (KV_HEADS // tp) * DIM
    for rank in range(cp):
        part = models.layer(work, seat=Seat(cp=rank))
        assert sent(part.forward) == (cp - 1) * kv
        assert sent(part.backward) == 2 * (cp - 1) * kv


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_ulysses_bytes(cp: int, tp: int) -> None:
    """Queries, keys, values and context of b s / cp tokens go through an all-to-all each, and their gradients: of every
    buffer (cp - 1) / cp is sent. KV heads fewer than cp are sent to several ranks: as many bytes as cp heads have."""
    work = make(cp=cp, tp=tp, cp_method="ulysses")
    part = models.layer(work)
    tokens = 2 * SEQ // cp
    buffers = 2 * tokens * DIM * (2 * HEADS // tp + 2 * max(KV_HEADS // tp, cp))
    assert sent(part.forward) == sent(part.backward) == buffers
    (kernel,) = kernels(part.forward)
    assert (kernel.q_len, kernel.heads, kernel.kv_heads) == (SEQ, HEADS // tp // cp, max(1, KV_HEADS // tp // cp))
    # And as a user reads it: 8 layers, 4 micro-batches, forward and backward.
    result = quick.play(work)
    sent_bytes = result.to_dict()["communication"]["cp"]["bytes_per_gpu"]
    assert sent_bytes == pytest.approx(2 * 8 * work.microbatches * buffers * (cp - 1) / cp, rel=1e-9)


@pytest.mark.parametrize("keys", METHODS)
def test_the_rest_of_the_model_works_on_its_share_of_the_tokens(keys: dict[str, Any]) -> None:
    """Everything but attention: FLOPs of products and saved bytes of norms fall by cp; parameters do not, and are
    reduced over dp x cp. Model FLOPs count a sequence once, and so do all ranks together, attention included."""
    one, work = make(), make(cp=4, **keys)
    whole, part = models.layer(one), models.layer(work)

    def products(ops: Iterable[Any]) -> float:
        return sum(one.kernel.flops for op in ops for one in kernels_of(op) if one.kernel.kind == "matmul")

    assert products(part.forward) == products(whole.forward) / 4
    saved, before = ({t.name: t.nbytes for t in p.saved} for p in (part, whole))
    assert all(saved[name] == before[name] / 4 for name in ("input", "attn.normed", "mlp.pre", "attn.context"))
    assert elements(part.weights) == elements(whole.weights)
    assert elements(models.embedding(work).weights) == elements(models.embedding(one).weights)
    assert work.parallelism.replicas("dp") == 4
    assert models.model_flops_per_step(work) == models.model_flops_per_step(one)
    assert models.hardware_flops_per_step(work) == pytest.approx(models.hardware_flops_per_step(one), rel=1e-12)


@pytest.mark.parametrize("cp", [2, 4])
def test_activations_fall_by_cp_and_the_ring_has_its_buffers(cp: int) -> None:
    """Saved per rank 1 / cp; what the ring holds while it runs is two buffers of keys and values, and a partial
    context."""
    whole, part = models.layer(make()), models.layer(make(cp=cp))
    assert part.saved_bytes == whole.saved_bytes / cp
    token = 2 * 2 * (SEQ // cp)  # bytes of one column
    assert whole.forward_bytes == 0
    assert part.forward_bytes == token * DIM * (2 * 2 * KV_HEADS + HEADS)


def test_ring_attention_hides_its_exchanges() -> None:
    """Long sequences compute longer than they travel, so that nothing of cp is exposed; all-to-alls are in line."""
    ring = quick.play(make(16384, cp=4)).to_dict()["communication"]["cp"]
    ulysses = quick.play(make(16384, cp=4, cp_method="ulysses")).to_dict()["communication"]["cp"]
    assert ring["time_s"] > 0
    assert ring["exposed_s"] < 0.02 * ring["time_s"]
    assert ulysses["exposed_s"] == pytest.approx(ulysses["time_s"], rel=1e-9)


@pytest.mark.parametrize("keys", METHODS)
def test_recomputed_attention_communicates_again(keys: dict[str, Any]) -> None:
    """Selective recomputation runs the core attention again, its exchanges included."""
    work = make(cp=4, **keys)
    again = models.layer(work, recompute="selective")
    assert sent(again.recompute) == sent(again.forward)
    assert {one.phase for op in again.recompute for one in kernels_of(op)} == {"R"}


@pytest.mark.parametrize(("keys", "tp"), grid(METHODS, [1, 2], every=2))
def test_context_parallelism_plays_exactly(keys: dict[str, Any], tp: int) -> None:
    """Folding and coalescing change nothing, with a pipeline and replicas around."""
    section = {"cp": 4, "tp": tp, "pp": 2, "dp": 2 // tp, "zero": 1, **keys}
    compare(section, model__layers=2, training__global_batch=4)


@pytest.mark.parametrize("speeds", [{"cp": 0.5}, {"tp": 0.8, "cp": 0.6, "dp": 0.9}])
def test_exchanges_slow_the_kernels_beside_them(speeds: dict[str, float]) -> None:
    """While keys travel, kernels run at the share that the profile gives: the step grows, and stays possible."""
    work = make(4096, cp=2, tp=2)
    calm, slowed = quick.play(work, {}), quick.play(work, speeds)
    check(slowed.program, slowed.spans)
    assert slowed.spans.step_time_s > calm.spans.step_time_s * 1.001


def test_what_a_ring_refuses() -> None:
    """Merging partial results needs flash attention's log-sum-exp; windows are not known (TransformerEngine)."""
    for sizes, key in (({"attention": "unfused"}, "model.attention"), ({"sliding_window": 64}, "model.sliding_window")):
        with pytest.raises(InputError) as caught:
            make(cp=2, sizes=sizes)
        assert key in str(caught.value)
        assert "cp_method: ulysses" in str(caught.value)
        assert make(cp=2, sizes=sizes, cp_method="ulysses")
    assert make(cp=2, sizes={"sliding_window": SEQ})  # no window at all
    with pytest.raises(InputError, match="cp_layout"):
        make(cp=2, cp_method="ulysses", cp_layout="contiguous")


# Pairs and windows


@every_pair(
    {
        "q_len": [1, 3, 8],
        "kv_len": [2, 8],
        "offset": [-4, 0, 2, 9],
        "window": [0, 1, 3, 8, 50],
    }
)
def test_pairs_are_the_area_under_the_mask(q_len: int, kv_len: int, offset: int, window: int) -> None:
    """Counted on a grid 64 times as fine: a point (q, k) is seen if k <= q + offset, and k > q + offset - window."""
    fine = 64
    counted = 0
    for i in range(q_len * fine):
        q = (i + 0.5) / fine + offset
        low = max(0.0, q - window) if window else 0.0
        high = min(float(kv_len), q)
        counted += max(0, high - low)
    pairs = causal_pairs(q_len, kv_len, offset, window)
    assert pairs == pytest.approx(counted / fine, abs=1e-3 * q_len * kv_len)
    if q_len == kv_len and offset == 0 and window >= kv_len:
        assert pairs == q_len**2 / 2


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("window", [64, 511, 512, 4096, None])
def test_windows_count_at_their_width(window: int | None, attention: str) -> None:
    """R41: full attention of a window w is s w pairs, under the mask s w - w^2 / 2; flash computes just these, unfused
    products all s^2. A window of the sequence's length or more is none."""
    work = make(sizes={"sliding_window": window, "attention": attention})
    open_ = make(sizes={"attention": attention})
    w = min(window or SEQ, SEQ)
    pairs = 3 * 4 * 8 * HEADS * DIM * 16  # FLOPs per pair of 8 layers and 16 sequences, forward and backward
    fewer = models.model_flops_per_step(open_) - models.model_flops_per_step(work)
    assert fewer == pytest.approx(pairs * SEQ * (SEQ - w), rel=1e-9)
    fewer = models.model_flops_per_step_causal(open_) - models.model_flops_per_step_causal(work)
    assert fewer == pytest.approx(pairs * (SEQ**2 / 2 - (SEQ * w - w**2 / 2)), rel=1e-9)
    fewer = models.hardware_flops_per_step(open_) - models.hardware_flops_per_step(work)
    computed = pairs * 7 / 6 * (SEQ**2 / 2 - (SEQ * w - w**2 / 2)) if attention == "flash" else 0
    assert fewer == pytest.approx(computed, rel=1e-9)
    assert models.layer(work).saved_bytes == models.layer(open_).saved_bytes
    if attention == "flash" and w < SEQ // 2:
        assert quick.play(make(8192, sizes={"sliding_window": w})).spans.step_time_s < (
            0.9 * quick.play(make(8192)).spans.step_time_s
        )


def test_a_ring_of_one_rank_per_node_takes_the_slower_link() -> None:
    """16 ranks on 2 nodes: every hop inside is an NVLink's, and the two across are a NIC's, which sets the pace of all:
    the exchange lasts as long as the message over one NIC, whatever the NVLinks could."""
    result = quick.play(load_workload({**work_across(), "cluster": quick.CLUSTER}))
    frame = result.timeline
    shifts = frame[frame["kind"] == "send_recv"]
    seconds = (shifts["end_s"] - shifts["start_s"]).min()
    assert seconds > float(shifts["nbytes"].min()) / 25e9


def work_across() -> dict[str, Any]:
    workload = job(model__layers=2, training__seq=65536, training__global_batch=1)
    workload["model"] |= {"hidden": HIDDEN, "heads": HEADS, "position": "rope"}
    workload["parallelism"] = {"cp": 16}
    return workload

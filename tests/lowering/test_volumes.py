"""How many bytes each parallelism moves, and how long that takes: closed forms held against whole simulated steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simulator.models import rank_parts
from simulator.operations.weights import elements
from simulator.program import Batch, Comm
from simulator.step_result import StepResult
from tests.support import quick
from tests.support.grids import every_pair, grid
from tests.support.jobs import job
from tests.support.unadvised import without_advice  # noqa: F401

pytestmark = pytest.mark.usefixtures("without_advice")

SEQ, HIDDEN, LAYERS, VOCAB = 128, 256, 8, 1024
NO_OVERLAP = {"grad_reduce": False, "p2p": False, "param_gather": False}


def play(model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **parallelism: Any) -> StepResult:
    """The tiny job of `tests.support.jobs` with these keys; each distinct one is simulated once."""
    workload = job()
    workload["model"] |= model or {}
    workload["training"] |= training or {}
    workload["parallelism"] |= parallelism
    return quick.play_once(quick.load(workload))


def sent(result: StepResult, kind: str) -> float:
    """Bytes per GPU, as a user reads them."""
    return float(result.to_dict()["communication"][kind]["bytes_per_gpu"])


def rows(result: StepResult, rank: int, start: str) -> list[tuple[float, float]]:
    """(bytes, seconds) of rows of simulated ``rank`` whose name starts so."""
    frame = result.timeline
    mine = frame[(frame["rank"] == rank) & frame["name"].str.startswith(start)]
    return list(zip(mine["nbytes"], mine["end_s"] - mine["start_s"], strict=True))


# Pipeline


@every_pair(
    {
        "tp, keys, share": [
            (1, {}, 1),
            (2, {"sequence_parallel": False}, 1),
            (4, {"sequence_parallel": False}, 1),
            (2, {"sequence_parallel": True}, 2),
            (4, {"sequence_parallel": True}, 4),
            (4, {"sequence_parallel": False, "scatter_gather_p2p": True}, 4),
        ],
        "micro_batch, precision, element": [(1, "bf16", 2), (2, "fp32", 4)],
        "p2p": [True, False],
    }
)
def test_a_pipeline_edge_carries_an_activation_per_direction(
    tp: int, keys: dict[str, Any], share: int, micro_batch: int, precision: str, element: int, p2p: bool
) -> None:
    """b s h elements per rank, micro-batch and direction; b s h / t with sequence parallelism (each rank has its own
    rows) or scatter/gather (each sends its part). Of p ranks, the first sends forward only, the last backward only:
    2 (p - 1) / p m of them per GPU on average."""
    pp = 4 if tp < 4 else 2
    result = play(
        training={"micro_batch": micro_batch, "global_batch": 8, "precision": precision},
        tp=tp,
        pp=pp,
        overlap={"p2p": p2p},
        **keys,
    )
    edge = micro_batch * SEQ * HIDDEN * element / share
    for stage, role in enumerate(result.program.roles):
        comms = [
            comm
            for _, _, step in role.steps()
            if isinstance(step.op, Comm | Batch)
            for comm in ((step.op,) if isinstance(step.op, Comm) else step.op.comms)
            if comm.op == "send"
        ]
        m = 8 // micro_batch
        assert {comm.nbytes for comm in comms} == {edge}
        forward = sum(comm.name == "send_fwd" for comm in comms)
        assert (forward, len(comms) - forward) == (m if stage < pp - 1 else 0, m if stage > 0 else 0)
    embedding = 2 / pp * 4 * VOCAB * HIDDEN / tp  # first and last stage: an all-reduce of two sends its message
    assert sent(result, "pp") == pytest.approx(2 * (pp - 1) / pp * m * edge + embedding, rel=1e-9)


def test_what_a_gpu_hands_on_is_sent_once() -> None:
    """tp 4 and pp 4 fill two nodes, and the edge from stage 1 to 2 joins GPUs on different rails: the sender hands its
    activation over NVLink to the GPU beside the NIC (NCCL's PXN). It is sent once for all that: 2 (p - 1) / p m b s h
    per GPU, and the embedding gradients of first and last stage."""
    result = play(training={"global_batch": 8}, tp=4, pp=4, sequence_parallel=False)
    embedding = 2 / 4 * 4 * VOCAB * HIDDEN / 4
    assert sent(result, "pp") == pytest.approx(2 * 3 / 4 * 8 * SEQ * HIDDEN * 2 + embedding, rel=1e-9)


@pytest.mark.parametrize("v", [2, 4])
def test_interleaving_sends_v_times_as_much(v: int) -> None:
    """Every chunk boundary is an edge: v p - 1 of them instead of p - 1, in both directions, over p ranks."""

    def edges(result: StepResult) -> float:
        ranks = result.spans.ranks
        return sum(size for rank in ranks for size, _ in rows(result, rank, "send")) / len(ranks)

    plain, chunked = play(pp=2), play(pp=2, vpp=v, schedule="interleaved")
    assert edges(chunked) / edges(plain) == pytest.approx((2 * v - 1) / (2 - 1), rel=1e-12)


# Data parallelism


def alpha_beta(result: StepResult, algorithm: str, n: int, op: str, size: float) -> float:
    """Seconds of a collective of ``n`` GPUs of a node on an idle network: latency (links and software) of its hops,
    plus bytes over bandwidth, from the profile's constants alone. See `simulator.network.timing.timed`."""
    assert algorithm == "ring"
    link = result.cluster.spec.kinds[0].nvlink
    transport = next(iter(result.profiles.values())).transports["nvlink"]
    steps = 2 * (n - 1) if op == "all_reduce" else n - 1
    times = []
    for protocol in transport.protocols.values():
        alpha = protocol.base_latency_s + steps * (link.latency_s + protocol.hop_latency_s)
        line = steps / n / (link.bandwidth_Bps * transport.efficiency * protocol.bandwidth_fraction)
        flow = steps / n * size  # what every link of the ring carries
        if protocol.most_bytes is not None and flow > protocol.most_bytes:
            continue
        filling = 1 + math.sqrt(protocol.half_bytes / flow) if size else 1.0
        times.append(alpha + size * (line * filling + 1 / n / transport.copy_Bps))
    return min(times)


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("layers", [2, 8])
def test_a_gradient_all_reduce_sends_and_lasts_as_its_closed_forms_say(dp: int, layers: int) -> None:
    """A ring sends 2 (n-1)/n of the message per GPU, and with nothing beside it lasts alpha + beta times size. The
    message is 4 bytes per parameter."""
    result = play(
        {"layers": layers}, {"global_batch": 8}, dp=dp, overlap=NO_OVERLAP, collective_algorithm="ring", zero=0
    )
    params = sum(elements(part.weights) for part in rank_parts(result.workload, 0))
    ((nbytes, seconds),) = rows(result, 0, "dp.all_reduce grads")
    assert nbytes == pytest.approx(2 * (dp - 1) / dp * 4 * params, rel=1e-12)
    assert seconds == pytest.approx(alpha_beta(result, "ring", dp, "all_reduce", 4 * params), rel=1e-9)
    # Nothing else is sent over dp, and nothing hides it.
    answer = result.to_dict()["communication"]["dp"]
    assert answer["bytes_per_gpu"] == pytest.approx(nbytes, rel=1e-12)
    assert answer["time_s"] == pytest.approx(seconds, rel=1e-9)
    assert answer["exposed_s"] == pytest.approx(seconds, rel=1e-9)
    assert answer["algorithm"] == "ring"


@pytest.mark.parametrize("bucket_bytes", [1, 500_000, 10**15])
def test_buckets_move_the_same_bytes(bucket_bytes: int) -> None:
    """Overlapped or not, in many buckets or one: the wire carries 2 (n-1)/n of all gradients."""
    result = play(dp=4, bucket_bytes=bucket_bytes)
    whole = play(dp=4, overlap=NO_OVERLAP)
    assert sent(result, "dp") == pytest.approx(sent(whole, "dp"), rel=1e-12)
    # One bucket is ready when all is. Too many take longer than they hide.
    if bucket_bytes == 10**15:
        assert result.spans.step_time_s == pytest.approx(whole.spans.step_time_s, rel=1e-9)
    elif bucket_bytes > 1:
        # Some have mostly gone by then. What they take from kernels meanwhile is no matter of buckets.
        some, all_at_once = (quick.play_undisturbed(one.workload).spans.step_time_s for one in (result, whole))
        assert some < all_at_once


@pytest.mark.parametrize("dp", [2, 4, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_zero_1_moves_as_much_with_parameters_of_two_bytes_for_four(dp: int, overlap: bool) -> None:
    """An all-reduce is a reduce-scatter and an all-gather of (n-1)/n each; ZeRO-1 scatters fp32 gradients (4 bytes) and
    gathers bf16 parameters (2 bytes): 6 in place of 8 (n-1)/n bytes per parameter (arXiv 1910.02054, section 7.2.1)."""
    on = {"grad_reduce": overlap, "param_gather": overlap}
    training = {"grad_clip": None, "global_batch": 8}
    result = play(training=training, dp=dp, zero=1, overlap=on, collective_algorithm="ring")
    params = sum(elements(part.weights) for part in rank_parts(result.workload, 0))
    assert sent(result, "dp") == pytest.approx(6 * (dp - 1) / dp * params, rel=1e-12)
    plain = play(training=training, dp=dp, zero=0, overlap=on, collective_algorithm="ring")
    assert sent(plain, "dp") == pytest.approx(8 * (dp - 1) / dp * params, rel=1e-12)
    if not overlap:
        for op, size in (("reduce_scatter grads", 4 * params), ("all_gather params", 2 * params)):
            ((_, seconds),) = rows(result, 0, f"dp.{op}")
            assert seconds == pytest.approx(alpha_beta(result, "ring", dp, op.split()[0], size), rel=1e-9)


# Tensor parallelism


def per_layer(tp: int, recompute: str, sequence_parallel: bool, micro_batch: int) -> float:
    """tp bytes per GPU, layer and micro-batch: the difference of two models, so that embedding, head and optimizer, the
    same in both, fall out. Micro-batches likewise: what happens once a step (replicated gradients) falls out."""

    def total(layers: int, m: int) -> float:
        training = {"micro_batch": micro_batch, "global_batch": m * micro_batch, "recompute": recompute}
        keys: dict[str, Any] = {"tp": tp, "sequence_parallel": sequence_parallel, "collective_algorithm": "ring"}
        return sent(play({"layers": layers}, training, **keys), "tp")

    def of_layer(m: int) -> float:
        return (total(4, m) - total(2, m)) / 2

    return of_layer(2) - of_layer(1)


@pytest.mark.parametrize(
    ("tp", "micro_batch", "again"), grid([2, 4, 8], [1, 2], [("none", 4), ("selective", 4), ("full", 6)], every=9)
)
def test_a_tensor_parallel_layer_moves_eight_bsh(tp: int, micro_batch: int, again: tuple[str, int]) -> None:
    """Two all-reduces of b s h elements forward and two backward, two more where the forward runs again (arXiv
    1909.08053, section 3; 2104.04473, section 3.2). A ring all-reduce of x sends 2 (t-1)/t x: four are 8 (t-1)/t b s h,
    8 b s h for large t. Elements have 2 bytes."""
    recompute, all_reduces = again
    bsh = micro_batch * SEQ * HIDDEN
    moved = per_layer(tp, recompute, False, micro_batch) / 2
    assert moved == pytest.approx(all_reduces * 2 * (tp - 1) / tp * bsh, rel=1e-9)
    if recompute == "none":
        assert moved == pytest.approx(8 * bsh, rel=1 / tp + 1e-9)


@pytest.mark.parametrize(("tp", "recompute"), grid([2, 4, 8], ["none", "full"], every=2))
def test_sequence_parallelism_splits_every_all_reduce_in_two(tp: int, recompute: str) -> None:
    """Each all-reduce becomes an all-gather and a reduce-scatter of the same message, (t-1)/t of it each (arXiv
    2205.05198, section 4.2.2); and the inputs of the two column-split products, kept as shards, are gathered once more
    in the backward pass: 10 passes of (t-1)/t b s h instead of 8, 14 instead of 12 under full recomputation."""
    passes = {"none": 8, "full": 12}[recompute] + 2
    moved = per_layer(tp, recompute, True, 1) / 2
    assert moved == pytest.approx(passes * (tp - 1) / tp * SEQ * HIDDEN, rel=1e-9)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [2, 8])
def test_collectives_of_a_layer_by_name(tp: int, sequence_parallel: bool) -> None:
    """Per layer and micro-batch: four all-reduces; or, with sequence parallelism, six all-gathers (two forward, two of
    gradients, two of inputs once more) and four reduce-scatters, all of b s h elements; each lasts its closed form."""
    result = play(
        {"layers": 2}, {"global_batch": 1}, tp=tp, sequence_parallel=sequence_parallel, collective_algorithm="ring"
    )
    frame = result.timeline
    of_layers = frame[(frame["lane"] == "tp") & frame["name"].str.contains(r" (?:attn|mlp)$")]
    counts = {str(kind): len(group) for kind, group in of_layers.groupby("kind")}
    assert counts == ({"all_gather": 12, "reduce_scatter": 8} if sequence_parallel else {"all_reduce": 8})
    size = 2 * SEQ * HIDDEN
    for kind, group in of_layers.groupby("kind"):
        seconds = (group["end_s"] - group["start_s"]).to_numpy()
        expected = alpha_beta(result, "ring", tp, str(kind), size)
        assert np.abs(seconds - expected).max() <= 1e-9 * result.spans.step_time_s


@pytest.mark.parametrize("tp", [2, 4])
def test_a_split_vocabulary_reduces_three_numbers_per_token(tp: int) -> None:
    """Maximum, target logit and sum of exponentials, fp32, for b s tokens (arXiv 1909.08053, section 3); forward the
    embedding's sum of b s h elements, backward that of the head's input gradient, as large. None of it with
    ``vocab_parallel: false``."""
    keys: dict[str, Any] = {"tp": tp, "sequence_parallel": False}
    split, whole = (
        play({"layers": 2}, {"global_batch": 2}, collective_algorithm="ring", vocab_parallel=on, **keys)
        for on in (True, False)
    )
    per_microbatch = 2 * (tp - 1) / tp * (3 * 4 * SEQ + 2 * 2 * SEQ * HIDDEN)
    assert sent(split, "tp") - sent(whole, "tp") == pytest.approx(2 * per_microbatch, rel=1e-9)


# Nothing where there is nothing


@pytest.mark.parametrize(
    ("keys", "silent"),
    [({}, ("tp", "pp", "dp")), ({"tp": 2}, ("pp", "dp")), ({"pp": 2}, ("tp", "dp")), ({"dp": 2}, ("tp", "pp"))],
)
def test_a_parallelism_of_one_moves_nothing(keys: dict[str, Any], silent: tuple[str, ...]) -> None:
    communication = play(**keys).to_dict()["communication"]
    for kind in ("cp", "ep", *silent):
        nothing = {"bytes_per_gpu": 0.0, "time_s": 0.0, "exposed_s": 0.0, "algorithm": "none", "links": []}
        assert communication[kind] == nothing
    for kind in keys:
        assert communication[kind]["bytes_per_gpu"] > 0
        assert communication[kind]["time_s"] >= communication[kind]["exposed_s"] > 0

"""Who sits where, who talks to whom, and what is reduced when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Any

import pytest

from simulator.config import load_workload
from simulator.lowering import build_program, layout
from simulator.lowering.buckets import Mark, buckets, gradients_complete, weights_used
from simulator.models import Part, rank_parts
from simulator.operations.weights import Weight, elements
from simulator.program import Block, Comm, Compute, Fixed, Matmul, Role, Step
from tests.support.jobs import job


def workload(**changes: Any) -> Any:
    return load_workload(job(**{f"parallelism__{key}": value for key, value in changes.items()}))


# Layout


def test_megatrons_order_by_hand() -> None:
    """tp 2, dp 2, pp 2, order tp-dp-pp: rank = tp + 2 dp + 4 pp. So neighbours are tensor-parallel, ranks two apart
    replicas, ranks four apart a pipeline; a replica (dp 0) is ranks 0, 1 of both stages."""
    placed = layout(workload(tp=2, dp=2, pp=2))
    assert placed.pipeline_rank == (0, 0, 0, 0, 1, 1, 1, 1)
    assert placed.groups == {
        "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "dp": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "pp": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "mp": ((0, 1, 4, 5), (2, 3, 6, 7)),
        "embd": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }


def test_a_workload_has_one_layout_and_another_its_own() -> None:
    """What is kept goes by the workload itself; an equal one gets an equal layout, one with another tp another."""
    one, equal, other = workload(tp=2, dp=2), workload(tp=2, dp=2), workload(tp=4)
    kept = layout(one)
    assert layout(one) is kept
    assert layout(equal) == kept
    assert layout(other).groups["tp"] == ((0, 1, 2, 3),)


def test_pipelines_before_replicas_by_hand() -> None:
    """The same with order tp-pp-dp: rank = tp + 2 pp + 4 dp: stages sit side by side, replicas far apart."""
    placed = layout(workload(tp=2, dp=2, pp=2, rank_order="tp-pp-dp"))
    assert placed.pipeline_rank == (0, 0, 1, 1, 0, 0, 1, 1)
    assert placed.groups["pp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert placed.groups["dp"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert placed.groups["mp"] == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_megatrons_own_example() -> None:
    """The example in Megatron-LM's ``initialize_model_parallel``: 16 GPUs, tensor 2, pipeline 4, so data 2: groups as
    its docstring lists them."""
    placed = layout(workload(tp=2, pp=4, dp=2))
    assert placed.groups["dp"] == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert placed.groups["tp"] == tuple((r, r + 1) for r in range(0, 16, 2))
    assert placed.groups["pp"] == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert placed.groups["embd"] == ((0, 12), (1, 13), (2, 14), (3, 15))


@pytest.mark.parametrize("order", ["-".join(axes) for axes in permutations(("tp", "dp", "pp"))])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1), (1, 4, 2), (2, 1, 4), (1, 1, 1), (8, 2, 4)])
def test_groups_vary_one_coordinate(order: str, sizes: tuple[int, int, int]) -> None:
    """A rank is a number with digits in mixed base, the first axis of the order the lowest digit; a group of an axis
    holds the ranks that differ in that digit alone, in ascending order of it."""
    size = dict(zip(("tp", "dp", "pp"), sizes, strict=True))
    placed = layout(workload(**size, rank_order=order))
    axes = order.split("-")
    stride = {axis: math.prod(size[below] for below in axes[:at]) for at, axis in enumerate(axes)}
    n = math.prod(sizes)

    def digit(rank: int, axis: str) -> int:
        return rank // stride[axis] % size[axis]

    assert placed.pipeline_rank == tuple(digit(rank, "pp") for rank in range(n))
    for axis in axes:
        if size[axis] == 1:
            assert axis not in placed.groups
            continue
        expected = {
            tuple(rank + i * stride[axis] for i in range(size[axis])) for rank in range(n) if digit(rank, axis) == 0
        }
        assert set(placed.groups[axis]) == expected
        assert len(placed.groups[axis]) == len(expected)
    if size["tp"] * size["pp"] > 1:
        replicas = [{rank for rank in range(n) if digit(rank, "dp") == i} for i in range(size["dp"])]
        assert sorted(map(sorted, placed.groups["mp"])) == sorted(map(sorted, replicas))


@pytest.mark.parametrize(("tied", "pp", "grouped"), [(True, 1, False), (True, 2, True), (False, 2, False)])
def test_embedding_groups_join_copies_of_one_table(tied: bool, pp: int, grouped: bool) -> None:
    """First and last stage hold the table twice where it is tied and they are two."""
    description = job(parallelism__pp=pp)
    description["model"]["tied_embeddings"] = tied
    assert ("embd" in layout(load_workload(description)).groups) == grouped


@pytest.mark.parametrize("pp", [2, 4])
def test_only_the_ends_of_a_pipeline_add_up_embedding_gradients(pp: int) -> None:
    """vocab x hidden fp32 gradients, split over tp."""
    program = build_program(workload(tp=2, pp=pp, dp=2))
    for stage, role in enumerate(program.roles):
        sums = [step.op for _, _, step in role.steps() if step.label == "embedding grads"]
        if stage in (0, pp - 1):
            (comm,) = sums
            assert isinstance(comm, Comm)
            assert (comm.axis, comm.op, comm.nbytes) == ("embd", "all_reduce", 4 * 1024 * 256 / 2)
        else:
            assert sums == []


# Gradients


def product(name: str, m: int, n: int, *, phase: str = "W", role: str = "wgrad", batch: int = 1) -> Compute:
    return Compute(name, Matmul(m, n, 10, batch=batch, role=role), phase)


def other(name: str, phase: str = "B") -> Compute:
    return Compute(name, Fixed(1.0), phase)


def weight(name: str, *shape: int, tied_to: str = "") -> Weight:
    """The weight of the product ``name``, or of no product where it has one dimension."""
    gradient_product = name if len(shape) > 1 else ""
    return Weight(name, shape, shape, "bf16", gradient_product=gradient_product, tied_to=tied_to)


def counts(marks: list[Mark]) -> list[tuple[int, list[str]]]:
    return [(mark.ops, [weight.name for weight in mark.weights]) for mark in marks]


def part(*backward: Compute, weights: Sequence[Weight], forward: int = 1, recompute: int = 0) -> Part:
    return Part(
        name="part",
        forward=tuple(other(f"f{i}", "F") for i in range(forward)),
        recompute=tuple(other(f"r{i}", "R") for i in range(recompute)),
        input_grad=(),
        weight_grad=(),
        backward=backward,
        weights=tuple(weights),
        saved=(),
        recomputed=(),
        grad_bytes=0.0,
        held_for_weights=(),
        weight_grad_bytes=0.0,
    )


#: In backward order, products of 6, 4, 10 and 2 parameters, the second one's gradient added to a buffer; a norm's 3
#: come from no product.
BACKWARD = (
    *(other("x1"), product("a", 2, 3)),
    *(other("x2"), product("b", 2, 2), other("add", "W")),
    *(other("x3"), product("c", 5, 2)),
    *(other("x4"), product("d", 1, 2)),
    *(other("x5"), other("norm", "W")),
)
WEIGHTS = (weight("norm", 3), weight("d", 1, 2), weight("c", 5, 2), weight("b", 2, 2), weight("a", 2, 3))
MARKS = gradients_complete([part(*BACKWARD, weights=WEIGHTS)])


def cut(grad_bytes: int, bucket_bytes: float) -> list[tuple[str, int]]:
    """Names of ops and number of parameters of each bucket."""
    found = buckets(Block("B", BACKWARD), MARKS, grad_bytes, bucket_bytes)
    return [(" ".join(op.name for op in bucket.block.ops), elements(bucket.weights)) for bucket in found]


def test_gradients_are_complete_after_what_follows_their_product() -> None:
    """a after 2 ops; b with the addition after 5; c after 7, d after 9; what no product makes at the end, 11."""
    assert counts(MARKS) == [(2, ["a"]), (5, ["b"]), (7, ["c"]), (9, ["d"]), (11, ["norm"])]


def test_parts_complete_in_the_order_of_the_backward_pass() -> None:
    """The last part first. Two ops run before its own (such as a gather of what was received); then its recomputation
    of three ops and its backward of two; then the first part's two."""
    first = part(other("x"), product("a", 2, 3), weights=[weight("a", 2, 3)])
    last = part(other("x"), product("b", 2, 2), weights=[weight("bias", 1), weight("b", 2, 2)], recompute=3)
    marks = gradients_complete([first, last], 2)
    assert counts(marks) == [(2 + 5, ["b"]), (2 + 5, ["bias"]), (2 + 5 + 2, ["a"])]


def test_only_a_parts_own_weights_count() -> None:
    """A tied projection makes a gradient of a table that another part holds, and completes nothing; an attention's
    product of activations has a weight gradient's layout, but is no weight gradient."""
    table = weight("logits", 100, 10, tied_to="table")
    assert gradients_complete([part(other("x"), product("logits", 100, 10), weights=[table])]) == []
    scores = product("scores dgrad k", 100, 100, phase="B", batch=8)
    attention = part(scores, other("x"), product("qkv", 2, 2), weights=[weight("qkv", 2, 2)])
    assert counts(gradients_complete([attention])) == [(3, ["qkv"])]


def test_weights_are_used_part_by_part() -> None:
    """A part's weights go with its forward pass, in the order of the parts; two ops stand before them all."""
    parts = [part(weights=[weight("a", 7)], forward=3), part(weights=[weight("b", 5)], forward=4)]
    assert counts(weights_used(parts, 2)) == [(5, ["a"]), (9, ["b"])]


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [
        # fp32: 24, 16, 40, 8 and 12 bytes. What fills a bucket closes it; what is left is the last one.
        (1, [("x1 a", 6), ("x2 b add", 4), ("x3 c", 10), ("x4 d", 2), ("x5 norm", 3)]),
        (24, [("x1 a", 6), ("x2 b add x3 c", 14), ("x4 d x5 norm", 5)]),
        (25, [("x1 a x2 b add", 10), ("x3 c", 10), ("x4 d x5 norm", 5)]),
        (40, [("x1 a x2 b add", 10), ("x3 c", 10), ("x4 d x5 norm", 5)]),
        (41, [("x1 a x2 b add x3 c", 20), ("x4 d x5 norm", 5)]),
        (80, [("x1 a x2 b add x3 c", 20), ("x4 d x5 norm", 5)]),
        (81, [("x1 a x2 b add x3 c x4 d", 22), ("x5 norm", 3)]),
        (89, [("x1 a x2 b add x3 c x4 d x5 norm", elements(WEIGHTS))]),
        (1e15, [("x1 a x2 b add x3 c x4 d x5 norm", elements(WEIGHTS))]),
    ],
)
def test_buckets_close_with_what_fills_them(bucket_bytes: float, expected: list[tuple[str, int]]) -> None:
    assert cut(4, bucket_bytes) == expected


@pytest.mark.parametrize("grad_bytes", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [8, 24, 40, 1000])
def test_buckets_count_bytes(grad_bytes: int, bucket_bytes: int) -> None:
    """Gradients of so many bytes in so large buckets, or of one byte in buckets that much smaller."""
    assert cut(grad_bytes, bucket_bytes) == cut(1, bucket_bytes / grad_bytes)


def reductions(role: Role) -> list[tuple[str, float, tuple[str, ...]]]:
    return [
        (step.label, step.op.nbytes, step.after)
        for _, _, step in role.steps()
        if isinstance(step.op, Comm) and step.op.purpose == "dp" and "grads" in step.op.name
    ]


CASES = [
    pytest.param(layers, attention, recompute, id=f"{attention}-{recompute}-{layers}")
    for layers, attention, recompute in (
        ({"pp": 1}, "flash", "none"),
        ({"pp": 2}, "unfused", "none"),
        ({"pp": 2, "vpp": 2, "schedule": "interleaved"}, "unfused", "full"),
        ({"pp": 2, "tp": 2}, "unfused", "selective"),
    )
]


@pytest.mark.parametrize("bucket_bytes", [1, 300_000, 2_000_000, 10**15])
@pytest.mark.parametrize(("parallel", "attention", "recompute"), CASES)
def test_every_gradient_is_reduced_once(
    parallel: dict[str, Any], attention: str, recompute: str, bucket_bytes: int
) -> None:
    """The buckets of a rank sum to 4 bytes of every parameter that it holds, none is empty, all but the last of a chunk
    are at least as large as asked; with a huge bucket size each chunk has one."""
    description = job(parallelism__dp=2, parallelism__bucket_bytes=bucket_bytes)
    description["parallelism"] |= parallel
    description["model"]["attention"] = attention
    description["training"]["recompute"] = recompute
    loaded = load_workload(description)
    for stage, role in enumerate(build_program(loaded).roles):
        held = sum(elements(piece.weights) for piece in rank_parts(loaded, stage))
        found = reductions(role)
        sizes = [nbytes for _, nbytes, _ in found]
        assert sum(sizes) == 4 * held
        assert min(sizes) > 0
        by_chunk: dict[str, list[float]] = {}
        for label, nbytes, _ in found:
            by_chunk.setdefault(label.partition(".")[0], []).append(nbytes)
        assert len(by_chunk) == loaded.parallelism.vpp
        assert all(nbytes >= bucket_bytes for chunk in by_chunk.values() for nbytes in chunk[:-1])
        if bucket_bytes == 10**15:
            assert len(found) == loaded.parallelism.vpp
        if bucket_bytes == 1:
            # A layer has four products, qkv, proj, fc1 and fc2, and each is a bucket.
            assert len(found) >= 4 * 8 // loaded.parallelism.pp


@pytest.mark.parametrize("bucket_bytes", [1, 300_000, 2_000_000])
def test_buckets_reduce_in_the_order_in_which_they_are_ready(bucket_bytes: int) -> None:
    """Each waits for its own part of the last micro-batch's backward pass, and the parts stand in the lane in the same
    order; nothing is reduced before the last micro-batch."""
    role = build_program(workload(dp=2, pp=2, bucket_bytes=bucket_bytes)).roles[0]
    position = {step.label: index for index, step in enumerate(role.lanes["compute"])}
    made: dict[str, Step] = {step.label: step for step in role.lanes["compute"]}
    waits = [after for _, _, (after,) in reductions(role)]
    assert all(position[before] < position[after] for before, after in pairwise(waits))
    last = max(step.microbatch for step in role.lanes["compute"])
    assert {made[label].microbatch for label in waits} == {last}
    assert {made[label].phase for label in waits} == {"B"}


@pytest.mark.parametrize("schedule", [{"pp": 1}, {"pp": 2}, {"pp": 2, "vpp": 2, "schedule": "interleaved"}])
def test_cutting_a_backward_pass_into_buckets_leaves_it_whole(schedule: dict[str, Any]) -> None:
    """The pieces of the last backward are the ops of any other, in order; memory is given back with the last piece."""
    plain = build_program(workload(dp=2, overlap={"grad_reduce": False}, **schedule))
    bucketed = build_program(workload(dp=2, bucket_bytes=300_000, **schedule))
    for one, two in zip(plain.roles, bucketed.roles, strict=True):
        assert ops(one) == ops(two)
        for total in ("alloc_bytes", "free_bytes"):
            assert sum(getattr(s, total) for _, _, s in one.steps()) == sum(
                getattr(s, total) for _, _, s in two.steps()
            )


def ops(role: Role) -> list[Compute | Comm]:
    return [op for step in role.lanes["compute"] if isinstance(step.op, Block) for op in step.op.ops]


def test_without_overlap_gradients_reduce_once_after_everything() -> None:
    """One all-reduce of all chunks after the last backward pass."""
    loaded = workload(dp=2, pp=2, vpp=2, schedule="interleaved", overlap={"grad_reduce": False})
    for stage, role in enumerate(build_program(loaded).roles):
        ((label, nbytes, after),) = reductions(role)
        last = [step.label for step in role.lanes["compute"] if step.phase == "B"][-1]
        assert (label, after[0]) == ("reduce grads", last)
        assert nbytes == 4 * sum(elements(piece.weights) for piece in rank_parts(loaded, stage))


def test_the_optimizer_waits_for_every_reduction() -> None:
    for role in build_program(workload(dp=2, pp=2, bucket_bytes=300_000)).roles:
        (optimizer,) = [step for _, _, step in role.steps() if step.label == "optimizer"]
        assert {label for label, _, _ in reductions(role)} <= set(optimizer.after)


@pytest.mark.parametrize("pp", [1, 2])
def test_zero_1_scatters_gradients_and_gathers_parameters(pp: int) -> None:
    """Reduce-scatters of the same gradients in place of all-reduces, and all-gathers of the 2-byte parameters."""
    loaded = workload(dp=4, pp=pp, zero=1, bucket_bytes=300_000)
    for stage, role in enumerate(build_program(loaded).roles):
        held = sum(elements(piece.weights) for piece in rank_parts(loaded, stage))
        comms = [step.op for lane in ("dp", "dp_gather") for step in role.lanes[lane]]
        assert all(isinstance(comm, Comm) for comm in comms)
        total = {op: sum(c.nbytes for c in comms if isinstance(c, Comm) and c.op == op) for op in ALL_OPS}
        assert total == {"all_reduce": 0, "reduce_scatter": 4 * held, "all_gather": 2 * held}


ALL_OPS = ("all_reduce", "reduce_scatter", "all_gather")


@pytest.mark.parametrize(
    ("layers", "pp", "names"),
    [
        (1, 1, ["embedding+layer+head"]),
        (4, 1, ["embedding+4 layer+head"]),
        (4, 2, ["embedding+2 layer", "2 layer+head"]),
        (9, 3, ["embedding+3 layer", "3 layer", "3 layer+head"]),
    ],
)
def test_blocks_are_named_by_what_is_in_them(layers: int, pp: int, names: list[str]) -> None:
    """Layers are counted, and one is not. A pass of a stage has one block, named by its letter and its parts."""
    work = load_workload(job(model__layers=layers, parallelism__pp=pp))
    blocks = [
        {step.op.name for _, _, step in role.steps() if isinstance(step.op, Block)}
        for role in build_program(work).roles
    ]
    passes = [{name for name in one if name[0] in "FB"} for one in blocks]
    assert passes == [{f"F {name}", f"B {name}"} for name in names]

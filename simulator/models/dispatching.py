"""The ways of tokens to the ranks that hold their experts, and back.

By all-to-all every copy of a token travels (Megatron-Core, moe/token_dispatcher.py, ``MoEAlltoAllTokenDispatcher``).
DeepEP (github.com/deepseek-ai/DeepEP) and HybridEP (its branch hybrid-ep) send a token once to each rank that has some
of its experts, over the network once to each node. It is copied for each expert there, and what these give is summed
before it goes back (``MoEFlexTokenDispatcher``). By all-gather every rank gets all tokens
(``MoEAllGatherTokenDispatcher``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from simulator.config import Workload
from simulator.frameworks.token_travel import Surroundings
from simulator.models.shapes import FrameworkShapes
from simulator.operations.experts import CHOICE, INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, comm, memory
from simulator.program import AllToAll, Axis, Collective, CollectiveKind, Purpose
from simulator.units import DTYPE_BYTES

#: Dispatchers that send a token once to each rank.
ONCE_TO_EACH_RANK = ("deepep", "hybridep")


class Reach(NamedTuple):
    """The ranks and the nodes of an expert-parallel group that a token goes to, mean over tokens."""

    ranks: float
    nodes: float


def distinct(experts: int, chosen: int, groups: int) -> float:
    """Return how many of equal ``groups`` of experts have some of those ``chosen`` at random, in the mean.

    The probability that a group has none is that of choosing all among the others.

    >>> distinct(4, 1, 2), distinct(4, 4, 2), round(distinct(4, 2, 2), 3)
    (1.0, 2.0, 1.667)
    """
    without = experts - experts // groups
    none = 1.0
    for number in range(min(chosen, experts)):
        none *= max(without - number, 0) / (experts - number)
    return groups * (1 - none)


def reach(workload: Workload) -> Reach:
    """Return the `Reach` of tokens that are routed evenly, within as many nodes as each may go to."""
    layout, moe = workload.parallelism, workload.model.moe
    assert moe is not None
    nodes = layout.expert_nodes(workload.cluster.gpus_per_node)
    allowed = min(moe.node_limit or nodes, nodes)
    ranks, experts = layout.ep * allowed // nodes, moe.experts * allowed // nodes
    return Reach(distinct(experts, moe.top_k, ranks), distinct(experts, moe.top_k, allowed))


def bytes_per_node(workload: Workload) -> float:
    """Return ``per_node`` of the all-to-alls (see `AllToAll`), 0 where copies cross the network one by one."""
    layout, moe = workload.parallelism, workload.model.moe
    assert moe is not None
    once = layout.dispatcher in ONCE_TO_EACH_RANK
    if layout.expert_nodes(workload.cluster.gpus_per_node) == 1 or (moe.node_limit is None and not once):
        return 0.0
    to = reach(workload)
    return to.nodes / (to.ranks if once else moe.top_k)


def dispatch(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the dispatch of tokens to their experts: permute, count, send, and sort."""
    if experts.ep > 1 and experts.dispatcher == "all_gather":
        return _gathered(shapes, experts)
    if experts.ep > 1 and experts.dispatcher in ONCE_TO_EACH_RANK:
        return _sent_once(shapes, experts)
    token_bytes, sent, worked_on = _sizes(shapes, experts)
    hooks = shapes.framework.experts
    permute, permute_bwd = hooks.permute(shapes, experts)
    with_tokens = PROBABILITY * experts.travelling if hooks.sends_probabilities and experts.hidden_by_others else 0.0
    return Node(
        forward=(
            *_own_rows(shapes, token_bytes),
            *hooks.sort(experts),
            *_counts_of_all(shapes, experts),
            *permute,
            *_counts_to_host(shapes, experts),
            *_exchange(experts, "dispatch", sent + with_tokens, back=False),
            *_probabilities(shapes, experts, "dispatch", back=False),
            *_expert_tensor_comm(experts, "all_gather", worked_on),
            *_regroup(shapes, experts, "F", "sort"),
        ),
        input_grad=(
            *_regroup(shapes, experts, "B", "sort bwd"),
            *_expert_tensor_comm(experts, "reduce_scatter", worked_on),
            *_probabilities(shapes, experts, "dispatch grad", back=True),
            *_exchange(experts, "dispatch grad", sent + with_tokens, back=True),
            *permute_bwd,
            *_all_rows(shapes, token_bytes),
        ),
        saved=hooks.kept_by_dispatch(shapes, experts),
        grad_bytes=worked_on + sent + token_bytes,
    )


def combine(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the way back of `dispatch`: unsort, send back, and sum."""
    if experts.ep > 1 and experts.dispatcher == "all_gather":
        return _scattered(shapes, experts)
    if experts.ep > 1 and experts.dispatcher in ONCE_TO_EACH_RANK:
        return _summed_before(shapes, experts)
    token_bytes, sent, worked_on = _sizes(shapes, experts)
    hooks = shapes.framework.experts
    unpermute, unpermute_bwd = hooks.unpermute(shapes, experts)
    return Node(
        forward=(
            *_regroup(shapes, experts, "F", "unsort"),
            *_expert_tensor_comm(experts, "reduce_scatter", worked_on),
            *_exchange(experts, "combine", sent, back=True),
            *unpermute,
            *_all_rows(shapes, token_bytes),
        ),
        input_grad=(
            *_own_rows(shapes, token_bytes, back=True),
            *unpermute_bwd,
            *_exchange(experts, "combine grad", sent, back=False),
            *_expert_tensor_comm(experts, "all_gather", worked_on),
            *_regroup(shapes, experts, "B", "unsort bwd"),
        ),
        saved=hooks.kept_by_combine(shapes, experts),
        grad_bytes=worked_on + sent + token_bytes,
    )


def _sent_once(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the dispatch of a token once to each rank, where it is copied in the order of its experts."""
    token_bytes, sent, worked_on = _sizes(shapes, experts)
    arrived = float(shapes.element * experts.arriving * shapes.hidden)
    around = _around(shapes, experts)
    return Node(
        forward=(
            *_own_rows(shapes, token_bytes),
            *around.before,
            *_exchange(experts, "dispatch", sent + around.beside_bytes, back=False),
            *around.behind,
            memory("F", "moe.permute", "copy", arrived, worked_on, shapes.dtype),
        ),
        input_grad=(
            memory("B", "moe.permute bwd", "copy", worked_on, arrived + around.summed_bytes, shapes.dtype),
            *around.gradients_behind,
            *_exchange(experts, "dispatch grad", sent + around.gradients_beside_bytes, back=True),
            *around.gradients_last,
            *_all_rows(shapes, token_bytes),
        ),
        saved=shapes.framework.experts.kept_by_dispatch(shapes, experts),
        grad_bytes=worked_on + arrived + token_bytes,
    )


def _summed_before(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the way back of `_sent_once`: what a rank's experts give for a token is summed, and travels once.

    What comes from several ranks is summed by the kernel that receives it.
    """
    token_bytes, sent, worked_on = _sizes(shapes, experts)
    arrived = float(shapes.element * experts.arriving * shapes.hidden)
    return Node(
        forward=(
            memory("F", "moe.unpermute", "copy", worked_on, arrived, shapes.dtype),
            *_exchange(experts, "combine", sent, back=True),
            *_all_rows(shapes, token_bytes),
        ),
        input_grad=(
            *_own_rows(shapes, token_bytes, back=True),
            *_around(shapes, experts).gradients_before,
            *_exchange(experts, "combine grad", sent, back=False),
            memory("B", "moe.unpermute bwd", "copy", arrived, worked_on, shapes.dtype),
        ),
        saved=shapes.framework.experts.kept_by_combine(shapes, experts),
        grad_bytes=worked_on + arrived + token_bytes,
    )


def _around(shapes: FrameworkShapes, experts: Experts) -> Surroundings:
    """Return the work around the transfers of a library, which the framework calls."""
    sent_once = shapes.framework.experts.sent_once
    assert sent_once is not None
    return sent_once(shapes, experts)


def _gathered(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the dispatch that gathers all tokens of a group with their choices, and copies those of its experts.

    Choices go first, then their probabilities in the router's type, and tokens last. The host waits for the number of
    its experts' tokens, which a sum over the choices gives behind all three (``token_dispatch`` and
    ``dispatch_postprocess`` of ``MoEAllGatherTokenDispatcher``). Gradients of
    probabilities come back as those of tokens do.
    """
    token_bytes, _, worked_on = _sizes(shapes, experts)
    everybody = token_bytes * experts.ep
    entries = float(experts.tokens * experts.experts * experts.ep)
    waits = shapes.framework.experts.host_waits_for_counts and experts.counted
    probabilities = DTYPE_BYTES[experts.router_dtype] * entries
    local = CHOICE * entries / experts.ep
    counted = memory("F", "moe.count", "reduce", local, INDEX * len(experts.loads), "fp32", len(experts.loads))
    return Node(
        forward=(
            *_own_rows(shapes, token_bytes),
            _among_experts(CollectiveKind.ALL_GATHER, "choices", CHOICE * entries),
            _among_experts(CollectiveKind.ALL_GATHER, "probabilities", probabilities),
            _among_experts(CollectiveKind.ALL_GATHER, "tokens", everybody),
            replace(counted, host_waits=waits),
            memory("F", "moe.permute", "copy", worked_on, worked_on, shapes.dtype),
        ),
        input_grad=(
            memory("B", "moe.permute bwd", "copy", worked_on, everybody, shapes.dtype),
            _among_experts(CollectiveKind.REDUCE_SCATTER, "token grads", everybody),
            _among_experts(CollectiveKind.REDUCE_SCATTER, "probability grads", probabilities),
            *_all_rows(shapes, token_bytes),
        ),
        saved=shapes.framework.experts.kept_by_dispatch(shapes, experts),
        forward_bytes=everybody,
        grad_bytes=worked_on + everybody + token_bytes,
    )


def _among_experts(kind: CollectiveKind, what: str, nbytes: float) -> Collective:
    return Collective(f"ep.{kind} {what}", kind, nbytes, Axis.EP, Purpose.EXPERT)


def _scattered(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the way back of `_gathered`: the sums of each rank's experts for all tokens, summed over ranks.

    They are summed in the type of the probabilities, which the router decides (``token_combine`` of the same class).
    """
    token_bytes, _, worked_on = _sizes(shapes, experts)
    everybody = token_bytes * experts.ep
    wide = DTYPE_BYTES[experts.router_dtype] / shapes.element
    casts = experts.router_dtype != shapes.dtype

    def cast(phase: str, name: str, op: str, read: float, written: float) -> Ops:
        return (memory(phase, f"moe.{name}", op, read, written, shapes.dtype),) if casts else ()

    return Node(
        forward=(
            memory("F", "moe.unpermute", "copy", worked_on, everybody, shapes.dtype),
            *cast("F", "sums cast", "upcast", everybody, wide * everybody),
            _among_experts(CollectiveKind.REDUCE_SCATTER, "tokens", wide * everybody),
            *cast("F", "output cast", "cast", wide * token_bytes, token_bytes),
            *_all_rows(shapes, token_bytes),
        ),
        input_grad=(
            *_own_rows(shapes, token_bytes, back=True),
            *cast("B", "output grad cast", "upcast", token_bytes, wide * token_bytes),
            _among_experts(CollectiveKind.ALL_GATHER, "token grads", wide * everybody),
            *cast("B", "sums grad cast", "cast", wide * everybody, everybody),
            memory("B", "moe.unpermute bwd", "copy", worked_on, worked_on, shapes.dtype),
        ),
        saved=shapes.framework.experts.kept_by_combine(shapes, experts),
        forward_bytes=(1 + wide) * everybody if casts else everybody,
        grad_bytes=worked_on + (1 + wide if casts else 1) * everybody + token_bytes,
    )


def _sizes(shapes: FrameworkShapes, experts: Experts) -> tuple[float, float, float]:
    """Return the bytes of a rank's tokens, of what it sends, and of what its experts work on."""
    token_bytes = float(shapes.element * experts.tokens * shapes.hidden)
    return (
        token_bytes,
        float(shapes.element * experts.travelling * shapes.hidden),
        float(shapes.element * experts.worked_on * shapes.hidden),
    )


def _rows_split(shapes: FrameworkShapes) -> bool:
    """Return True where tp ranks have the same rows, of which each routes its part.

    So it is without sequence parallelism (DeepSpeed-TED, arXiv 2303.06318, section 5.1: duplicate token dropping).
    """
    return shapes.tp > 1 and not shapes.sequence_parallel


def _own_rows(shapes: FrameworkShapes, token_bytes: float, *, back: bool = False) -> Ops:
    """Return the copy of a rank's part of the rows that tp ranks have in common."""
    phase, name = ("B", "moe.split rows bwd") if back else ("F", "moe.split rows")
    return (memory(phase, name, "copy", token_bytes, token_bytes, shapes.dtype),) if _rows_split(shapes) else ()


def _all_rows(shapes: FrameworkShapes, token_bytes: float) -> Ops:
    """Return the gathering of the rows that tp ranks have in common."""
    return (comm("all_gather", "moe", token_bytes * shapes.tp),) if _rows_split(shapes) else ()


def _counts_of_all(shapes: FrameworkShapes, experts: Experts) -> Ops:
    """Return the exchange of how many tokens go where, without which nobody knows how many come."""
    if experts.ep == 1 or not experts.counted:
        return ()
    hooks = shapes.framework.experts
    before, behind = hooks.counted(experts) if hooks.counted else ((), ())
    waits = hooks.host_waits_for_counts and hooks.counted is None
    nbytes = float(INDEX * experts.experts * experts.ep)
    name, kind = "ep.all_gather token counts", CollectiveKind.ALL_GATHER
    return (*before, Collective(name, kind, nbytes, Axis.EP, Purpose.EXPERT, host_waits=waits), *behind)


def _counts_to_host(shapes: FrameworkShapes, experts: Experts) -> Ops:
    """Return the copy of counts by expert to a host that waits for them though no other rank has any.

    Megatron-Core's does before it puts rows in order a second time (``cuda_sync_point``), with PyTorch's kernels by
    counts that went to the host apart (`simulator.frameworks.megatron_experts.sort`).
    """
    hooks = shapes.framework.experts
    if experts.ep > 1 or not (experts.counted and hooks.sorts_alone and hooks.host_waits_for_counts):
        return ()
    nbytes = float(INDEX * experts.experts)
    return (replace(memory("F", "moe.counts to host", "copy", nbytes, nbytes, "fp32"), host_waits=True),)


def _probabilities(shapes: FrameworkShapes, experts: Experts, name: str, *, back: bool) -> Ops:
    """Return the all-to-all of the tokens' probabilities, where they travel behind the tokens.

    Where another micro-batch hides both, they travel with the tokens, of whose bytes they are a thousandth.
    """
    if not shapes.framework.experts.sends_probabilities or experts.hidden_by_others:
        return ()
    return _exchange(experts, f"{name} of probabilities", float(PROBABILITY * experts.travelling), back=back)


def _exchange(experts: Experts, name: str, nbytes: float, *, back: bool) -> Ops:
    """Return the all-to-all that takes tokens to the ranks that hold their experts, or ``back``."""
    if experts.ep == 1:
        return ()
    travel = AllToAll(f"ep.all_to_all {name}", nbytes, Axis.EP, Purpose.EXPERT, per_node=experts.per_node)
    shares = experts.received_shares
    return (replace(travel, send_shares=shares) if back else replace(travel, receive_shares=shares),)


def _expert_tensor_comm(experts: Experts, op: str, nbytes: float) -> Ops:
    """Return the communication of the etp ranks that split each expert: to gather copies, or to sum results."""
    if experts.etp == 1:
        return ()
    return (Collective(f"etp.{op} moe", CollectiveKind(op), nbytes, Axis.ETP, Purpose.TENSOR),)


def _regroup(shapes: FrameworkShapes, experts: Experts, phase: str, name: str) -> Ops:
    """Return the copy that puts rows of several ranks in the order of the experts, or back."""
    if (experts.ep * experts.etp == 1 and not shapes.framework.experts.sorts_alone) or len(experts.loads) == 1:
        return ()
    nbytes = shapes.element * experts.worked_on * shapes.hidden
    places, parts = shapes.framework.experts.chunks(experts)
    copied = memory(phase, f"moe.{name}", "copy", nbytes, nbytes, shapes.dtype, parts=parts)
    return (*places, copied) if phase == "F" else (copied,)

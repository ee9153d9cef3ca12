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
from simulator.models.shapes import FrameworkShapes
from simulator.operations.experts import CHOICE, INDEX, PROBABILITY, Experts
from simulator.operations.nodes import Node, Ops, comm, memory
from simulator.program import AllToAll, Axis, Collective, CollectiveKind, Purpose

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


def dispatch(z: FrameworkShapes, x: Experts) -> Node:
    """Return the dispatch of tokens to their experts: permute, count, send, and sort."""
    if x.ep > 1 and x.dispatcher == "all_gather":
        return _gathered(z, x)
    if x.ep > 1 and x.dispatcher in ONCE_TO_EACH_RANK:
        return _sent_once(z, x)
    token_bytes, sent, worked_on = _sizes(z, x)
    hooks = z.framework.experts
    permute, permute_bwd = hooks.permute(z, x)
    with_tokens = PROBABILITY * x.travelling if hooks.sends_probabilities and x.hidden_by_others else 0.0
    return Node(
        forward=(
            *_own_rows(z, token_bytes),
            *hooks.sort(x),
            *_counts_of_all(z, x),
            *permute,
            *_counts_to_host(z, x),
            *_exchange(x, "dispatch", sent + with_tokens, back=False),
            *_probabilities(z, x, "dispatch", back=False),
            *_expert_tensor_comm(x, "all_gather", worked_on),
            *_regroup(z, x, "F", "sort"),
        ),
        input_grad=(
            *_regroup(z, x, "B", "sort bwd"),
            *_expert_tensor_comm(x, "reduce_scatter", worked_on),
            *_probabilities(z, x, "dispatch grad", back=True),
            *_exchange(x, "dispatch grad", sent + with_tokens, back=True),
            *permute_bwd,
            *_all_rows(z, token_bytes),
        ),
        saved=hooks.kept_by_dispatch(z, x),
        grad_bytes=worked_on + sent + token_bytes,
    )


def combine(z: FrameworkShapes, x: Experts) -> Node:
    """Return the way back of `dispatch`: unsort, send back, and sum."""
    if x.ep > 1 and x.dispatcher == "all_gather":
        return _scattered(z, x)
    if x.ep > 1 and x.dispatcher in ONCE_TO_EACH_RANK:
        return _summed_before(z, x)
    token_bytes, sent, worked_on = _sizes(z, x)
    hooks = z.framework.experts
    unpermute, unpermute_bwd = hooks.unpermute(z, x)
    return Node(
        forward=(
            *_regroup(z, x, "F", "unsort"),
            *_expert_tensor_comm(x, "reduce_scatter", worked_on),
            *_exchange(x, "combine", sent, back=True),
            *unpermute,
            *_all_rows(z, token_bytes),
        ),
        input_grad=(
            *_own_rows(z, token_bytes, back=True),
            *unpermute_bwd,
            *_exchange(x, "combine grad", sent, back=False),
            *_expert_tensor_comm(x, "all_gather", worked_on),
            *_regroup(z, x, "B", "unsort bwd"),
        ),
        saved=hooks.kept_by_combine(z, x),
        grad_bytes=worked_on + sent + token_bytes,
    )


def _sent_once(z: FrameworkShapes, x: Experts) -> Node:
    """Return the dispatch of a token once to each rank, where it is copied in the order of its experts."""
    token_bytes, sent, worked_on = _sizes(z, x)
    arrived = float(z.element * x.arriving * z.hidden)
    return Node(
        forward=(
            *_own_rows(z, token_bytes),
            *_counts_of_all(z, x),
            *_exchange(x, "dispatch", sent, back=False),
            memory("F", "moe.permute", "copy", arrived, worked_on, z.dtype),
        ),
        input_grad=(
            memory("B", "moe.permute bwd", "copy", worked_on, arrived, z.dtype),
            *_exchange(x, "dispatch grad", sent, back=True),
            *_all_rows(z, token_bytes),
        ),
        saved=z.framework.experts.kept_by_dispatch(z, x),
        grad_bytes=worked_on + arrived + token_bytes,
    )


def _summed_before(z: FrameworkShapes, x: Experts) -> Node:
    """Return the way back of `_sent_once`: what a rank's experts give for a token is summed, and travels once.

    What comes from several ranks is summed by the kernel that receives it.
    """
    token_bytes, sent, worked_on = _sizes(z, x)
    arrived = float(z.element * x.arriving * z.hidden)
    return Node(
        forward=(
            memory("F", "moe.unpermute", "copy", worked_on, arrived, z.dtype),
            *_exchange(x, "combine", sent, back=True),
            *_all_rows(z, token_bytes),
        ),
        input_grad=(
            *_own_rows(z, token_bytes, back=True),
            *_exchange(x, "combine grad", sent, back=False),
            memory("B", "moe.unpermute bwd", "copy", arrived, worked_on, z.dtype),
        ),
        saved=z.framework.experts.kept_by_combine(z, x),
        grad_bytes=worked_on + arrived + token_bytes,
    )


def _gathered(z: FrameworkShapes, x: Experts) -> Node:
    """Return the dispatch that gathers all tokens of a group with their choices, and copies those of its experts.

    The host waits for the counts of tokens, which it takes from the gathered choices.
    """
    token_bytes, _, worked_on = _sizes(z, x)
    everybody = token_bytes * x.ep
    choices = float((CHOICE + PROBABILITY) * x.tokens * x.experts * x.ep)
    waits = z.framework.experts.host_waits_for_counts and x.counted
    kind = CollectiveKind.ALL_GATHER
    return Node(
        forward=(
            *_own_rows(z, token_bytes),
            Collective("ep.all_gather tokens", kind, everybody, Axis.EP, Purpose.EXPERT),
            Collective("ep.all_gather choices", kind, choices, Axis.EP, Purpose.EXPERT, host_waits=waits),
            memory("F", "moe.permute", "copy", worked_on, worked_on, z.dtype),
        ),
        input_grad=(
            memory("B", "moe.permute bwd", "copy", worked_on, everybody, z.dtype),
            Collective(
                "ep.reduce_scatter token grads", CollectiveKind.REDUCE_SCATTER, everybody, Axis.EP, Purpose.EXPERT
            ),
            *_all_rows(z, token_bytes),
        ),
        saved=z.framework.experts.kept_by_dispatch(z, x),
        forward_bytes=everybody,
        grad_bytes=worked_on + everybody + token_bytes,
    )


def _scattered(z: FrameworkShapes, x: Experts) -> Node:
    """Return the way back of `_gathered`: the sums of each rank's experts for all tokens, summed over ranks."""
    token_bytes, _, worked_on = _sizes(z, x)
    everybody = token_bytes * x.ep
    return Node(
        forward=(
            memory("F", "moe.unpermute", "copy", worked_on, everybody, z.dtype),
            Collective("ep.reduce_scatter tokens", CollectiveKind.REDUCE_SCATTER, everybody, Axis.EP, Purpose.EXPERT),
            *_all_rows(z, token_bytes),
        ),
        input_grad=(
            *_own_rows(z, token_bytes, back=True),
            Collective("ep.all_gather token grads", CollectiveKind.ALL_GATHER, everybody, Axis.EP, Purpose.EXPERT),
            memory("B", "moe.unpermute bwd", "copy", worked_on, worked_on, z.dtype),
        ),
        saved=z.framework.experts.kept_by_combine(z, x),
        forward_bytes=everybody,
        grad_bytes=worked_on + everybody + token_bytes,
    )


def _sizes(z: FrameworkShapes, x: Experts) -> tuple[float, float, float]:
    """Return the bytes of a rank's tokens, of what it sends, and of what its experts work on."""
    token_bytes = float(z.element * x.tokens * z.hidden)
    return token_bytes, float(z.element * x.travelling * z.hidden), float(z.element * x.worked_on * z.hidden)


def _rows_split(z: FrameworkShapes) -> bool:
    """Return True where tp ranks have the same rows, of which each routes its part.

    So it is without sequence parallelism (DeepSpeed-TED, arXiv 2303.06318, section 5.1: duplicate token dropping).
    """
    return z.tp > 1 and not z.sequence_parallel


def _own_rows(z: FrameworkShapes, token_bytes: float, *, back: bool = False) -> Ops:
    """Return the copy of a rank's part of the rows that tp ranks have in common."""
    phase, name = ("B", "moe.split rows bwd") if back else ("F", "moe.split rows")
    return (memory(phase, name, "copy", token_bytes, token_bytes, z.dtype),) if _rows_split(z) else ()


def _all_rows(z: FrameworkShapes, token_bytes: float) -> Ops:
    """Return the gathering of the rows that tp ranks have in common."""
    return (comm("all_gather", "moe", token_bytes * z.tp),) if _rows_split(z) else ()


def _counts_of_all(z: FrameworkShapes, x: Experts) -> Ops:
    """Return the exchange of how many tokens go where, without which nobody knows how many come."""
    if x.ep == 1 or not x.counted:
        return ()
    hooks = z.framework.experts
    by_all_to_all = hooks.counted is not None and x.dispatcher == "all_to_all"
    before, behind = hooks.counted(x) if hooks.counted and by_all_to_all else ((), ())
    waits = hooks.host_waits_for_counts and not by_all_to_all
    nbytes = float(INDEX * x.experts * x.ep)
    name, kind = "ep.all_gather token counts", CollectiveKind.ALL_GATHER
    return (*before, Collective(name, kind, nbytes, Axis.EP, Purpose.EXPERT, host_waits=waits), *behind)


def _counts_to_host(z: FrameworkShapes, x: Experts) -> Ops:
    """Return the copy of counts by expert to a host that waits for them though no other rank has any.

    Megatron-Core's does before it puts rows in order a second time (``cuda_sync_point``), with PyTorch's kernels by
    counts that went to the host apart (`simulator.frameworks.megatron_experts.sort`).
    """
    hooks = z.framework.experts
    if x.ep > 1 or not (x.counted and hooks.sorts_alone and hooks.host_waits_for_counts):
        return ()
    nbytes = float(INDEX * x.experts)
    return (replace(memory("F", "moe.counts to host", "copy", nbytes, nbytes, "fp32"), host_waits=True),)


def _probabilities(z: FrameworkShapes, x: Experts, name: str, *, back: bool) -> Ops:
    """Return the all-to-all of the tokens' probabilities, where they travel behind the tokens.

    Where another micro-batch hides both, they travel with the tokens, of whose bytes they are a thousandth.
    """
    if not z.framework.experts.sends_probabilities or x.hidden_by_others:
        return ()
    return _exchange(x, f"{name} of probabilities", float(PROBABILITY * x.travelling), back=back)


def _exchange(x: Experts, name: str, nbytes: float, *, back: bool) -> Ops:
    """Return the all-to-all that takes tokens to the ranks that hold their experts, or ``back``."""
    if x.ep == 1:
        return ()
    travel = AllToAll(f"ep.all_to_all {name}", nbytes, Axis.EP, Purpose.EXPERT, per_node=x.per_node)
    shares = x.received_shares
    return (replace(travel, send_shares=shares) if back else replace(travel, receive_shares=shares),)


def _expert_tensor_comm(x: Experts, op: str, nbytes: float) -> Ops:
    """Return the communication of the etp ranks that split each expert: to gather copies, or to sum results."""
    if x.etp == 1:
        return ()
    return (Collective(f"etp.{op} moe", CollectiveKind(op), nbytes, Axis.ETP, Purpose.TENSOR),)


def _regroup(z: FrameworkShapes, x: Experts, phase: str, name: str) -> Ops:
    """Return the copy that puts rows of several ranks in the order of the experts, or back."""
    if (x.ep * x.etp == 1 and not z.framework.experts.sorts_alone) or len(x.loads) == 1:
        return ()
    nbytes = z.element * x.worked_on * z.hidden
    parts = len(x.loads) * x.ep * x.etp
    return (memory(phase, f"moe.{name}", "copy", nbytes, nbytes, z.dtype, parts=parts),)

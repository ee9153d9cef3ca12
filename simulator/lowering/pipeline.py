"""A schedule's actions become lanes: pure passes add sends and receives.

A schedule says only what each rank computes. `hand_overs` derives the results that have to travel from the one rule of
dependence. `lower` posts their sends and receives in one of four ways.

`_as_written`: a schedule's file says when each is posted.
`_as_it_comes`: beside computation, a receive as soon as its sender computes. Most schedules with overlap do so.
`_one_by_one`: in one global order, as torch's runtime does. Schedules that post ahead do so beside computation, those
of single transfers without overlap.
`_blocking`: without overlap, in blocking batches as Megatron-LM posts them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from simulator.lowering.hand_overs import (
    RECV,
    SEND,
    AlikeTransfers,
    BatchedEnds,
    HandOver,
    PostedEnd,
    SingleTransfers,
    Sources,
    flat,
    joined,
    sources_in,
    transfers,
)
from simulator.lowering.lanes import PIPELINE_LANE, Lanes
from simulator.lowering.posted_lane import PostedLane
from simulator.program import COMPUTE_LANE, LaneSteps, PointToPointKind, Step
from simulator.recent import RecentValues
from simulator.schedules import Action, Cell, Order, Post, Schedule, Slot

#: Returns the compute step of an action, after steps with these labels.
StepOf = Callable[[Action, tuple[str, ...]], Step]


#: An action, and labels of the steps before it.
PlannedPass = tuple[Action, tuple[str, ...]]
#: By stage and micro-batch, what tells a pass from others of its stage and kind.
Turns = Mapping[tuple[int, int], Hashable]
NO_TURNS: Turns = MappingProxyType({})


class PostedRank:
    """The lanes of a rank while its passes and transfers are posted on them."""

    def __init__(self, late: Mapping[Action, Sequence[str]], turns: Turns) -> None:
        self.compute = PostedLane[PlannedPass]()
        self.transfers: dict[str, PostedLane[Step]] = {}
        self._late, self._turns = late, turns

    def compute_action(self, action: Action, after: tuple[str, ...]) -> None:
        """Post a pass after other steps."""
        after = (*self._late.get(action, ()), *after)
        kind = action.stage, action.kind, self._turns.get((action.stage, action.microbatch))
        self.compute.post(kind, (action, after), action.microbatch, str(action), after)

    def lane(self, name: str) -> PostedLane[Step]:
        """Return the lane of transfers of a name."""
        if name not in self.transfers:
            self.transfers[name] = PostedLane()
        return self.transfers[name]

    @cached_property
    def steps_of_transfers(self) -> Mapping[str, LaneSteps]:
        """All lanes of transfers once everything is posted, the very same for all passes."""
        return {name: lane.steps(lambda step: step) for name, lane in self.transfers.items()}

    def last(self, name: str) -> tuple[str, ...]:
        """Return the label of the last step of a lane so far, if any."""
        return tuple(self.lane(name).label[-1:]) if name in self.transfers else ()


#: Most actions whose lanes are kept, at some 1.2 KB each.
MOST_ACTIONS = 50_000
_recent = RecentValues[list[PostedRank]](MOST_ACTIONS)


def whole_at_first(order: Order, schedule: Schedule, n_stages: int) -> tuple[Order, Schedule]:
    """Return ``order`` and ``schedule`` as ``torch.distributed.pipelining`` runs them.

    The first stage, whose input has no gradient, leaves all of a split backward pass to where its weight gradient
    stands (stage.py, ``backward_one_chunk``).
    """

    def run(slot: Slot) -> Slot:
        whole = {"I": "", "W": "B"}
        actions = [
            action if action.stage % n_stages else action._replace(kind=whole.get(action.kind, action.kind))
            for action in slot
        ]
        return tuple(action for action in actions if action.kind)

    rows = schedule.rows
    if rows is not None:
        cells = [[cell if isinstance(cell, Post) else run(cell) for cell in row] for row in rows]
        schedule = replace(schedule, rows=tuple(tuple(cell for cell in row if cell) for row in cells))
    return [[slot for slot in map(run, slots) if slot] for slots in order], schedule


def lower(
    order: Order,
    schedule: Schedule,
    n_stages: int,
    nbytes: float,
    step_of: StepOf,
    turns: Turns = NO_TURNS,
    *,
    overlap: bool,
    batched: bool = False,
    apart: bool = False,
) -> list[Lanes]:
    """Return the lanes of every pipeline rank: its computation, and its transfers of ``nbytes`` each.

    ``step_of``: steps of computation, labelled ``str(action)``. It is asked for one of each stage and kind, as others
    do the same; ``turns`` tells passes that do not.

    With ``overlap`` transfers run on lanes of their own and computation waits only for what it needs; without, it waits
    for every batch posted before it, sends too. It matters when a receive is posted: its kernel holds SMs from then on.
    Its stream matters too, for it may queue there behind what another rank has not sent yet: each neighbour has one, or
    with ``batched`` all share one. ``apart``: a forward and a backward in one slot each wait for their own input, as
    torch runs them one after the other (``_step_microbatches``, OVERLAP_F_B). Both are sent after the last either way.

    What the passes compute makes no difference to their transfers. So those of the last few orders are kept.
    """
    key = tuple(map(tuple, order)), schedule, n_stages, nbytes, frozenset(turns.items()), overlap, batched, apart
    n_actions = sum(len(slot) for slots in order for slot in slots)
    posted = _recent.get(
        key,
        n_actions,
        lambda: _posted(order, schedule, n_stages, nbytes, turns, overlap=overlap, batched=batched, apart=apart),
    )
    return [
        {COMPUTE_LANE: rank.compute.steps(lambda first: step_of(*first)), **rank.steps_of_transfers} for rank in posted
    ]


def _posted(
    order: Order,
    schedule: Schedule,
    n_stages: int,
    nbytes: float,
    turns: Turns,
    *,
    overlap: bool,
    batched: bool,
    apart: bool,
) -> list[PostedRank]:
    """Return the lanes of every pipeline rank; arguments as in `lower`."""
    sources_of = sources_in(order, n_stages)
    hops = transfers(order, schedule, sources_of)
    hops = joined(order, hops, apart) if schedule.joined else hops
    late = _late(order, sources_of)
    ranks = [PostedRank(late, turns) for _ in order]
    if schedule.rows is not None:
        _as_written(ranks, schedule.rows, hops, nbytes, overlap=overlap, batched=batched)
        return ranks
    if overlap and not schedule.posts_ahead:
        _as_it_comes(ranks, order, hops, nbytes)
        return ranks
    batching = schedule.batching(len(order), len({action.microbatch for action in flat(order[0])}))
    if overlap or batching == "single":
        passes: Order = order if schedule.joined else [[(action,) for action in flat(slots)] for slots in order]
        _one_by_one(ranks, passes, hops, sources_of, nbytes, overlap=overlap, batched=batched)
    else:
        _blocking(ranks, order, hops, batching, nbytes)
    return ranks


def _late(order: Order, sources_of: Sources) -> Mapping[Action, Sequence[str]]:
    """Return the labels of results that an action needs and that its own rank computes only later.

    Such an order cannot be run, and the engine will say so. What ran before on the same lane needs no wait.
    """
    late: dict[Action, list[str]] = {}
    for slots in order:
        actions = flat(slots)
        place = dict(zip(actions, range(len(actions)), strict=True))
        for at, action in enumerate(actions):
            for source in sources_of[action]:
                if place.get(source, -1) > at:
                    late.setdefault(action, []).append(str(source))
    return late


def _as_it_comes(ranks: Sequence[PostedRank], order: Order, hops: list[HandOver], nbytes: float) -> None:
    """Post each transfer on a lane where it goes on beside computation once its bytes have been computed.

    Its receive is posted already, and holds no SMs until then.
    """
    singles = SingleTransfers(hops, nbytes, as_they_come=True)
    needs = _needs(hops, singles)
    for rank, slots in zip(ranks, order, strict=True):
        for action in flat(slots):
            rank.compute_action(action, tuple(needs.get(action, ())))
    # There is a lane per direction and neighbour, and receives are posted in the sender's order, whatever the
    # receiver's own. A lane never waits for what comes later, nor for another neighbour.
    for hop in hops:
        microbatch = hop.source.microbatch
        for op, after in ((SEND, (str(hop.sent_after),)), (RECV, ())):
            alike = singles.alike(hop, op)
            alike.post_on(ranks[alike.rank].lane(alike.lane), microbatch, after)


def _needs(hops: Sequence[HandOver], singles: SingleTransfers) -> dict[Action, list[str]]:
    """Return the labels of the receives that each action awaits."""
    needs: dict[Action, list[str]] = {}
    for hop in hops:
        needs.setdefault(hop.awaited_by, []).append(singles.alike(hop, RECV).label(hop.source.microbatch))
    return needs


def _as_written(
    ranks: Sequence[PostedRank],
    rows: Sequence[Sequence[Cell]],
    hops: list[HandOver],
    nbytes: float,
    *,
    overlap: bool,
    batched: bool,
) -> None:
    """Post sends and receives where the schedule's author has put them.

    Each comes after the computation that is written before it; see `_post_one`.
    """
    singles = SingleTransfers(hops, nbytes)
    ends = {hop.post(op): (hop, op) for hop in hops for op in PointToPointKind}
    needs = _needs(hops, singles)
    for rank, row in zip(ranks, rows, strict=True):
        for cell in row:
            if isinstance(cell, Post):
                hop, op = ends[cell]
                _post_one(rank, hop, singles.alike(hop, op), singles.batched, overlap=overlap, batched=batched)
                continue
            for action in cell:
                waits = dict.fromkeys([*rank.last(PIPELINE_LANE), *needs.get(action, [])])
                rank.compute_action(action, tuple(waits))


def _post_one(
    rank: PostedRank, hop: HandOver, end: AlikeTransfers, ends: BatchedEnds, *, overlap: bool, batched: bool
) -> None:
    """Post one end of ``hop`` after what its rank has computed.

    With ``overlap`` it is on the stream of its neighbour, as torch runs ``isend`` and ``irecv``, a communicator each.
    With ``batched`` it is on that of the communicator of all, as torch runs ``batch_isend_irecv``. There a send waits
    for the receives before it and holds none up: NCCL's buffers take it. On four H200s sends last 0.07 to 0.2 ms, while
    their receives begin up to 22 ms later (calibration/results/runs).
    """
    after = tuple(rank.compute.label[-1:])
    if not overlap:
        ends.post_on(rank.lane(PIPELINE_LANE), [(hop, end.op)], after)
        return
    lane = end.stream
    if batched and end.op == SEND:
        after += rank.last("pp_recv")
    elif batched:
        lane = "pp_recv"
    end.post_on(rank.lane(lane), hop.source.microbatch, after)


def _one_by_one(
    ranks: Sequence[PostedRank],
    order: Order,
    hops: list[HandOver],
    sources_of: Sources,
    nbytes: float,
    *,
    overlap: bool,
    batched: bool,
) -> None:
    """Post each transfer alone, at both ends when the sender has made it (torch's ``_add_send_recv``).

    See `_post_one`. With ``overlap`` computation waits for what it needs (``_PipelineScheduleRuntime``); without, for
    all posted before it.

    Ranks take turns to run the slots that are ready. So there is one order of all events that every rank's own agrees
    with, and nothing can deadlock. The rest of an order that cannot be run is posted as it stands.
    """
    singles = SingleTransfers(hops, nbytes)
    sends: dict[Action, list[tuple[HandOver, AlikeTransfers, AlikeTransfers]]] = {}
    receives: dict[Action, list[tuple[Action, str]]] = {}
    for hop in hops:
        send, receive = singles.alike(hop, SEND), singles.alike(hop, RECV)
        sends.setdefault(hop.sent_after, []).append((hop, send, receive))
        receives.setdefault(hop.awaited_by, []).append((hop.source, receive.label(hop.source.microbatch)))
    computed: set[Action] = set()
    for number, action in _in_turns(order, sources_of):
        waits = ranks[number].last(PIPELINE_LANE)
        for source, label in receives.get(action, ()):
            if overlap or source not in computed:
                waits = (*waits, label)
        ranks[number].compute_action(action, waits)
        computed.add(action)
        for hop, *ends in sends.get(action, ()):
            for end in ends:
                _post_one(ranks[end.rank], hop, end, singles.batched, overlap=overlap, batched=batched)


def _in_turns(order: Order, sources_of: Sources) -> Iterator[tuple[int, Action]]:
    """Yield rank and action of all slots, ranks in turn, each slot once it is ready; last those that never are."""
    queues = [deque(slots) for slots in order]
    done: set[Action] = set()
    moving = True
    while moving:
        moving = False
        for rank, queue in enumerate(queues):
            if queue and _is_ready(queue[0], sources_of, done):
                slot = queue.popleft()
                yield from [(rank, action) for action in slot]
                done.update(slot)
                moving = True
    for rank, queue in enumerate(queues):
        yield from [(rank, action) for action in flat(list(queue))]


def _is_ready(slot: Slot, sources_of: Sources, done: Container[Action]) -> bool:
    """Return whether all is ``done`` that a slot needs from others."""
    for action in slot:
        for need in sources_of[action]:
            if need not in done and need not in slot:
                return False
    return True


def _blocking(ranks: Sequence[PostedRank], order: Order, hops: list[HandOver], batching: str, nbytes: float) -> None:
    """Let computation wait for the batches of transfers that are posted between its slots.

    ``batching`` says what is posted together (see `_batches`).
    """
    sends: dict[Action, list[HandOver]] = {}
    receives: dict[Action, list[HandOver]] = {}
    for hop in hops:
        sends.setdefault(hop.sent_after, []).append(hop)
        receives.setdefault(hop.awaited_by, []).append(hop)
    batched = BatchedEnds(nbytes)
    for rank, slots in zip(ranks, order, strict=True):
        previous: tuple[Action, ...] = ()
        for slot in [*slots, ()]:
            ends = [(hop, SEND) for action in previous for hop in sends.get(action, ())]
            ends += [(hop, RECV) for action in slot for hop in receives.get(action, ())]
            after = tuple(rank.compute.label[-1:])
            batches = _batches(ends, batching)
            waits = tuple([batched.post_on(rank.lane(PIPELINE_LANE), batch, after) for batch in batches])
            for action in slot:
                rank.compute_action(action, waits)
                waits = ()
            previous = slot


def _batches(ends: list[PostedEnd], batching: str) -> list[list[PostedEnd]]:
    """Group the ends that are posted between two slots: all in one, or those with one peer together, sends first."""
    if batching == "slot":
        return [ends] if ends else []
    by_peer: dict[int, list[PostedEnd]] = {}
    for hop, op in ends:
        by_peer.setdefault(hop.peer(op), []).append((hop, op))
    return list(by_peer.values())

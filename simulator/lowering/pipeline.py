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
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

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
from simulator.program import COMPUTE_LANE, PointToPointKind, Step
from simulator.recent import RecentValues
from simulator.schedules import Action, Cell, Order, Post, Schedule, Slot

#: Returns the compute step of an action, after steps with these labels.
StepOf = Callable[[Action, tuple[str, ...]], Step]


class PlannedPass(NamedTuple):
    """A pass in its place among transfers: the compute step of ``action`` comes ``after`` steps with these labels."""

    action: Action
    after: tuple[str, ...]

    @property
    def label(self) -> str:
        """The label that its step will have."""
        return str(self.action)


#: Returns the pass of an action, after steps with these labels.
PlanPass = Callable[[Action, tuple[str, ...]], PlannedPass]
#: Steps of a rank by lane, of computation the passes alone.
PostedLanes = dict[str, list[PlannedPass | Step]]
#: Most actions whose lanes are kept, at some 1.2 KB each.
MOST_ACTIONS = 50_000
_recent = RecentValues[list[PostedLanes]](MOST_ACTIONS)


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
    *,
    overlap: bool,
    batched: bool = False,
    apart: bool = False,
) -> list[Lanes]:
    """Return the lanes of every pipeline rank: its computation, and its transfers of ``nbytes`` each.

    ``step_of``: steps of computation, labelled ``str(action)``. With ``overlap`` transfers run on lanes of their own
    and computation waits only for what it needs; without, it waits for every batch posted before it, sends too. It
    matters when a receive is posted: its kernel holds SMs from then on. Its stream matters too, for it may queue there
    behind what another rank has not sent yet: each neighbour has one, or with ``batched`` all share one. ``apart``: a
    forward and a backward in one slot each wait for their own input, as torch runs them one after the other
    (``_step_microbatches``, OVERLAP_F_B). Both are sent after the last either way.

    What the passes compute makes no difference to their transfers. So those of the last few orders are kept.
    """
    key = tuple(map(tuple, order)), schedule, n_stages, nbytes, overlap, batched, apart
    n_actions = sum(len(slot) for slots in order for slot in slots)
    posted = _recent.get(
        key,
        n_actions,
        lambda: _posted(order, schedule, n_stages, nbytes, overlap=overlap, batched=batched, apart=apart),
    )
    return [
        {
            lane: [step_of(*one) if isinstance(one, PlannedPass) else one for one in steps]
            for lane, steps in lanes.items()
        }
        for lanes in posted
    ]


def _posted(
    order: Order, schedule: Schedule, n_stages: int, nbytes: float, *, overlap: bool, batched: bool, apart: bool
) -> list[PostedLanes]:
    """Return the lanes of every pipeline rank; arguments as in `lower`."""
    sources_of = sources_in(order, n_stages)
    hops = transfers(order, schedule, sources_of)
    hops = joined(order, hops, apart) if schedule.joined else hops
    pass_of = _after_late(order, sources_of)
    if schedule.rows is not None:
        return _as_written(schedule.rows, hops, nbytes, pass_of, overlap=overlap, batched=batched)
    if overlap and not schedule.posts_ahead:
        return _as_it_comes(order, hops, nbytes, pass_of)
    batching = schedule.batching(len(order), len({action.microbatch for action in flat(order[0])}))
    if overlap or batching == "single":
        passes: Order = order if schedule.joined else [[(action,) for action in flat(slots)] for slots in order]
        return _one_by_one(passes, hops, sources_of, nbytes, pass_of, overlap=overlap, batched=batched)
    return _blocking(order, hops, batching, nbytes, pass_of)


def _after_late(order: Order, sources_of: Sources) -> PlanPass:
    """Return what plans passes, where an action also waits for results that its own rank computes only later.

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
    if not late:
        return PlannedPass
    return lambda action, after: PlannedPass(action, (*late.get(action, ()), *after))


def _as_it_comes(order: Order, hops: list[HandOver], nbytes: float, pass_of: PlanPass) -> list[PostedLanes]:
    """Return lanes on which each transfer goes on beside computation once its bytes have been computed.

    Its receive is posted already, and holds no SMs until then.
    """
    singles = SingleTransfers(hops, nbytes, as_they_come=True)
    needs = _needs(hops, singles)
    lanes: list[PostedLanes] = [
        {COMPUTE_LANE: [pass_of(action, tuple(needs.get(action, ()))) for action in flat(slots)]} for slots in order
    ]
    # There is a lane per direction and neighbour, and receives are posted in the sender's order, whatever the
    # receiver's own. A lane never waits for what comes later, nor for another neighbour.
    for hop in hops:
        microbatch = hop.source.microbatch
        for op, after in ((SEND, (str(hop.sent_after),)), (RECV, ())):
            alike = singles.alike(hop, op)
            lanes[alike.rank].setdefault(alike.lane, []).append(alike.step(microbatch, after))
    return lanes


def _needs(hops: Sequence[HandOver], singles: SingleTransfers) -> dict[Action, list[str]]:
    """Return the labels of the receives that each action awaits."""
    needs: dict[Action, list[str]] = {}
    for hop in hops:
        needs.setdefault(hop.awaited_by, []).append(singles.alike(hop, RECV).label(hop.source.microbatch))
    return needs


def _as_written(
    rows: Sequence[Sequence[Cell]],
    hops: list[HandOver],
    nbytes: float,
    pass_of: PlanPass,
    *,
    overlap: bool,
    batched: bool,
) -> list[PostedLanes]:
    """Return lanes with sends and receives where the schedule's author has put them.

    Each comes after the computation that is written before it; see `_post_one`.
    """
    singles = SingleTransfers(hops, nbytes)
    ends = {hop.post(op): (hop, op) for hop in hops for op in PointToPointKind}
    needs = _needs(hops, singles)
    written: list[PostedLanes] = []
    for row in rows:
        lanes: PostedLanes = {COMPUTE_LANE: []}
        for cell in row:
            if isinstance(cell, Post):
                hop, op = ends[cell]
                _post_one(lanes, hop, singles.alike(hop, op), singles.batched, overlap=overlap, batched=batched)
                continue
            for action in cell:
                waits = dict.fromkeys([*_last(lanes, PIPELINE_LANE), *needs.get(action, [])])
                lanes[COMPUTE_LANE].append(pass_of(action, tuple(waits)))
        written.append(lanes)
    return written


def _post_one(
    lanes: PostedLanes, hop: HandOver, end: AlikeTransfers, ends: BatchedEnds, *, overlap: bool, batched: bool
) -> None:
    """Post one end of ``hop`` after what its rank has computed.

    With ``overlap`` it is on the stream of its neighbour, as torch runs ``isend`` and ``irecv``, a communicator each.
    With ``batched`` it is on that of the communicator of all, as torch runs ``batch_isend_irecv``. There a send waits
    for the receives before it and holds none up: NCCL's buffers take it. On four H200s sends last 0.07 to 0.2 ms, while
    their receives begin up to 22 ms later (calibration/results/runs).
    """
    after = _last(lanes, COMPUTE_LANE)
    if not overlap:
        lanes.setdefault(PIPELINE_LANE, []).append(ends.step([(hop, end.op)], after))
        return
    lane = end.stream
    if batched and end.op == SEND:
        after += _last(lanes, "pp_recv")
    elif batched:
        lane = "pp_recv"
    lanes.setdefault(lane, []).append(end.step(hop.source.microbatch, after))


def _one_by_one(
    order: Order,
    hops: list[HandOver],
    sources_of: Sources,
    nbytes: float,
    pass_of: PlanPass,
    *,
    overlap: bool,
    batched: bool,
) -> list[PostedLanes]:
    """Return lanes with each transfer alone, at both ends when the sender has made it (torch's ``_add_send_recv``).

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
    lanes: list[PostedLanes] = [{COMPUTE_LANE: []} for _ in order]
    computed: set[Action] = set()
    for rank, action in _in_turns(order, sources_of):
        waits = _last(lanes[rank], PIPELINE_LANE)
        for source, label in receives.get(action, ()):
            if overlap or source not in computed:
                waits = (*waits, label)
        lanes[rank][COMPUTE_LANE].append(pass_of(action, waits))
        computed.add(action)
        for hop, *ends in sends.get(action, ()):
            for end in ends:
                _post_one(lanes[end.rank], hop, end, singles.batched, overlap=overlap, batched=batched)
    return lanes


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


def _blocking(order: Order, hops: list[HandOver], batching: str, nbytes: float, pass_of: PlanPass) -> list[PostedLanes]:
    """Return lanes on which computation waits for the batches of transfers that are posted between its slots.

    ``batching`` says what is posted together (see `_batches`).
    """
    sends: dict[Action, list[HandOver]] = {}
    receives: dict[Action, list[HandOver]] = {}
    for hop in hops:
        sends.setdefault(hop.sent_after, []).append(hop)
        receives.setdefault(hop.awaited_by, []).append(hop)
    lanes: list[PostedLanes] = []
    batched = BatchedEnds(nbytes)
    for slots in order:
        compute: list[PlannedPass | Step] = []
        posted: list[PlannedPass | Step] = []
        previous: tuple[Action, ...] = ()
        for slot in [*slots, ()]:
            ends = [(hop, SEND) for action in previous for hop in sends.get(action, ())]
            ends += [(hop, RECV) for action in slot for hop in receives.get(action, ())]
            after = (str(previous[-1]),) if previous else ()
            gap = [batched.step(batch, after) for batch in _batches(ends, batching)]
            posted += gap
            waits = tuple([step.label for step in gap])
            for action in slot:
                compute.append(pass_of(action, waits))
                waits = ()
            previous = slot
        lanes.append({COMPUTE_LANE: compute, PIPELINE_LANE: posted} if posted else {COMPUTE_LANE: compute})
    return lanes


def _batches(ends: list[PostedEnd], batching: str) -> list[list[PostedEnd]]:
    """Group the ends that are posted between two slots: all in one, or those with one peer together, sends first."""
    if batching == "slot":
        return [ends] if ends else []
    by_peer: dict[int, list[PostedEnd]] = {}
    for hop, op in ends:
        by_peer.setdefault(hop.peer(op), []).append((hop, op))
    return list(by_peer.values())


def _last(lanes: PostedLanes, lane: str) -> tuple[str, ...]:
    """Return the label of the last step of a lane so far, if any."""
    steps = lanes.get(lane)
    return (steps[-1].label,) if steps else ()

"""Results that travel between pipeline ranks, and which action needs which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simulator.lowering.posted_lane import PostedLane
from simulator.program import (
    Axis,
    Batch,
    PointToPoint,
    PointToPointKind,
    Purpose,
    Step,
)
from simulator.schedules import Action, Order, Post, Schedule, Slot, requires

SEND, RECV = PointToPointKind.SEND, PointToPointKind.RECV

DIRECTION = {"F": "fwd", "B": "bwd", "I": "bwd"}
#: An end of a transfer as ``torch.distributed.pipelining`` writes it.
_VERB = {SEND: "SEND", RECV: "RECV"}

#: A rank, an end of its transfers, and their direction.
End = tuple[int, PointToPointKind, str]
#: Action -> those whose results it needs.
Sources = Mapping[Action, Sequence[Action]]


class HandOver(NamedTuple):
    """The result of ``source``, made on pipeline rank ``sender``, travels to ``target`` on rank ``receiver``.

    It is sent once ``sent_after`` has ended, and ``awaited_by`` does not start before it has come. These are ``source``
    and ``target``, or the passes that have them as parts.
    """

    source: Action
    target: Action
    sender: int
    receiver: int
    sent_after: Action
    awaited_by: Action

    def comm(
        self, op: PointToPointKind, nbytes: float, *, name_peer: bool = False, as_it_comes: bool = False
    ) -> PointToPoint:
        """Return one end of the transfer; both ends carry the source action as their tag."""
        peer = self.peer(op)
        name = f"{op}_{DIRECTION[self.source.kind]}" + (f"_{peer}" if name_peer else "")
        return PointToPoint(name, op, nbytes, Axis.PP, Purpose.PIPELINE, peer, str(self.source), as_it_comes)

    def rank(self, op: PointToPointKind) -> int:
        """Return the pipeline rank that calls this end."""
        return self.sender if op is SEND else self.receiver

    def peer(self, op: PointToPointKind) -> int:
        """Return the pipeline rank that calls the other end."""
        return self.receiver if op is SEND else self.sender

    def post(self, op: PointToPointKind) -> Post:
        """Return one end as schedules write it."""
        stage = self.source.stage if op is SEND else self.target.stage
        return Post.from_source(self.source, stage, _VERB[op])

    def label(self, op: PointToPointKind) -> str:
        """Return the name of one end in ``torch.distributed.pipelining``: 0SEND_F3, 1RECV_F3."""
        return str(self.post(op))


#: A hand-over, and the end of it that a rank posts.
PostedEnd = tuple[HandOver, PointToPointKind]


class AlikeTransfers(NamedTuple):
    """Ends of transfers that differ in their micro-batch, which ends their labels and tags.

    ``rank`` posts them, and ``op`` says whether they send or receive. ``stream``: that of the communicator with the
    neighbour. ``lane``: the track of their spans. ``label_stem`` and ``tag_stem`` are labels and tags without the
    micro-batch. ``prototype`` is the first of their steps.
    """

    op: PointToPointKind
    rank: int
    stream: str
    lane: str
    label_stem: str
    tag_stem: str
    prototype: Step

    def post_on(self, lane: PostedLane[Step], microbatch: int, after: tuple[str, ...]) -> None:
        """Post the end for a micro-batch on a lane, after other steps."""
        kind, tag = id(self.prototype), f"{self.tag_stem}{microbatch}"
        lane.post(kind, self.prototype, microbatch, self.label(microbatch), after, (tag,))

    def label(self, microbatch: int) -> str:
        """Return the label of the end for a micro-batch."""
        return f"{self.label_stem}{microbatch}"


class AlikeBatches(NamedTuple):
    """Batches whose transfers differ in their micro-batches alone, which end labels and tags; fields have no number.

    ``prototype`` is the first of their steps.
    """

    label_stems: tuple[str, ...]
    tag_stems: tuple[str, ...]
    prototype: Step


class BatchedEnds:
    """Ends of transfers of ``nbytes`` each, posted in batches."""

    def __init__(self, nbytes: float) -> None:
        self._nbytes = nbytes
        self._alike: dict[tuple[tuple[PointToPointKind, str, int, int], ...], AlikeBatches] = {}

    def post_on(self, lane: PostedLane[Step], ends: Sequence[PostedEnd], after: tuple[str, ...]) -> str:
        """Post ``ends`` together on a lane, after other steps; return the label of their step."""
        key = tuple([(op, hop.source.kind, hop.source.stage, hop.target.stage) for hop, op in ends])
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = self._first_of(ends)
        numbers = [hop.source.microbatch for hop, _ in ends]
        label = "+".join([f"{stem}{number}" for stem, number in zip(alike.label_stems, numbers, strict=True)])
        tags = tuple([f"{stem}{number}" for stem, number in zip(alike.tag_stems, numbers, strict=True)])
        lane.post(id(alike.prototype), alike.prototype, -1, label, after, tags)
        return label

    def _first_of(self, ends: Sequence[PostedEnd]) -> AlikeBatches:
        batch = Batch(tuple([hop.comm(op, self._nbytes) for hop, op in ends]))
        labels, tags = zip(*[(hop.post(op).stem, hop.source.stem) for hop, op in ends], strict=True)
        return AlikeBatches(labels, tags, Step("+".join([hop.label(op) for hop, op in ends]), batch))


class SingleTransfers:
    """Ends of transfers of ``nbytes`` each, each end a step of its own; those alike differ in tag, label, micro-batch.

    ``as_they_come``: receives are posted when their bytes come. ``batched`` makes the same ends for batches.
    """

    def __init__(self, hops: Sequence[HandOver], nbytes: float, *, as_they_come: bool = False) -> None:
        self.batched = BatchedEnds(nbytes)
        self._nbytes, self._several, self._as_they_come = nbytes, _several_peers(hops), as_they_come
        self._alike: dict[tuple[PointToPointKind, str, int, int], AlikeTransfers] = {}

    def alike(self, hop: HandOver, op: PointToPointKind) -> AlikeTransfers:
        """Return the ends that differ from one end of ``hop`` in the micro-batch alone."""
        stage, kind, _ = hop.source
        key = op, kind, stage, hop.target.stage
        alike = self._alike.get(key)
        if alike is None:
            name_peer = (hop.rank(op), op, DIRECTION[kind]) in self._several
            as_it_comes = self._as_they_come and op is RECV
            comm = hop.comm(op, self._nbytes, name_peer=name_peer, as_it_comes=as_it_comes)
            prototype = Step(hop.label(op), comm, microbatch=hop.source.microbatch, stage=stage)
            place = hop.rank(op), f"pp_{hop.peer(op)}", comm.lane
            alike = self._alike[key] = AlikeTransfers(op, *place, hop.post(op).stem, hop.source.stem, prototype)
        return alike


def _several_peers(hops: Sequence[HandOver]) -> set[End]:
    """Return the (rank, op, direction) with more than one neighbour, as in a V. Their lanes name the neighbour."""
    peers: dict[End, set[int]] = {}
    ways = {(hop.sender, hop.receiver, hop.source.kind) for hop in hops}
    for sender, receiver, kind in ways:
        peers.setdefault((sender, SEND, DIRECTION[kind]), set()).add(receiver)
        peers.setdefault((receiver, RECV, DIRECTION[kind]), set()).add(sender)
    return {end for end, neighbours in peers.items() if len(neighbours) > 1}


def flat(slots: list[Slot]) -> list[Action]:
    """Return the actions of a rank without its slots."""
    return [action for slot in slots for action in slot]


def sources_in(order: Order, n_stages: int) -> Sources:
    """Return, for each action, the actions of ``order`` whose results it needs."""
    present: dict[tuple[int, str, int], Action] = {action: action for slots in order for action in flat(slots)}
    #: By stage and kind, stages and kinds of what is needed, all of the same micro-batch.
    needs: dict[tuple[int, str], list[tuple[int, str]]] = {}
    sources_of: dict[Action, list[Action]] = {}
    for action in present.values():
        stage, kind, microbatch = action
        if (stage, kind) not in needs:
            needs[stage, kind] = [source[:2] for need in requires(action, n_stages) for source in need]
        sources = [present.get((*source, microbatch)) for source in needs[stage, kind]]
        sources_of[action] = [source for source in sources if source is not None]
    return sources_of


def transfers(order: Order, schedule: Schedule, sources_of: Sources) -> list[HandOver]:
    """Return the results that have to travel between ranks, in the order in which each sender makes them."""
    p = len(order)
    rank_of = {stage: schedule.rank_of(stage, p) for stage in {action.stage for action in sources_of}}
    targets: dict[Action, list[Action]] = {}
    for target, sources in sources_of.items():
        for source in sources:
            targets.setdefault(source, []).append(target)
    return [
        HandOver(source, target, rank, rank_of[target.stage], source, target)
        for rank, slots in enumerate(order)
        for source in flat(slots)
        for target in targets.get(source, ())
        if rank_of[target.stage] != rank
    ]


def joined(order: Order, hops: list[HandOver], apart: bool) -> list[HandOver]:
    """Return the hand-overs where a slot is one pass.

    Its first action awaits all that it needs, unless ``apart``; results are sent after the last.
    """
    first, last = ({action: slot[end] for slots in order for slot in slots for action in slot} for end in (0, -1))
    return [
        hop._replace(awaited_by=hop.target if apart else first[hop.target], sent_after=last[hop.source]) for hop in hops
    ]

"""From a schedule's actions to lanes: pure passes that add sends and receives.

A schedule says only what each rank computes. `transfers` derives from the one rule of dependence what has to travel;
`overlapped` and `blocking` post it, in the background or as Megatron's batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from simulator.program import Batch, Comm, Step
from simulator.program.ops import COMPUTE_LANE
from simulator.schedules import Action, Order, Schedule, requires

#: lane -> steps of one pipeline rank
Lanes = dict[str, list[Step]]

_DIRECTION = {"F": "fwd", "B": "bwd", "I": "bwd"}


@dataclass(frozen=True)
class Hop:
    """The result of ``source``, made on pipeline rank ``sender``, travels to ``target`` on rank ``receiver``."""

    source: Action
    target: Action
    sender: int
    receiver: int

    def comm(self, op: str, nbytes: float) -> Comm:
        """This end of the transfer; both ends carry the source action as their tag."""
        peer = self.receiver if op == "send" else self.sender
        name = f"{op}_{_DIRECTION[self.source.kind]}"
        return Comm(name, op, nbytes, "pp", "pp", peer=peer, tag=str(self.source))

    def label(self, op: str) -> str:
        """As in ``torch.distributed.pipelining``: 0SEND_F3, 1RECV_F3."""
        stage = self.source.stage if op == "send" else self.target.stage
        return f"{stage}{op.upper()}_{self.source.kind}{self.source.microbatch}"


def transfers(order: Order, schedule: Schedule, n_stages: int) -> list[Hop]:
    """Everything that has to travel between ranks, in the order in which each sender makes it."""
    p = len(order)
    targets: dict[Action, list[Action]] = {}
    for slots in order:
        for action in (action for slot in slots for action in slot):
            for source in requires(action, n_stages):
                targets.setdefault(source, []).append(action)
    return [
        Hop(source, target, rank, receiver)
        for rank, slots in enumerate(order)
        for slot in slots
        for source in slot
        for target in targets.get(source, ())
        if (receiver := schedule.rank_of(target.stage, p)) != rank
    ]


def lower(
    order: Order,
    schedule: Schedule,
    n_stages: int,
    nbytes: float,
    step_of: Callable[[Action], Step],
    *,
    overlap: bool,
) -> list[Lanes]:
    """Lanes of every pipeline rank: its computation, and the transfers of ``nbytes`` each that it takes.

    ``step_of(action)``: the compute step, labelled ``str(action)``. With ``overlap`` transfers run on lanes of their
    own and computation waits only for what it needs; without, it waits for every batch posted before it, sends too.
    """
    hops = transfers(order, schedule, n_stages)
    if overlap:
        return _overlapped(order, hops, nbytes, step_of)
    return _blocking(order, hops, schedule.batching, nbytes, step_of)


def _overlapped(order: Order, hops: list[Hop], nbytes: float, step_of: Callable[[Action], Step]) -> list[Lanes]:
    lanes: list[Lanes] = [{COMPUTE_LANE: []} for _ in order]
    needs: dict[Action, list[str]] = {}
    for hop in hops:
        needs.setdefault(hop.target, []).append(hop.label("recv"))
    for rank, slots in enumerate(order):
        for action in (action for slot in slots for action in slot):
            lanes[rank][COMPUTE_LANE].append(_wait(step_of(action), needs.get(action, [])))
    # Receives are posted in the sender's order, whatever the receiver's own: a lane never waits for what comes later.
    for hop in hops:
        for rank, op, after in ((hop.sender, "send", (str(hop.source),)), (hop.receiver, "recv", ())):
            comm = hop.comm(op, nbytes)
            step = Step(hop.label(op), comm, after, microbatch=hop.source.microbatch, stage=hop.source.stage)
            lanes[rank].setdefault(comm.lane, []).append(step)
    return lanes


def _blocking(
    order: Order, hops: list[Hop], batching: str, nbytes: float, step_of: Callable[[Action], Step]
) -> list[Lanes]:
    sends: dict[Action, list[Hop]] = {}
    receives: dict[Action, list[Hop]] = {}
    for hop in hops:
        sends.setdefault(hop.source, []).append(hop)
        receives.setdefault(hop.target, []).append(hop)
    lanes: list[Lanes] = []
    for slots in order:
        compute: list[Step] = []
        posted: list[Step] = []
        previous: tuple[Action, ...] = ()
        for slot in [*slots, ()]:
            ends = [(hop, "send") for action in previous for hop in sends.get(action, ())]
            ends += [(hop, "recv") for action in slot for hop in receives.get(action, ())]
            after = (str(previous[-1]),) if previous else ()
            gap = [_post(batch, nbytes, after) for batch in _batches(ends, batching)]
            posted += gap
            waits = [step.label for step in gap]
            for action in slot:
                compute.append(_wait(step_of(action), waits))
                waits = []
            previous = slot
        lanes.append({COMPUTE_LANE: compute, "pp": posted} if posted else {COMPUTE_LANE: compute})
    return lanes


def _batches(ends: list[tuple[Hop, str]], batching: str) -> list[list[tuple[Hop, str]]]:
    """Group what is posted between two slots: all of it, or what shares a peer, sends first."""
    if batching == "slot":
        return [ends] if ends else []
    by_peer: dict[int, list[tuple[Hop, str]]] = {}
    for hop, op in ends:
        by_peer.setdefault(hop.receiver if op == "send" else hop.sender, []).append((hop, op))
    return list(by_peer.values())


def _post(ends: list[tuple[Hop, str]], nbytes: float, after: tuple[str, ...]) -> Step:
    label = "+".join(hop.label(op) for hop, op in ends)
    return Step(label, Batch(tuple(hop.comm(op, nbytes) for hop, op in ends)), after)


def _wait(step: Step, labels: list[str]) -> Step:
    return replace(step, after=(*step.after, *labels)) if labels else step

"""Actions, slots and schedules of pipelines, and the one rule of what an action waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple


class Action(NamedTuple):
    """One pass of one micro-batch through one stage.

    ``kind``: F forward, B whole backward, I input gradient, W weight gradient. Text form as in
    ``torch.distributed.pipelining``:

    >>> str(Action(2, "F", 0)), Action.parse("2F0")
    ('2F0', Action(stage=2, kind='F', microbatch=0))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def stem(self) -> str:
        """Text form without the micro-batch, which ends it."""
        return f"{self.stage}{self.kind}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action of a text, the inverse of ``str``. Raises ValueError on anything else."""
        for kind in "FBIW":
            stage, letter, microbatch = text.partition(kind)
            if letter and stage.isdecimal() and microbatch.isdecimal():
                return cls(int(stage), kind, int(microbatch))
        raise ValueError(f"not an action: {text!r}")


class Post(NamedTuple):
    """One end of a transfer where a schedule writes its communication: ``op`` SEND or RECV of what F or B gives.

    >>> str(Post(2, "SEND", "F", 0))
    '2SEND_F0'
    """

    stage: int
    op: str
    kind: str
    microbatch: int

    @classmethod
    def from_source(cls, source: Action, stage: int, op: str) -> Post:
        """Return the end on ``stage`` of the transfer of what ``source`` gives: B and I alike give a gradient."""
        return cls(stage, op, "F" if source.kind == "F" else "B", source.microbatch)

    def __str__(self) -> str:
        return f"{self.stem}{self.microbatch}"

    @property
    def stem(self) -> str:
        """Text form without the micro-batch, which ends it."""
        return f"{self.stage}{self.op}_{self.kind}"


#: Actions that a rank runs without communicating in between: mostly one, a forward and a backward in interleaved 1F1B.
Slot = tuple[Action, ...]
#: Per rank, the slots in order.
Order = list[list[Slot]]
#: Entry of a rank's row where communication is written too.
Cell = Slot | Post
#: Actions of which any one gives what is needed: a stage's gradient comes from a whole backward or an input gradient.
Need = tuple[Action, ...]


def requires(action: Action, n_stages: int) -> list[Need]:
    """Return the actions that ``action`` needs: the one rule that building, checking and drawing all ask.

    A model has ``n_stages`` stages; stages of a second copy of the model are numbered from there on.
    """
    stage, kind, microbatch = action
    place = stage % n_stages
    if kind == "F":
        return [(Action(stage - 1, "F", microbatch),)] if place > 0 else []
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    needs: list[Need] = [(Action(stage, "F", microbatch),)]
    if place < n_stages - 1:
        needs.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
    return needs


def in_a_loop(stage: int, p: int) -> int:
    """Return the rank of a stage where each chunk of the model goes round all ranks: stage mod p."""
    return stage % p


def in_a_v(stage: int, p: int) -> int:
    """Return the rank of a stage where every other chunk goes back: stages r and 2p - 1 - r on rank r."""
    turn, place = divmod(stage, p)
    return p - 1 - place if turn % 2 else place


@dataclass(frozen=True)
class Times:
    """Seconds and bytes of passes, to which a schedule can be tuned; one entry per stage.

    ``forward_s``, ``input_s`` and ``weight_s``: seconds of a micro-batch. ``forward_bytes``: activations that a forward
    takes, in any unit. ``split_bytes``: those that its input gradient leaves to the weight gradient, in the same unit.
    ``hop_s``: seconds of a transfer to the next stage. ``memory_limit``: activation memory that a rank may hold, as a
    multiple of 1F1B's peak.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    forward_bytes: tuple[float, ...]
    split_bytes: tuple[float, ...]
    hop_s: float = 0.0
    memory_limit: float = 1.0

    @classmethod
    def equal(
        cls, stages: int, f: float, i: float, w: float, hop_s: float = 0.0, limit: float = 1.0, kept: float = 1.0
    ) -> Times:
        """Return the times of equal stages; ``kept`` is a share of what a forward takes."""
        n = stages
        return cls((f,) * n, (i,) * n, (w,) * n, (1.0,) * n, (kept,) * n, hop_s, limit)


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: a pure function to ordered actions, and what its authors claim of it.

    The order and its bounds. ``order(p, m, v)``: slots per rank for p pipeline ranks, m micro-batches, v chunks per
    rank; stages number p * v. ``check(p, m, v)``: None, or the reason why the schedule cannot be built, naming what
    would work. ``rank_of(stage, p)``: the rank that holds a stage. ``chunks``: chunks per rank, None where the user
    chooses. ``search(p, m, v, times)``: the order where it depends on the seconds of passes; ``order`` is that for
    equal ones.

    Claims; None where nothing is claimed. ``bubble(p, m, v, f, i, w)``: idle time over busy time of one step with equal
    stages and free communication. A chunk's forward, input and weight gradient last f, i and w. Where the backward is
    split the claim is exact for f = i = w. ``peak(p, m, v, rank)``: the peak of micro-batch chunks held on a rank.
    ``steady``: the claim is of the period between steps that follow one another, not of one step alone.
    ``weight_versions(p, m, rank)``: versions of its weights that a rank keeps.

    Passes. ``splits``: input and weight gradients are actions of their own. ``joined``: the actions of a slot are one
    pass, which starts when all have what they need, and sends when all have ended. ``copies``: 2 where every stage is
    on two ranks, for micro-batches that go opposite ways; the second copy's stages are numbered from p * v on.
    ``drains``: a step's last backward comes before the next step's first forward. Without it steps run on as one long
    step.

    Transfers. ``batching(p, m)``: how blocking point-to-point is posted between two slots. ``peer`` batches what goes
    to and comes from one neighbour (Megatron's ``send_forward_recv_backward``). ``slot`` batches all of it
    (``send_forward_backward_recv_forward_backward``). ``single`` posts each transfer at both ends when it is sent
    (torch's ``_add_send_recv``), which suits any order. ``posts_ahead``: transfers beside computation are posted ahead,
    each on its neighbour's stream. So do torch's ``_PipelineScheduleRuntime`` and Megatron-LM's ``overlap_p2p_comm``,
    which is for interleaved stages only. Without it a receive is posted as its bytes come. It is a fact of the
    schedule, whoever plays it; whose stages hold what, and which passes the first one splits, is
    `Workload.stage_runtime`.

    A schedule read from a file has ``size``, its only p, m, v. Its ``rows`` are its slots with the sends
    and receives that its author has put between them, if any.
    """

    name: str
    paper: str
    order: Callable[[int, int, int], Order]
    bubble: Callable[[int, int, int, float, float, float], float | None]
    peak: Callable[[int, int, int, int], int | None]
    check: Callable[[int, int, int], str | None]
    rank_of: Callable[[int, int], int] = in_a_loop
    batching: Callable[[int, int], str] = lambda p, m: "single"
    posts_ahead: bool = False
    chunks: int | None = 1
    splits: bool = False
    joined: bool = False
    copies: int = 1
    steady: bool = False
    drains: bool = True
    weight_versions: Callable[[int, int, int], int] = lambda p, m, rank: 1
    search: Callable[[int, int, int, Times], Order] | None = None
    size: tuple[int, int, int] | None = None
    rows: tuple[tuple[Cell, ...], ...] | None = None

    def tuned(self, times: Times) -> Schedule:
        """Return this schedule for passes that take ``times``; itself where it does not depend on them."""
        search = self.search
        return self if search is None else replace(self, order=lambda p, m, v: search(p, m, v, times))

    def over(self, p: int, m: int, v: int, steps: int) -> Order:
        """Return the slots of several steps in a row; micro-batches are numbered through."""
        return in_a_row(self.order(p, m, v), m, steps) if self.drains else self.order(p, m * steps, v)


def in_a_row(order: Order, m: int, steps: int) -> Order:
    """Return the ``order`` of a step ``steps`` times; micro-batches are numbered through, ``m`` for each step."""
    if steps == 1:
        return order
    return [
        [
            tuple([action._replace(microbatch=action.microbatch + step * m) for action in slot])
            for step in range(steps)
            for slot in slots
        ]
        for slots in order
    ]


def one_chunk(p: int, m: int, v: int) -> str | None:
    """Return why a schedule with one stage per rank cannot be built; None: it can."""
    return None if v == 1 else f"needs 1 chunk per rank, got {v}; for more chunks use schedule: interleaved"


def two_chunks(p: int, m: int, v: int) -> str | None:
    """Return why a schedule with a V of stages cannot be built; None: it can."""
    return None if v == 2 else f"needs 2 chunks per rank, got {v}"


def filled(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """Return idle over busy time where ranks idle only while the pipeline fills and drains, p - 1 chunks each: (p - 1)
    / (v m)."""
    return (p - 1) / (v * m)

"""What a pipeline schedule is made of, and the one rule of what an action waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of ``str``. Raises ValueError on anything else."""
        for kind in "FBIW":
            stage, found, microbatch = text.partition(kind)
            if found:
                return cls(int(stage), kind, int(microbatch))
        raise ValueError(f"not an action: {text!r}")


#: Actions that a rank runs without communicating in between: mostly one, a forward and a backward in interleaved 1F1B.
Slot = tuple[Action, ...]
#: Per rank, the slots in order.
Order = list[list[Slot]]


def requires(action: Action, n_stages: int) -> list[Action]:
    """The actions whose results ``action`` needs: the one rule that building, checking and drawing all ask."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    needs = [Action(stage, "F", microbatch)]
    if stage < n_stages - 1:
        needs.append(Action(stage + 1, kind, microbatch))
    return needs


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: a pure function to ordered actions, and what its authors claim of it.

    ``order(p, m, v)``: slots per rank for p pipeline ranks, m micro-batches, v chunks per rank; stages number p * v.
    ``rank_of(stage, p)``: the rank that holds a stage.
    ``bubble(p, m, v)``: the claimed idle time over busy time, equal stages and free communication.
    ``peak(p, m, v, rank)``: the claimed peak of micro-batch chunks held on a rank.
    ``check(p, m, v)``: None, or the reason why the schedule cannot be built, naming what would work.
    ``batching``: how blocking point-to-point is posted between two slots: ``peer`` batches what goes to and comes from
    one neighbour (Megatron's ``send_forward_recv_backward``), ``slot`` batches all of it
    (``send_forward_backward_recv_forward_backward``).
    """

    name: str
    paper: str
    order: Callable[[int, int, int], Order]
    bubble: Callable[[int, int, int], float]
    peak: Callable[[int, int, int, int], int]
    check: Callable[[int, int, int], str | None]
    rank_of: Callable[[int, int], int] = lambda stage, p: stage % p
    batching: str = "peer"
    chunked: bool = False


def one_chunk(p: int, m: int, v: int) -> str | None:
    """The check of schedules with one stage per rank."""
    return None if v == 1 else f"needs 1 chunk per rank, got {v}; for more chunks use schedule: interleaved"

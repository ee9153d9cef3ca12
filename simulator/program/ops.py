"""Operations of a rank: kernels, communication, and blocks of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

from simulator.program.kernels import Attention, Kernel
from simulator.program.slots import slot_setters
from simulator.program.vocabulary import (
    HOST_LANES,
    Axis,
    CollectiveKind,
    CommKind,
    GraphPlace,
    HostKind,
    PointToPointKind,
    Purpose,
    RecordedKind,
    StepPhase,
)

#: Kernel that attention without a fused kernel has once, each way; a kernel of several has all names, with " + ".
SCORES = ("attn.softmax", "attn.softmax bwd")


@dataclass(frozen=True, slots=True)
class Compute:
    """One kernel. ``phase`` says what it computes, whichever step it is in (see `StepPhase`).

    ``host_waits``: the host issues nothing more before it has ended, for it has to read the result.
    ``carries_checkpoint``: with it is counted what the host does for a recomputation, which sets the random states of
    the forward pass. It is the first kernel of attention that runs again, or else the first kernel.
    ``dequantizes``: the host calls for it in Python, to make a weight of 4 bits whole.
    ``within_call``: the call that launches the kernel before or behind it launches it too, from C++.
    ``graph``: its place in a CUDA graph that launches it, where there is one.
    """

    name: str
    kernel: Kernel
    phase: StepPhase
    host_waits: bool = False
    carries_checkpoint: bool = False
    dequantizes: bool = False
    within_call: bool = False
    graph: GraphPlace = GraphPlace.NONE

    @property
    def computes_attention(self) -> bool:
        """True of a fused kernel of attention and, without one, of the softmax of its scores, which it has once."""
        return isinstance(self.kernel, Attention) or any(name in SCORES for name in self.name.split(" + "))


@dataclass(frozen=True, slots=True)
class Comm:
    """Communication of one rank, as its types below have it.

    ``op`` is the kind of operation, ``axis`` names the groups (see `vocabulary.AXES`).
    ``nbytes`` is the message; what it counts differs by type and is said there.
    """

    name: str
    op: CommKind
    nbytes: float
    axis: str
    purpose: Purpose

    #: Whether NCCL's kernels, which hold SMs, do the work. Copies to and from hosts are made by copy engines and CPUs.
    holds_sms: ClassVar[bool] = True

    @property
    def spins(self) -> bool:
        """True where it holds its SMs while it waits for its other ends."""
        return self.holds_sms

    @property
    def lane(self) -> str:
        """The track of its spans in pictures and traces, which each type names."""
        raise NotImplementedError

    @property
    def category(self) -> str:
        """The use of the rank's time that it counts to (`simulator.timeline.CATEGORIES`)."""
        return str(self.purpose)


@dataclass(frozen=True, slots=True)
class Collective(Comm):
    """One collective, called by all members of a group.

    ``nbytes`` is what nccl-tests calls size: the message of an all-reduce, broadcast or reduce.
    An all-gather counts its total output, a reduce-scatter its total input.
    A gather or scatter counts what its root holds of all.
    A send_recv counts what each rank sends to the next of its group.
    ``stream`` tells lanes of one purpose apart.
    ``host_waits``: in a block the host launches nothing more before it has ended, for it has to read the result.
    ``hooks``: modules whose hooks the host runs with it. ``graph``: its place in a CUDA graph, as of `Compute`.
    """

    op: CollectiveKind
    algorithm: str = "auto"
    stream: str = ""
    host_waits: bool = False
    hooks: int = 0
    graph: GraphPlace = GraphPlace.NONE

    @property
    def lane(self) -> str:
        """The track of its purpose, or of its stream where the purpose has several (``dp_gather``)."""
        return f"{self.purpose}_{self.stream}" if self.stream else str(self.purpose)


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """An all-to-all, which may be uneven; ``nbytes`` is the whole send buffer of a rank, mean over the group.

    Member i sends the share ``send_shares[i]`` of all bytes, those of all members together.
    The share ``receive_shares[j]`` of what each sends goes to member j. Empty shares are equal ones.
    ``per_node`` > 0: that share of the bytes travels to every other node, and is copied on to its members there.
    """

    op: CollectiveKind = field(default=CollectiveKind.ALL_TO_ALL, init=False)
    send_shares: tuple[float, ...] = ()
    receive_shares: tuple[float, ...] = ()
    per_node: float = 0.0


@dataclass(frozen=True, slots=True)
class PointToPoint(Comm):
    """One end of a transfer of ``nbytes`` between two members of a group.

    ``peer`` is the other end's position in the group. Two ends meet when group, positions and ``tag`` agree.
    ``as_it_comes``: a receive that is posted when its bytes come, wherever it is in its lane.
    """

    op: PointToPointKind
    peer: int
    tag: str = ""
    as_it_comes: bool = False

    @property
    def sends(self) -> bool:
        """True for the sending end."""
        return self.op == PointToPointKind.SEND

    @property
    def spins(self) -> bool:
        """True for a receive that waits on the GPU for its bytes, and is not posted when they come.

        NCCL's send leaves its bytes in buffers (4 MiB for each of up to 32 channels over NVLink) and ends.
        """
        return not self.sends and not self.as_it_comes

    @property
    def lane(self) -> str:
        """The track of transfers of its name, such as ``pp_send_fwd``."""
        return f"{self.purpose}_{self.name}"


@dataclass(frozen=True, slots=True)
class HostOperation(Comm):
    """An operation with hosts; ``nbytes`` are those that the rank moves, or that an update reads and writes.

    ``stream`` tells lanes of one direction apart.
    ``threads`` are those of the rank's process that update; 0 is as many as keep the host's memory busy.
    """

    op: HostKind
    stream: str = ""
    threads: int = 0

    holds_sms: ClassVar[bool] = False

    @property
    def updates(self) -> bool:
        """True where a CPU computes, and nothing leaves or reaches the GPU."""
        return self.op in (HostKind.HOST_UPDATE, HostKind.SERVER_UPDATE)

    @property
    def category(self) -> str:
        """To the rank that waits, the servers' work between a push and a pull is a part of that exchange."""
        return str(Purpose.DATA if self.op == HostKind.SERVER_UPDATE else self.purpose)

    @property
    def lane(self) -> str:
        """The track of its direction, or of its stream in that direction (``d2h_grads``)."""
        return f"{HOST_LANES[self.op]}_{self.stream}" if self.stream else HOST_LANES[self.op]


@dataclass(frozen=True, slots=True)
class RecordedWork(Comm):
    """Work of ``seconds`` that a profiler recorded: a kernel or a copy of a CUDA stream, or work of the host.

    It takes nothing from other lanes, so that streams run beside each other as they did when they were recorded.
    ``stream`` names its track. It belongs to no parallelism and moves no bytes that count: ``purpose`` is only that of
    other work beside kernels, and `category` says what its time is.
    """

    op: RecordedKind = field(default=RecordedKind.RECORDED, init=False)
    nbytes: float = field(default=0.0, init=False)
    axis: str = field(default=Axis.RANK, init=False)
    purpose: Purpose = field(default=Purpose.OFFLOAD, init=False)
    seconds: float = 0.0
    stream: str = ""

    holds_sms: ClassVar[bool] = False

    @property
    def lane(self) -> str:
        """The track of its stream."""
        return self.stream

    @property
    def category(self) -> str:
        """The rank's own work."""
        return "compute"


@dataclass(frozen=True, slots=True)
class Beside:
    """A collective that starts, and goes on beside the kernels that the compute lane runs meanwhile.

    The next op of the block waits for both.
    Ring exchanges are written so, and tensor-parallel transfers beside the product of another chunk.
    """

    comm: Collective
    kernels: tuple[Compute, ...]


@dataclass(frozen=True)
class Block:
    """Ops that a rank runs one after another, such as the forward pass of a stage.

    They are kernels, collectives that hold the next kernel up, and collectives beside kernels.
    One block object serves all micro-batches, so that its costs are worked out once.
    """

    name: str
    ops: tuple[Compute | Collective | Beside, ...]

    @cached_property
    def comms(self) -> tuple[Collective, ...]:
        """Its collectives, in order."""
        return tuple(comm_of(op) for op in self.ops if not isinstance(op, Compute))


@dataclass(frozen=True)
class Batch:
    """Point-to-point transfers posted together and waited for together (``batch_isend_irecv``)."""

    comms: tuple[PointToPoint, ...]

    @cached_property
    def alike(self) -> tuple[Hashable, ...]:
        """Keys of its transfers, which batches share where they differ in tags alone (`but_tag`)."""
        return tuple(map(but_tag, self.comms))


_SETTERS = slot_setters(PointToPoint)
_but_tag = attrgetter(*[name for name in _SETTERS if name != "tag"])


def but_tag(comm: Comm) -> Hashable:
    """Return a key that communication shares where it differs in the tag alone: programs have many transfers."""
    return _but_tag(comm) if type(comm) is PointToPoint else comm


def quick_key(op: Block | Comm | Batch) -> Hashable:
    """Return a key that transfers, and batches of them, share where they differ in tags alone; else the ``id``."""
    if isinstance(op, Batch):
        return op.alike
    return _but_tag(op) if type(op) is PointToPoint else id(op)


def tags_of(op: Block | Comm | Batch) -> tuple[str, ...]:
    """Return the tags of the transfers of a step's operation, in order; none of anything else."""
    if isinstance(op, Batch):
        return tuple([comm.tag if isinstance(comm, PointToPoint) else "" for comm in op.comms])
    return (op.tag,) if isinstance(op, PointToPoint) else ()


def with_tags(op: Block | Comm | Batch) -> Callable[[tuple[str, ...]], Block | Comm | Batch]:
    """Return what makes copies of ``op`` whose transfers have other tags; anything else it returns itself."""
    if isinstance(op, PointToPoint):
        with_tag = _transfer_maker(op)
        return lambda tags: with_tag(*tags)
    if isinstance(op, Batch):
        makers = [_transfer_maker(comm) for comm in op.comms]
        return lambda tags: Batch(tuple([maker(tag) for maker, tag in zip(makers, tags, strict=True)]))
    return lambda tags: op


def _transfer_maker(comm: PointToPoint) -> Callable[[str], PointToPoint]:
    """Return a maker of copies of ``comm`` with another tag, ten times as fast as `dataclasses.replace`."""
    kept = [(setter, getattr(comm, name)) for name, setter in _SETTERS.items() if name != "tag"]
    set_tag = _SETTERS["tag"]

    def with_tag(tag: str) -> PointToPoint:
        other = object.__new__(PointToPoint)
        for setter, value in kept:
            setter(other, value)
        set_tag(other, tag)
        return other

    return with_tag


def comm_of(op: Collective | Beside) -> Collective:
    """Return the collective of a block's op that has one."""
    return op.comm if isinstance(op, Beside) else op


def kernels_of(op: Compute | Collective | Beside) -> tuple[Compute, ...]:
    """Return the kernels of a block's op."""
    match op:
        case Compute():
            return (op,)
        case Beside():
            return op.kernels
        case Collective():
            return ()


def comms_of(op: Block | Comm | Batch) -> tuple[Comm, ...]:
    """Return the communication inside one step's operation, in order."""
    return (op,) if isinstance(op, Comm) else op.comms

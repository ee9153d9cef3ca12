"""The program that the engine plays.

A `Program` gives every rank a `Role`; ranks that do the same work share one. A role has lanes (CUDA streams), a lane
is a tuple of `Step`s, and a step runs one `Block` of kernels, one `Comm`, or one `Batch` of point-to-point transfers.
Order within a lane is program order; ``after`` edges are the only order between lanes of a rank; ranks meet only in
communication. Groups are named by axis (``tp``, ``dp``, ``pp`` ...), so that a role need not know who its peers are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from simulator.errors import SimulatorError
from simulator.program.kernels import Kernel

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "reduce", "scatter", "gather", "send_recv", "barrier"),
)
POINT_TO_POINT = ("send", "recv")
#: What a rank does with hosts, alone, and the lane it is drawn on: to and from the memory of its own node's host,
#: between that and its drives, an optimizer step of the host's CPU; to and from the memory of all parameter servers.
#: Their optimizer step waits for the whole group of those that call it.
UPDATES = ("host_update", "server_update")
HOST_LANES = {
    "to_host": "d2h",
    "from_host": "h2d",
    "to_nvme": "nvme_write",
    "from_nvme": "nvme_read",
    "host_update": "cpu",
    "push": "push",
    "pull": "pull",
    "server_update": "server",
}
COMPUTE_LANE = "compute"


@dataclass(frozen=True, slots=True)
class Compute:
    """One kernel. ``phase`` is F (forward), R (recompute), B (input gradient), W (weight gradient), O (optimizer)."""

    name: str
    kernel: Kernel
    phase: str


@dataclass(frozen=True, slots=True)
class Comm:
    """One collective, or one end of a transfer.

    ``nbytes`` is what nccl-tests calls size: the message of an all-reduce, broadcast, reduce or send, the total output
    of an all-gather, the total input of a reduce-scatter, what the root of a gather or scatter holds of all, the whole
    send buffer of a rank in an all-to-all, what each rank sends to the next of its group in a send_recv; with hosts
    what the rank moves, or what an update reads and writes in memory.
    ``peer`` is the other end's position in the axis group (send and recv only). ``purpose`` is the parallelism it
    belongs to: tp, cp, ep, pp, dp, or ``offload`` (an update on the host: ``optimizer``). Two ends of a transfer meet
    when axis group, positions and ``tag`` agree.

    An all-to-all may be uneven: of all bytes, the members' ``nbytes`` together, the share ``send_shares[i]`` comes from
    member i, and ``receive_shares[j]`` of each one's goes to member j (empty: equal parts). ``per_node`` > 0: to every
    other node travels that share of the bytes for its members, and is copied on to them there.
    ``host_waits``: in a block, the host launches nothing more before it has ended, for it has to read the result.
    ``as_it_comes``: a receive that stands for one posted when its bytes come, wherever it is in its lane.
    """

    name: str
    op: str
    nbytes: float
    axis: str
    purpose: str
    algorithm: str = "auto"
    peer: int = -1
    tag: str = ""
    stream: str = ""
    send_shares: tuple[float, ...] = ()
    receive_shares: tuple[float, ...] = ()
    per_node: float = 0.0
    host_waits: bool = False
    as_it_comes: bool = False

    @property
    def holds_sms(self) -> bool:
        """Whether it is the work of NCCL's kernels, which hold SMs. Copies from and to the memory of hosts, those of
        parameter servers too, are made by copy engines and CPUs."""
        return self.op not in HOST_LANES

    @property
    def spins(self) -> bool:
        """Whether it holds its SMs while it waits for its other ends. A send does not: NCCL's leaves its bytes in
        buffers (4 MiB for each of up to 32 channels over NVLink) and ends."""
        return self.holds_sms and self.op != "send" and not self.as_it_comes

    @property
    def lane(self) -> str:
        """The track it is drawn on: one per purpose, for transfers one per name (``pp_send_fwd``), for collectives one
        per ``stream`` where a purpose has several (``dp_gather``), for what is done with hosts one per direction and
        stream (``d2h_grads``)."""
        if self.op in HOST_LANES:
            return f"{HOST_LANES[self.op]}_{self.stream}" if self.stream else HOST_LANES[self.op]
        apart = self.name if self.op in POINT_TO_POINT else self.stream
        return f"{self.purpose}_{apart}" if apart else self.purpose


@dataclass(frozen=True, slots=True)
class Beside:
    """A collective that starts, and goes on beside the kernels that the compute lane runs meanwhile; the next op of the
    block waits for both. Ring exchanges, a tensor-parallel transfer beside the product of another chunk, and whatever
    else hides inside a pass are written so."""

    comm: Comm
    kernels: tuple[Compute, ...]


@dataclass(frozen=True)
class Block:
    """What a rank runs one after another, such as the forward pass of a stage: kernels, collectives that hold the next
    kernel up, and collectives beside kernels.

    One block object serves all micro-batches, so that its costs are worked out once.
    """

    name: str
    ops: tuple[Compute | Comm | Beside, ...]

    @cached_property
    def comms(self) -> tuple[Comm, ...]:
        """Its collectives, in order."""
        return tuple(comm_of(op) for op in self.ops if not isinstance(op, Compute))


@dataclass(frozen=True)
class Batch:
    """Point-to-point transfers posted together and waited for together (``batch_isend_irecv``)."""

    comms: tuple[Comm, ...]


@dataclass(frozen=True)
class Step:
    """One entry of a lane.

    ``after`` holds labels of steps of the same rank that must have ended. ``phase`` is F, B (whole backward),
    I (input gradient), W (weight gradient), O (optimizer) or C (communication); ``stage`` is the model stage
    (chunk * pp + pipeline rank for interleaved schedules), -1 where it has none. ``part`` tells apart what belongs to
    one thing done by parts: the pieces that a pass is cut into, and parts of the parameters on parameter servers.
    Memory: ``alloc_bytes`` are held from the step's start, ``free_bytes`` are given back at its end,
    ``workspace_bytes`` are held only while it runs.
    """

    label: str
    op: Block | Comm | Batch
    after: tuple[str, ...] = ()
    phase: str = "C"
    microbatch: int = -1
    stage: int = -1
    chunk: int = 0
    part: str = ""
    alloc_bytes: float = 0.0
    free_bytes: float = 0.0
    workspace_bytes: float = 0.0


@dataclass(frozen=True)
class Role:
    """What the ranks of one kind do: lane name -> steps."""

    name: str
    lanes: Mapping[str, tuple[Step, ...]]

    def steps(self) -> Iterator[tuple[str, int, Step]]:
        """Every step as (lane, index, step), lane by lane."""
        for lane, steps in self.lanes.items():
            for index, step in enumerate(steps):
                yield lane, index, step


class ProgramError(SimulatorError):
    """A program that breaks its own rules: the builder's fault, or a wrong hand-written file."""


@dataclass(frozen=True)
class Program:
    """Roles, who plays them, and who talks to whom.

    ``role_of[rank]`` indexes ``roles``; ``groups[axis]`` lists disjoint, ordered rank tuples. ``servers`` are the nodes
    on whose hosts parameter servers run, each with an equal part of all parameters.
    """

    roles: tuple[Role, ...]
    role_of: tuple[int, ...]
    groups: Mapping[str, tuple[tuple[int, ...], ...]]
    name: str = "program"
    servers: tuple[int, ...] = ()
    _group_of: dict[str, dict[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def n_ranks(self) -> int:
        return len(self.role_of)

    def group_index(self, axis: str, rank: int) -> int:
        """The index in ``groups[axis]`` of the group that holds ``rank``; -1 where it has none."""
        if axis not in self._group_of:
            self._group_of[axis] = {r: i for i, group in enumerate(self.groups[axis]) for r in group}
        return self._group_of[axis].get(rank, -1)

    def validate(self) -> None:
        """Raise `ProgramError` where the program cannot mean anything: unknown roles, labels, axes or peers."""
        if any(not 0 <= role < len(self.roles) for role in self.role_of):
            raise ProgramError(f"{self.name}: role_of names a role that does not exist")
        for axis, groups in self.groups.items():
            members = [rank for group in groups for rank in group]
            if len(set(members)) != len(members):
                raise ProgramError(f"{self.name}: a rank stands in two groups of axis {axis!r}")
            if any(not 0 <= rank < self.n_ranks for rank in members):
                raise ProgramError(f"{self.name}: axis {axis!r} names a rank outside 0..{self.n_ranks - 1}")
        ranks_of: dict[int, list[int]] = {}
        for rank, role_index in enumerate(self.role_of):
            ranks_of.setdefault(role_index, []).append(rank)
        for role_index, ranks in sorted(ranks_of.items()):
            self._validate_role(self.roles[role_index], ranks)

    def _validate_role(self, role: Role, ranks: list[int]) -> None:
        where = f"{self.name}: role {role.name!r}"
        labels = [step.label for _, _, step in role.steps()]
        known = set(labels)
        checked: set[int] = set()
        placed: set[tuple[str, int | None]] = set()
        if len(known) != len(labels):
            twice = next(label for label in labels if labels.count(label) > 1)
            raise ProgramError(f"{where}: two steps are labelled {twice!r}")
        for lane, _, step in role.steps():
            if isinstance(step.op, Block) and lane != COMPUTE_LANE:
                raise ProgramError(f"{where}: step {step.label!r} computes on lane {lane!r}, not {COMPUTE_LANE!r}")
            for label in step.after:
                if label not in known:
                    raise ProgramError(f"{where}: step {step.label!r} waits for {label!r}, which does not exist")
            if id(step.op) not in checked:
                checked.add(id(step.op))
                at = f"{where}: step {step.label!r}"
                if isinstance(step.op, Block):
                    _validate_besides(at, step.op)
                for comm in comms_of(step.op):
                    if comm.op not in (*COLLECTIVES, *POINT_TO_POINT, *HOST_LANES):
                        raise ProgramError(f"{at}: unknown operation {comm.op!r}")
                    if comm.as_it_comes and comm.op != "recv":
                        raise ProgramError(f"{at}: {comm.op} cannot be posted as its bytes come; a recv can")
                    ends = (comm.axis, comm.peer if comm.op in POINT_TO_POINT else None)
                    if ends not in placed:
                        placed.add(ends)
                        self._validate_ends(at, comm, ranks)

    def _validate_ends(self, where: str, comm: Comm, ranks: list[int]) -> None:
        """Every rank of a role must be able to make the call."""
        for rank in ranks:
            index = self.group_index(comm.axis, rank) if comm.axis in self.groups else -1
            if index < 0:
                raise ProgramError(f"{where}: rank {rank} has no group on axis {comm.axis!r}")
            group = self.groups[comm.axis][index]
            if comm.op in POINT_TO_POINT and (not 0 <= comm.peer < len(group) or group[comm.peer] == rank):
                raise ProgramError(
                    f"{where}: peer {comm.peer} of rank {rank} is not another member of its {comm.axis} group"
                )


def _validate_besides(where: str, block: Block) -> None:
    for op in block.ops:
        if isinstance(op, Beside) and (not op.kernels or op.comm.op in POINT_TO_POINT):
            raise ProgramError(f"{where}: {op.comm.name!r} must be a collective beside one kernel or more")


def comm_of(op: Comm | Beside) -> Comm:
    """The collective of a block's op that has one."""
    return op.comm if isinstance(op, Beside) else op


def kernels_of(op: Compute | Comm | Beside) -> tuple[Compute, ...]:
    """The kernels of a block's op."""
    match op:
        case Compute():
            return (op,)
        case Beside():
            return op.kernels
        case Comm():
            return ()


def comms_of(op: Block | Comm | Batch) -> tuple[Comm, ...]:
    """The communication inside one step's operation, in order."""
    match op:
        case Comm():
            return (op,)
        case Batch() | Block():
            return op.comms

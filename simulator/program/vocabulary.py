"""Words that programs are written in: phases, purposes, kinds of operation, and the table of axes.

Every word is a `StrEnum`, so that it equals the string that the text form and the Timeline have for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

#: The lane of kernels. All other lanes hold communication only.
COMPUTE_LANE = "compute"


class StepPhase(StrEnum):
    """Parts of a training step that kernels and steps belong to.

    A step of phase B is a whole backward pass; a kernel of phase B computes gradients of inputs, in whichever pass.
    """

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    OPTIMIZER = "O"
    COMMUNICATION = "C"


#: Phases of passes through a pipeline stage.
PASSES = (StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.INPUT_GRADIENT, StepPhase.WEIGHT_GRADIENT)
#: Phases of the passes at whose end gradients of weights are complete.
MAKE_GRADIENTS = (StepPhase.BACKWARD, StepPhase.WEIGHT_GRADIENT)


class Purpose(StrEnum):
    """The parallelism, or the work on hosts, that communication belongs to."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERT = "ep"
    PIPELINE = "pp"
    DATA = "dp"
    OFFLOAD = "offload"
    OPTIMIZER = "optimizer"


class GraphPlace(StrEnum):
    """Places of an op in a CUDA graph: its ``first`` kernel launches it, what is ``inside`` costs the host nothing."""

    NONE = ""
    FIRST = "first"
    INSIDE = "inside"


class CollectiveKind(StrEnum):
    """Operations that all ranks of a group call."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SCATTER = "scatter"
    GATHER = "gather"
    SEND_RECV = "send_recv"
    BARRIER = "barrier"


class PointToPointKind(StrEnum):
    """The two ends of a transfer between two ranks."""

    SEND = "send"
    RECV = "recv"


class HostKind(StrEnum):
    """Operations of a rank with hosts.

    Copies go to and from the memory of the rank's own host, and between that and its drives.
    ``push`` and ``pull`` go to and from the memory of all parameter servers.
    An update is an optimizer step of a host's CPU.
    The update of parameter servers waits for all ranks of the group that call it.
    """

    TO_HOST = "to_host"
    FROM_HOST = "from_host"
    TO_NVME = "to_nvme"
    FROM_NVME = "from_nvme"
    HOST_UPDATE = "host_update"
    PUSH = "push"
    PULL = "pull"
    SERVER_UPDATE = "server_update"


class RecordedKind(StrEnum):
    """Work of a length that a profiler recorded."""

    RECORDED = "recorded"


CommKind = CollectiveKind | PointToPointKind | HostKind | RecordedKind

#: Operation with hosts -> its lane in pictures and traces.
HOST_LANES: Mapping[HostKind, str] = {
    HostKind.TO_HOST: "d2h",
    HostKind.FROM_HOST: "h2d",
    HostKind.TO_NVME: "nvme_write",
    HostKind.FROM_NVME: "nvme_read",
    HostKind.HOST_UPDATE: "cpu",
    HostKind.PUSH: "push",
    HostKind.PULL: "pull",
    HostKind.SERVER_UPDATE: "server",
}


class Axis(StrEnum):
    """Kinds of groups of ranks; see `AXES`."""

    TP = "tp"
    CP = "cp"
    PP = "pp"
    DP = "dp"
    DP_SHARD = "dp_shard"
    DP_REPLICA = "dp_replica"
    MP = "mp"
    EP = "ep"
    ETP = "etp"
    EDP = "edp"
    EDP_SHARD = "edp_shard"
    EDP_REPLICA = "edp_replica"
    EMP = "emp"
    COPIES = "copies"
    EMBEDDING = "embd"
    TWIN = "twin"
    RANK = "rank"
    PROCESS_GROUP = "process_group"


@dataclass(frozen=True, slots=True)
class AxisFacts:
    """Facts of one axis.

    ``members`` are the ranks of a group.
    ``purposes`` are those that communication on the axis may have, the usual one first.
    ``whole`` is the axis whose groups are split into those of this one, where they are.
    ``numbered``: there are several axes of the kind, called ``copies0``, ``copies1`` and so on.
    """

    members: str
    purposes: tuple[Purpose, ...]
    whole: Axis | None = None
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaAxes:
    """Axes of the ranks that hold the same parameters.

    ``shard``: groups that share one state, each member its shard. ``replica``: groups that hold the same shard.
    ``model``: ranks of one replica of the model, which agree on norms of gradients.
    """

    shard: Axis
    replica: Axis
    model: Axis


#: The one table of axes: layouts make their groups, programs are validated and users read names by it.
AXES: Mapping[Axis, AxisFacts] = {
    Axis.TP: AxisFacts("ranks that share each layer", (Purpose.TENSOR,)),
    Axis.CP: AxisFacts("ranks that share each sequence", (Purpose.CONTEXT,)),
    Axis.PP: AxisFacts("ranks of one pipeline, in its order", (Purpose.PIPELINE,)),
    Axis.DP: AxisFacts(
        "ranks that hold the same parameters outside experts: all dp and cp ranks, as in Megatron-LM",
        (Purpose.DATA, Purpose.OPTIMIZER),
    ),
    Axis.DP_SHARD: AxisFacts("consecutive members of dp that share one state", (Purpose.DATA,), Axis.DP),
    Axis.DP_REPLICA: AxisFacts("members of dp that hold the same shard", (Purpose.DATA,), Axis.DP),
    Axis.MP: AxisFacts(
        "all tensor and pipeline ranks of one replica",
        (Purpose.TENSOR, Purpose.PIPELINE),
    ),
    Axis.EP: AxisFacts("ranks among which experts are spread", (Purpose.EXPERT,)),
    Axis.ETP: AxisFacts("ranks that share each expert", (Purpose.TENSOR,)),
    Axis.EDP: AxisFacts("ranks that hold the same experts", (Purpose.DATA, Purpose.OPTIMIZER)),
    Axis.EDP_SHARD: AxisFacts("consecutive members of edp that share one state", (Purpose.DATA,), Axis.EDP),
    Axis.EDP_REPLICA: AxisFacts("members of edp that hold the same shard", (Purpose.DATA,), Axis.EDP),
    Axis.EMP: AxisFacts(
        "all expert, expert-tensor and pipeline ranks of one replica",
        (Purpose.EXPERT, Purpose.TENSOR, Purpose.PIPELINE),
    ),
    Axis.COPIES: AxisFacts(
        "members of ep that hold copies of the same experts", (Purpose.EXPERT,), Axis.EP, numbered=True
    ),
    Axis.EMBEDDING: AxisFacts(
        "the first and the last rank of a pipeline, each with its copy of the embedding table", (Purpose.PIPELINE,)
    ),
    Axis.TWIN: AxisFacts("two pipeline ranks that hold the same stages", (Purpose.DATA,)),
    Axis.RANK: AxisFacts(
        "each rank alone, where it deals with hosts", (Purpose.OFFLOAD, Purpose.OPTIMIZER, Purpose.DATA)
    ),
    Axis.PROCESS_GROUP: AxisFacts("ranks of a process group in a recorded trace", tuple(Purpose), numbered=True),
}

#: Axis of the ranks that hold the same parameters -> the axes that go with it.
REPLICAS: Mapping[Axis, ReplicaAxes] = {
    Axis.DP: ReplicaAxes(Axis.DP_SHARD, Axis.DP_REPLICA, Axis.MP),
    Axis.EDP: ReplicaAxes(Axis.EDP_SHARD, Axis.EDP_REPLICA, Axis.EMP),
}

_AXIS_CALLED = {axis.value: axis for axis in Axis}


def axis_of(name: str) -> Axis:
    """Return the axis that ``name`` is of; raise `KeyError` where there is none.

    >>> axis_of("dp_shard").value, axis_of("copies3").value
    ('dp_shard', 'copies')
    """
    stem = name.rstrip("0123456789")
    axis = _AXIS_CALLED[stem]
    if AXES[axis].numbered == (stem == name):
        raise KeyError(name)
    return axis


def numbered_axis(axis: Axis, number: int) -> str:
    """Return the name of one of several axes of a kind.

    >>> numbered_axis(Axis.COPIES, 3)
    'copies3'
    """
    return f"{axis}{number}"


def undivided(name: str) -> Axis:
    """Return the axis whose groups are split into those of ``name``, or the axis ``name`` itself.

    >>> undivided("edp_shard").value, undivided("dp").value
    ('edp', 'dp')
    """
    axis = axis_of(name)
    return AXES[axis].whole or axis

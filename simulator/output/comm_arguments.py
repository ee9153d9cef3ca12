"""Arguments of communication in traces, as PyTorch's profiler writes them at NCCL's kernels: bytes and group.

Their names are those of ``record_param_comms`` (pytorch, ``torch/csrc/distributed/c10d/ParamCommsUtils.hpp``).
HolisticTraceAnalysis and `simulator.traces` read them. Messages count in bytes, for a program does not tell types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.program import Collective, CollectiveKind, Comm, HostOperation, PointToPoint, Program, comms_of

#: Operation -> its name in ``torch.distributed``.
_NAMES = {
    CollectiveKind.ALL_REDUCE: "allreduce",
    CollectiveKind.ALL_GATHER: "_allgather_base",
    CollectiveKind.REDUCE_SCATTER: "_reduce_scatter_base",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.SEND_RECV: "send",
}
#: Operations of which a rank has a part of the message before, or after it.
PART_IN: frozenset[str] = frozenset((CollectiveKind.ALL_GATHER, CollectiveKind.GATHER))
_PART_OUT = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.SCATTER)
#: Ranks of a group that are listed: c10 cuts longer lists.
_LISTED = 30


class CommArguments:
    """Arguments of the communication of a ``program``, by rank, step, name and kind."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._comms = [
            {(step.label, comm.name, str(comm.op)): comm for _, _, step in role.steps() for comm in comms_of(step.op)}
            for role in program.roles
        ]
        groups = ((axis, index) for axis, groups in program.groups.items() for index in range(len(groups)))
        self._number = {group: str(number) for number, group in enumerate(groups)}

    def arguments(self, rank: int, label: str, name: str, kind: str) -> Mapping[str, Any]:
        """Return the arguments of a communication of the step ``label``; none of copies to and from hosts."""
        comm = self._comms[self._program.role_of[rank]].get((label, name, kind))
        return {} if comm is None or isinstance(comm, HostOperation) else self._written(rank, comm)

    def _written(self, rank: int, comm: Comm) -> dict[str, Any]:
        index = self._program.group_index(comm.axis, rank)
        members = self._program.groups[comm.axis][index]
        size, nbytes = len(members), round(comm.nbytes)
        put_in, taken_out = (nbytes // size if comm.op in kinds else nbytes for kinds in (PART_IN, _PART_OUT))
        listed = ", ".join(map(str, members[:_LISTED])) + (", ..." if size > _LISTED else "")
        arguments = {
            "Collective name": _NAMES.get(comm.op, str(comm.op)) if isinstance(comm, Collective) else str(comm.op),
            "In msg nelems": put_in,
            "Out msg nelems": taken_out,
            "Group size": size,
            "dtype": "Byte",
            "Process Group Name": self._number[comm.axis, index],
            "Process Group Description": f"mesh_{comm.purpose}",
            "Process Group Ranks": f"[{listed}]",
        }
        if isinstance(comm, PointToPoint):
            ends = ("Src Rank", "Dst Rank")
            arguments[ends[comm.sends]] = members[comm.peer]
        return arguments

"""A simulated step as Chakra's execution traces: a file per rank, and ASTRA-sim's file of communicator groups.

Kernels are computing nodes with their FLOPs and bytes, collectives and transfers are nodes of their kinds. What a node
waits for stands in ``data_deps``, which ASTRA-sim follows. A wait that nothing in the trace explains, as for a late
host, is a node of the host. Durations are whole microseconds, rounded so that sums are right; the attribute
``duration_nanos`` has them exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from simulator.errors import InputError
from simulator.output.comm_arguments import PART_IN
from simulator.output.files import make_folder, refuse_others, writing
from simulator.program import (
    AllToAll,
    Collective,
    CollectiveKind,
    Comm,
    Compute,
    HostKind,
    HostOperation,
    PointToPoint,
    Program,
)
from simulator.timeline import Timeline
from simulator.traces.execution.chakra import ALGORITHM, COLLECTIVES, EARLY, EXACT, PER_NODE, RING, SHARES
from simulator.traces.execution.messages import chakra_messages, varint
from simulator.traces.execution.planned import PlannedNode, planned_nodes
from simulator.traces.execution.process_groups import GROUPS_FILE
from simulator.traces.files import MESSAGES

#: Numbers of types of nodes (``NodeType`` in et_def.proto).
_LOAD, _STORE, _COMPUTE, _SEND, _RECEIVE, _COLLECTIVE = range(2, 8)
#: Names of files before the number of the rank.
STEM = "step"
#: Nodes that are written at most, of all ranks together.
MOST_NODES = 20_000_000
_SCHEMA = "1.0.2-chakra.0.0.4"


def write_chakra(program: Program, timeline: Timeline, folder: Path) -> list[Path]:
    """Write the step of every rank into ``folder``, and return the files. Raises `InputError`."""
    chakra_messages()
    files = rank_files(folder, program.n_ranks)
    _check_size(program, timeline, folder)
    make_folder(folder)
    numbering = _Numbering(program)
    prepared: dict[int, list[bytes | PlannedNode]] = {}
    for rank, file in enumerate(files):
        like = timeline.simulated_as[rank]
        if like not in prepared:
            prepared[like] = _prepared(planned_nodes(program, timeline, like), numbering)
        with writing(file) as stream:
            stream.write(_framed(_metadata()))
            for part in prepared[like]:
                stream.write(part if isinstance(part, bytes) else b"".join(_communication(part, rank, numbering)))
    groups = {str(number): list(members) for members, number in numbering.listed()}
    with writing(folder / GROUPS_FILE) as stream:
        stream.write((json.dumps(groups) + "\n").encode())
    return [*files, folder / GROUPS_FILE]


def rank_files(folder: Path, n_ranks: int) -> list[Path]:
    """Return the files that a step of ``n_ranks`` is written into. Raises `InputError` where the folder has others."""
    files = [folder / f"{STEM}.{rank}.et" for rank in range(n_ranks)]
    refuse_others(folder, MESSAGES, files)
    return files


@dataclass
class _Numbering:
    """Numbers of groups from 1 on, of tags and of lanes, alike for all ranks of ``program``.

    A group is a communicator: lanes whose collectives may run at once have one each, though the ranks are the same.
    """

    program: Program
    groups: dict[tuple[str, str, tuple[int, ...]], int] = field(default_factory=dict)
    tags: dict[tuple[str, str], int] = field(default_factory=dict)
    lanes: dict[str, int] = field(default_factory=dict)

    def members(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of ``rank``."""
        return self.program.groups[axis][self.program.group_index(axis, rank)]

    def group(self, lane: str, axis: str, rank: int) -> int:
        """Return the number of a lane's group."""
        return self.groups.setdefault((lane, axis, self.members(axis, rank)), len(self.groups) + 1)

    def tag(self, axis: str, text: str) -> int:
        """Return the number of a tag."""
        return self.tags.setdefault((axis, text), len(self.tags))

    def lane(self, name: str) -> int:
        """Return the number of a lane."""
        return self.lanes.setdefault(name, len(self.lanes))

    def listed(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the ranks of each group with its number."""
        yield from ((members, number) for (_, _, members), number in self.groups.items())


def _metadata() -> Any:
    metadata = chakra_messages().metadata(version=_SCHEMA)
    metadata.attr.add(name="schema", string_val=_SCHEMA)
    metadata.attr.add(name="producer", string_val="llmsim")
    return metadata


def _framed(message: Any) -> bytes:
    content: bytes = message.SerializeToString(deterministic=True)
    return varint(len(content)) + content


def _prepared(nodes: Sequence[PlannedNode], numbering: _Numbering) -> list[bytes | PlannedNode]:
    """Return nodes as bytes where they are alike for all ranks that a simulated one stands for, joined."""
    ready: list[bytes | PlannedNode] = []
    for communicates, run in groupby(nodes, key=lambda node: isinstance(node.op, Collective | PointToPoint)):
        if communicates:
            ready += run
        else:
            ready.append(b"".join(_framed(_own_work(node, numbering)) for node in run))
    return ready


def _check_size(program: Program, timeline: Timeline, folder: Path) -> None:
    """Raise `InputError` where the ranks have too many nodes together."""
    lengths = np.array([len(template) for template in timeline.templates], dtype=np.int64)[timeline.template]
    rank_nodes = np.bincount(timeline.rank, weights=lengths, minlength=program.n_ranks)
    nodes = int(rank_nodes[list(timeline.simulated_as)].sum())
    check_number(program.n_ranks, nodes, folder)


def check_number(n_ranks: int, nodes: int, folder: Path) -> None:
    """Raise `InputError` where ranks have more ``nodes`` together than are written."""
    if nodes > MOST_NODES:
        raise InputError(
            f"{n_ranks:,} ranks have {nodes:,} kernels and transfers or more", file=folder,
            allowed=f"at most {MOST_NODES:,}, about two gigabytes", fix="fewer layers, micro-batches or replicas",
        )  # fmt: skip


def _message(node: PlannedNode, kind: int, number: int, **attributes: Any) -> Any:
    """Return a node's message with its lengths; ``attributes`` are ``name=(type, value)``."""
    start_us, end_us = round(node.times.start_s * 1e6), round(node.times.end_s * 1e6)
    message = chakra_messages().node(
        id=number, name=node.name, type=kind, data_deps=[_first(other) for other in node.after],
        start_time_micros=start_us, duration_micros=end_us - start_us,
    )  # fmt: skip
    exact = (node.times.end_s - node.times.start_s) * 1e9
    for name, (field_name, value) in {**attributes, EXACT: ("double_val", exact)}.items():
        attribute = message.attr.add(name=name)
        if field_name == "double_list":
            attribute.double_list.values.extend(value)
        else:
            setattr(attribute, field_name, value)
    return message


def _first(number: int) -> int:
    """Return the id of a node's message; the second half of a ring's has the next one."""
    return 2 * number


def _own_work(node: PlannedNode, numbering: _Numbering) -> Any:
    """Return the message of what a rank does alone: kernels, waits, and work with its host."""
    thread = ("int64_val", numbering.lane(node.lane))
    op, number = node.op, _first(node.number)
    if isinstance(op, Compute):
        flops, nbytes = round(node.times.flops), round(node.times.nbytes)
        return _message(
            node, _COMPUTE, number, is_cpu_op=("bool_val", False), num_ops=("int64_val", flops),
            tensor_size=("uint64_val", nbytes),
        )  # fmt: skip
    if isinstance(op, HostOperation) and op.op != HostKind.HOST_UPDATE:
        kind = _LOAD if op.op == HostKind.FROM_HOST else _STORE
        return _message(node, kind, number, tensor_size=("uint64_val", round(op.nbytes)), tid=thread)
    return _message(node, _COMPUTE, number, is_cpu_op=("bool_val", True), tid=thread)


def _communication(node: PlannedNode, rank: int, numbering: _Numbering) -> Iterator[bytes]:
    """Yield the message of a communication of ``rank``; of a ring's exchange its send and its receive."""
    op = node.op
    assert isinstance(op, Comm)
    members, number = numbering.members(op.axis, rank), _first(node.number)
    on_gpu = {"is_cpu_op": ("bool_val", False)}
    if isinstance(op, PointToPoint):
        kind, end = (_SEND, "comm_dst") if op.sends else (_RECEIVE, "comm_src")
        early = {EARLY: ("bool_val", True)} if op.as_it_comes else {}
        tag = numbering.tag(op.axis, op.tag)
        yield _framed(_message(node, kind, number, **_transfer(op, end, members[op.peer], tag), **on_gpu, **early))
        return
    assert isinstance(op, Collective)
    if len(members) == 1:  # nothing moves
        yield _framed(_message(node, _COMPUTE, number, **on_gpu))
        return
    group = numbering.group(node.lane, op.axis, rank)
    if op.op == CollectiveKind.SEND_RECV:
        place, tag = members.index(rank), numbering.tag(f"ring {group}", "")
        ring = {RING: ("string_val", str(group)), **on_gpu}
        for offset, (kind, end, step) in enumerate(((_SEND, "comm_dst", 1), (_RECEIVE, "comm_src", -1))):
            peer = members[(place + step) % len(members)]
            yield _framed(_message(node, kind, number + offset, **_transfer(op, end, peer, tag), **ring))
        return
    yield _framed(_message(node, _COLLECTIVE, number, **_collective(op, group, len(members)), **on_gpu))


def _transfer(op: Comm, end: str, peer: int, tag: int) -> Mapping[str, Any]:
    return {
        "comm_size": ("int64_val", round(op.nbytes)),
        end: ("int32_val", peer),
        "comm_tag": ("int32_val", tag),
    }


def _collective(op: Collective, group: int, size: int) -> Mapping[str, Any]:
    """Return the attributes of a collective; ``comm_size`` is what a rank puts in."""
    attributes: dict[str, Any] = {
        "comm_type": ("int64_val", COLLECTIVES.index(op.op)),
        "comm_size": ("int64_val", round(op.nbytes / (size if op.op in PART_IN else 1))),
        "pg_name": ("string_val", str(group)),
    }
    if op.algorithm != "auto":
        attributes[ALGORITHM] = "string_val", op.algorithm
    if isinstance(op, AllToAll):
        shares = zip(SHARES, (op.send_shares, op.receive_shares), strict=True)
        attributes |= {name: ("double_list", value) for name, value in shares if value}
        if op.per_node:
            attributes[PER_NODE] = "double_val", op.per_node
    return attributes

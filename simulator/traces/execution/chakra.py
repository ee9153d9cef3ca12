"""Chakra's execution traces as graphs: protocol buffers, and the JSON that its feeder reads.

What attributes mean is as ASTRA-sim takes them (astra-sim/astra-sim, ``workload/Workload.cc``): ``num_ops`` and
``tensor_size`` of kernels, ``comm_type``, ``comm_size`` and ``pg_name`` of collectives, ``comm_src``, ``comm_dst`` and
``comm_tag`` of transfers. ``comm_size`` are the bytes that a rank puts in: an all-gather brings as many times more as
there are ranks (``Ring.cc`` there).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.input_files import brief
from simulator.traces.execution.graph import GraphComm, GraphNode, LinkedNode, NodeKind, RankGraph, in_running_order
from simulator.traces.execution.messages import chakra_messages
from simulator.traces.execution.process_groups import GROUPS_NODE, MOST_RANKS, listed_groups
from simulator.units import us

#: Numbers of ``CollectiveCommType`` -> the collective's name here.
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip
#: Numbers of ``NodeType`` -> kind; computing nodes are the host's where an attribute says so.
NODE_KINDS = (
    NodeKind.NOTHING, NodeKind.NOTHING, NodeKind.LOAD, NodeKind.STORE, NodeKind.GPU, NodeKind.SEND, NodeKind.RECEIVE,
    NodeKind.COLLECTIVE, NodeKind.HOST, NodeKind.HOST, NodeKind.HOST,
)  # fmt: skip
#: Attributes that only traces of this project have: the exact length, and what Chakra's have no word for.
EXACT, ALGORITHM, EARLY = "duration_nanos", "comm_algorithm", "posted_early"
#: Group of a ring in which each rank sends to the next, at both of its transfers.
RING = "ring_group"
SHARES = ("send_shares", "receive_shares")
PER_NODE = "per_node_share"
#: Largest share; sums of shares round.
_WHOLE = 1.0 + 1e-9
#: Longest message that is believed; a node of a large trace has some kilobytes.
_LONGEST = 1 << 26
#: Longest duration that is believed, us: thirty years.
_LONGEST_MICROS = 1e15
#: Largest number that is believed in a time, a size or a count.
_LARGEST = 2.0**63


def read_messages(content: bytes, path: Path, rank: int) -> RankGraph:
    """Return the graph in a file of protocol buffers. Raises `InputError` where it is cut off or no such file."""
    linked: list[LinkedNode] = []
    groups: dict[str, tuple[int, ...]] = {}
    for number, message in enumerate(_messages(content, path)):
        if not number:  # the metadata
            continue
        details = {one.name: _value(one) for one in message.attr}
        if message.name == GROUPS_NODE or message.type == 1:
            groups |= listed_groups(message.inputs.values, path)
        details |= {"runtime": message.duration_micros}
        node = _node(message.id, message.name, message.type, tuple(message.data_deps), details, path)
        linked.append(LinkedNode(node, tuple(message.ctrl_deps)))
    return _graph(linked, groups, path, rank)


def read_json(content: Mapping[str, Any], path: Path, rank: int) -> RankGraph:
    """Return the graph in the JSON form, whose nodes stand under ``workload_graph``. Raises `InputError`."""
    nodes = content["workload_graph"]
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise InputError("is no list of nodes", file=path, key="workload_graph", found=brief(nodes))
    linked = []
    for place, told in enumerate(nodes):
        # Writers differ in capitals: Id, ctrlDeps, NodeType.
        node = {key.lower().replace("_", ""): value for key, value in told.items()}
        details = {key: node[key.replace("_", "")] for key in _JSON_DETAILS if key.replace("_", "") in node}
        details.setdefault("runtime", node.get("durationmicros", 0))
        where = f"workload_graph.{place}"
        number, kind = (_whole(node.get(key), path, f"{where}.{key}") for key in ("id", "nodetype"))
        after, callers = (_numbers(node.get(key, []), path, f"{where}.{key}") for key in ("datadeps", "ctrldeps"))
        linked.append(LinkedNode(_node(number, str(node.get("name", "")), kind, after, details, path), callers))
    return _graph(linked, {}, path, rank)


_JSON_DETAILS = (
    *("runtime", "is_cpu_op", "num_ops", "tensor_size", "tid", "pg_name"),
    *("comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag"),
)


def _graph(linked: list[LinkedNode], groups: Mapping[str, tuple[int, ...]], path: Path, rank: int) -> RankGraph:
    if not linked:
        raise InputError("has no nodes", file=path)
    nodes, missing = in_running_order(linked, path)
    return RankGraph(rank, str(path), "Chakra", nodes, groups, missing)


def _messages(content: bytes, path: Path) -> Iterator[Any]:
    """Yield the metadata, then each node."""
    messages, at, count = chakra_messages(), 0, 0
    while at < len(content):
        length, begin = _length(content, at)
        if length > _LONGEST:
            raise InputError("is no execution trace of Chakra", file=path, found=f"a message of {length:,} bytes")
        if begin + length > len(content):
            raise InputError(f"is cut off in message {count}", file=path)
        message = messages.node() if count else messages.metadata()
        try:
            message.ParseFromString(content[begin : begin + length])
        except messages.error:
            raise InputError(f"is no execution trace of Chakra: message {count} cannot be read", file=path) from None
        yield message
        at, count = begin + length, count + 1


def _length(content: bytes, at: int) -> tuple[int, int]:
    """Return the number of bytes of the message behind ``at``, and where it begins."""
    number = shift = 0
    while at < len(content) and shift < 64:
        byte = content[at]
        number, at, shift = number | (byte & 0x7F) << shift, at + 1, shift + 7
        if not byte & 0x80:
            return number, at
    return len(content) + 1, at


def _value(attribute: Any) -> Any:
    """Return the value of an attribute; a list as a tuple; None where it has none."""
    name = attribute.WhichOneof("value")
    if name is None:
        return None
    value = getattr(attribute, name)
    return tuple(value.values) if name.endswith("_list") else value


def _node(
    number: int, name: str, code: int, after: tuple[int, ...], details: Mapping[str, Any], path: Path
) -> GraphNode:
    where = f"node {number}"
    if not 0 <= code < len(NODE_KINDS):
        raise InputError("is no type of node", file=path, key=where, found=code, allowed=f"0 to {len(NODE_KINDS) - 1}")
    kind = NODE_KINDS[code]
    if kind in (NodeKind.GPU, NodeKind.COLLECTIVE) and _is_true(details.get("is_cpu_op")):
        kind = NodeKind.HOST
    if kind not in (NodeKind.SEND, NodeKind.RECEIVE):
        details = {key: value for key, value in details.items() if key != RING}
    elif RING in details:  # one collective here
        kind = NodeKind.COLLECTIVE if kind == NodeKind.SEND else NodeKind.NOTHING
    amounts = {key: _amount(details.get(key), path, f"{where}.{key}") for key in ("num_ops", "tensor_size")}
    tid = details.get("tid")
    return GraphNode(
        number=number,
        name=name,
        kind=kind,
        after=after,
        seconds=_seconds(kind, details, any(amounts.values()), path, where),
        flops=amounts["num_ops"],
        nbytes=amounts["tensor_size"],
        lane="" if tid is None else str(tid),
        comm=_comm(kind, details, path, where),
    )


def _seconds(kind: NodeKind, details: Mapping[str, Any], has_work: bool, path: Path, where: str) -> float | None:
    """Return the recorded length of a node; None where there is none, and it would take time."""
    micros = _amount(details.get("runtime"), path, f"{where}.duration_micros")
    if micros > _LONGEST_MICROS:
        raise InputError("is no length of an operation", file=path, key=f"{where}.duration_micros", found=micros)
    exact = details.get(EXACT)
    if (
        isinstance(exact, float) and exact >= 0 and abs(exact - 1000 * micros) <= 1000
    ):  # else somebody has changed the length
        return exact * 1e-9
    if micros:
        return micros * us
    return 0.0 if kind in (NodeKind.HOST, NodeKind.NOTHING) or (kind == NodeKind.GPU and not has_work) else None


def _comm(kind: NodeKind, details: Mapping[str, Any], path: Path, where: str) -> GraphComm | None:
    if kind not in (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECEIVE):
        return None

    def whole(key: str, default: int) -> int:
        return _whole(details[key], path, f"{where}.{key}") if key in details else default

    nbytes, group = _amount(details.get("comm_size"), path, f"{where}.comm_size"), str(details.get("pg_name") or "")
    early, algorithm = _is_true(details.get(EARLY)), str(details.get(ALGORITHM, "auto"))
    if RING in details:
        return GraphComm("send_recv", nbytes, str(details[RING]))
    if kind != NodeKind.COLLECTIVE:
        key = "comm_dst" if kind == NodeKind.SEND else "comm_src"
        if key not in details:
            raise InputError(f"the trace does not tell {key}", file=path, key=where)
        peer = whole(key, -1)
        if not 0 <= peer < MOST_RANKS:
            raise InputError(
                "is no rank", file=path, key=f"{where}.{key}", found=peer, allowed=f"0 to {MOST_RANKS - 1}"
            )
        return GraphComm("", nbytes, group, peer, whole("comm_tag", 0), early)
    code = whole("comm_type", 0)
    if not 0 <= code < len(COLLECTIVES):
        allowed = f"0 to {len(COLLECTIVES) - 1}"
        raise InputError("is no type of collective", file=path, key=f"{where}.comm_type", found=code, allowed=allowed)
    sent, received = (_shares(details.get(key) or (), path, f"{where}.{key}") for key in SHARES)
    (per_node,) = _shares((details.get(PER_NODE) or 0.0,), path, f"{where}.{PER_NODE}")
    return GraphComm(
        COLLECTIVES[code], nbytes, group, algorithm=algorithm, send_shares=sent, receive_shares=received,
        per_node=per_node,
    )  # fmt: skip


def _shares(values: Any, path: Path, key: str) -> tuple[float, ...]:
    """Return shares of bytes. Raises `InputError` where they are none."""
    if not isinstance(values, tuple) or not all(isinstance(one, float) and 0 <= one <= _WHOLE for one in values):
        raise InputError("is no list of shares", file=path, key=key, found=brief(values), allowed="0 to 1 each")
    return values


def _is_true(value: Any) -> bool:
    return value is True or (isinstance(value, int | float) and value != 0)


def _whole(value: Any, path: Path, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
        raise InputError("is no whole number", file=path, key=key, found=brief(value))
    return value


def _amount(value: Any, path: Path, key: str) -> float:
    """Return a time, a size or a count; 0 where the node has none. Raises `InputError` for what is none."""
    if value is None:
        return 0.0
    if not (isinstance(value, int | float) and 0 <= value <= _LARGEST):
        raise InputError("is no amount", file=path, key=key, found=brief(value), allowed="0 or more")
    return float(value)


def _numbers(value: Any, path: Path, key: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InputError("is no list of nodes", file=path, key=key, found=brief(value))
    return tuple(_whole(one, path, key) for one in value)


def parsed_json(content: bytes, path: Path) -> Any:
    """Return the JSON in a file. Raises `InputError` where it is none."""
    try:
        return json.loads(content)
    except RecursionError:
        raise InputError("is nested too deeply", file=path) from None
    except ValueError as error:
        at = getattr(error, "lineno", None)
        raise InputError("is cut off, or no JSON" + (f": line {at}" if at else ""), file=path) from None

"""Chakra's execution traces, written node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.traces.execution.messages import chakra_messages, varint

#: Attribute -> the field that its value has in files of ASTRA-sim's examples.
FIELDS = {
    "is_cpu_op": "bool_val", "num_ops": "int64_val", "tensor_size": "uint64_val", "comm_type": "int64_val",
    "comm_size": "int64_val", "comm_src": "int32_val", "comm_dst": "int32_val", "comm_tag": "int32_val",
    "pg_name": "string_val", "tid": "int64_val", "duration_nanos": "double_val",
    "comm_algorithm": "string_val", "ring_group": "string_val", "per_node_share": "double_val",
    "send_shares": "double_list", "receive_shares": "double_list",
}  # fmt: skip
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7


@dataclass(frozen=True)
class ChakraNode:
    """A node by its number, type and length in microseconds."""

    number: int
    kind: int
    micros: int = 0
    after: Sequence[int] = ()
    callers: Sequence[int] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    def message(self) -> bytes:
        node = chakra_messages().node(
            id=self.number, name=f"node {self.number}", type=self.kind, duration_micros=self.micros,
            data_deps=self.after, ctrl_deps=self.callers,
        )  # fmt: skip
        for name, value in self.attributes:
            attribute = node.attr.add(name=name)
            if FIELDS[name] == "double_list":
                attribute.double_list.values.extend(value)
            else:
                setattr(attribute, FIELDS[name], value)
        return bytes(node.SerializeToString())


def node(number: int, kind: int, micros: int = 0, after: Sequence[int] = (), **attributes: Any) -> ChakraNode:
    return ChakraNode(number, kind, micros, after, (), tuple(attributes.items()))


def framed(*messages: bytes) -> bytes:
    return b"".join(varint(len(message)) + message for message in messages)


def save_chakra(path: Path, *nodes: ChakraNode) -> str:
    """Write a file of these nodes, and return its name."""
    metadata = chakra_messages().metadata(version="0.0.4").SerializeToString()
    path.write_bytes(framed(metadata, *(one.message() for one in nodes)))
    return str(path)

"""Messages of Chakra's execution traces in protocol buffers, described by the numbers and types of their fields.

The format is MLCommons' (mlcommons/chakra, ``schema/protobuf/et_def.proto``): a stream of messages, each behind its
length, of which the first is the metadata and all others are nodes. The messages are described while Python runs. So
any version of protobuf can read them, and no generated module has to fit to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from simulator.errors import InputError, install_extra

_PACKAGE = "ChakraProtoMsg"
#: Name of a type -> its number in ``google/protobuf/descriptor.proto``.
_TYPES = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "fixed64": 6, "fixed32": 7, "bool": 8, "string": 9,
    "message": 11, "bytes": 12, "uint32": 13, "sfixed32": 15, "sfixed64": 16, "sint32": 17, "sint64": 18,
}  # fmt: skip
#: Types of the values of attributes, in the order of their fields: each has one for a value, and one for a list.
_VALUES = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
#: Message -> its fields in the order of their numbers from 1 on: name, type, and whether there may be several.
_FIELDS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "GlobalMetadata": (("version", "string", False), ("attr", "AttributeProto", True)),
    "IOInfo": (("values", "string", False), ("shapes", "string", False), ("types", "string", False)),
    "Node": (
        ("id", "uint64", False),
        ("name", "string", False),
        ("type", "uint32", False),  # an enumeration, which is written as such a number
        ("ctrl_deps", "uint64", True),
        ("data_deps", "uint64", True),
        ("start_time_micros", "uint64", False),
        ("duration_micros", "uint64", False),
        ("inputs", "IOInfo", False),
        ("outputs", "IOInfo", False),
        ("attr", "AttributeProto", True),
    ),
}


@dataclass(frozen=True)
class ChakraMessages:
    """Classes of messages: ``metadata`` and ``node``, and ``error``, which broken bytes raise."""

    metadata: Any
    node: Any
    error: type[Exception]


@cache
def chakra_messages() -> ChakraMessages:
    """Return the classes of Chakra's messages. Raises `InputError` where protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError:
        fix = install_extra("chakra")
        raise InputError("Chakra's traces need protobuf, which is not installed", fix=fix) from None
    file = descriptor_pb2.FileDescriptorProto(name="execution_trace.proto", package=_PACKAGE, syntax="proto3")
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    for number, name in ((1, "name"), (2, "doc_string")):
        _add_field(attribute, name, number, "string")
    for place, kind in enumerate(_VALUES):
        listed = file.message_type.add(name=_list_of(kind))
        _add_field(listed, "values", 1, kind, repeated=True)
        for number, name, value in ((3, f"{kind}_val", kind), (4, f"{kind}_list", _list_of(kind))):
            _add_field(attribute, name, number + 2 * place, value).oneof_index = 0
    for title, fields in _FIELDS.items():
        described = file.message_type.add(name=title)
        for number, (name, kind, repeated) in enumerate(fields, 1):
            _add_field(described, name, number, kind, repeated=repeated)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    metadata, node = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{title}"))
        for title in ("GlobalMetadata", "Node")
    )
    return ChakraMessages(metadata, node, message.DecodeError)


def _list_of(kind: str) -> str:
    return f"{kind.capitalize()}List"


def _add_field(message: Any, name: str, number: int, kind: str, *, repeated: bool = False) -> Any:
    field = message.field.add(name=name, number=number, label=3 if repeated else 1)
    field.type = _TYPES.get(kind, _TYPES["message"])
    if kind not in _TYPES:
        field.type_name = f".{_PACKAGE}.{kind}"
    return field


def varint(number: int) -> bytes:
    """Return a number as protocol buffers write it, seven bits a byte.

    >>> varint(1), varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)

"""XML as plain elements that know their line. Document types, and with them entities, are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

from simulator.errors import InputError

MAX_DEPTH, MAX_ELEMENTS = 64, 20_000


@dataclass(frozen=True, slots=True)
class Element:
    """``<tag attribute="value">`` and what is inside it."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)


def parse_xml(text: str, path: Path) -> Element:
    """The root element. Raises `InputError` with the line of what is wrong."""
    parser = expat.ParserCreate()
    root: list[Element] = []
    opened: list[Element] = []
    count = 0

    def fail(message: str) -> NoReturn:
        raise InputError(f"line {parser.CurrentLineNumber}: {message}", file=path)

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MAX_ELEMENTS:
            fail(f"has more than {MAX_ELEMENTS:,} elements")
        if len(opened) == MAX_DEPTH:
            fail(f"is nested more than {MAX_DEPTH} deep")
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (opened[-1].children if opened else root).append(element)
        opened.append(element)

    def end(tag: str) -> None:
        opened.pop()

    def doctype(*_: object) -> None:
        fail("declares a document type, whose entities are not read")

    parser.StartElementHandler, parser.EndElementHandler, parser.StartDoctypeDeclHandler = start, end, doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        position = f", inside <{opened[-1].tag}> of line {opened[-1].line}" if opened else ""
        message = expat.errors.messages.get(error.code) or str(error)
        raise InputError(f"line {error.lineno}, column {error.offset + 1}: {message}{position}", file=path) from None
    return root[0]

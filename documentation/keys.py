"""The pages of a file's keys, from the JSON Schema that `llmsim check --schema` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from documentation.tables import table
from simulator.commands.schema import schema_of

JsonSchema = Mapping[str, Any]

ABOUT = {
    "workload": "A workload file has the sections below. `llmsim check` names what is wrong in one of your own.",
    "cluster": "A cluster file stands alone or as the section `cluster` of a workload.",
}
#: Names that are shown of those which a key may have.
SHOWN = 16
HEAD = """\
# Keys of a {kind} file

<!-- Written by `python -m documentation`. -->

{about} An editor that knows JSON Schema checks a file while you type: `llmsim check --schema {kind}` prints it.

Numbers may have the units that people write, in files as behind `--set`: `25MiB` or `25MB`, `400Gbps` or `50GB/s`,
`3us`. Of `seq` and `sliding_window`, `8k` is 8,192; of `total_tokens`, `1T` is 1e12 and `300B` 3e11.

A relative path starts from the folder of the file where such a file is there, else from the working directory.

Defaults stand in brackets. A default that depends on the framework or on other keys says so.
`llmsim check FILE --json -` prints what it comes to.
"""


def keys_page(kind: str) -> str:
    """Return a table of keys for the file itself, and one for each section, in the order in which keys lead there."""
    schema = schema_of(kind)
    sections = [HEAD.format(kind=kind, about=ABOUT[kind]), _keys(schema.get("anyOf", [schema])[-1])]
    for name in _sections(schema, schema):
        section = schema["$defs"][name]
        section = section.get("anyOf", [section])[-1]
        about = " ".join(section.get("description", "").split())
        sections.append(f"## {name}\n\n{about}\n\n{_keys(section)}" if about else f"## {name}\n\n{_keys(section)}")
    return "\n".join(sections)


def _sections(part: JsonSchema, schema: JsonSchema) -> list[str]:
    """Return the names of sections below ``part``, each once, the outer ones first."""
    names: dict[str, None] = {}
    parts = [part]
    for current in parts:
        for name in _references(current):
            if name not in names:
                names[name] = None
                parts.append(schema["$defs"][name])
    return list(names)


def _references(part: Any) -> Iterator[str]:
    """Yield the names of sections that ``part`` refers to."""
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"].rsplit("/", 1)[-1]
        for key, value in part.items():
            if key != "$defs":
                yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def _keys(section: JsonSchema) -> str:
    """Return the table of a section's keys."""
    required = section.get("required", ())
    rows = (
        (f"`{key}`" + (" (required)" if key in required else ""), _values(value), value.get("description", ""))
        for key, value in section.get("properties", {}).items()
    )
    return table(("key", "values", "meaning [default]"), rows)


def _values(value: JsonSchema) -> str:
    """Return what a key may be, in words: the type, its bounds, the names that are allowed."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in value:
            return " or ".join(dict.fromkeys(_values(part) for part in value[several] if part.get("type") != "null"))
    if "enum" in value:
        return _names(value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    kind = str(value.get("type", ""))
    if kind == "string" and "examples" in value:
        return f"such as `{value['examples'][0]}`"
    if kind == "array":
        return f"list of {_values(value['items'])}" if "items" in value else "list"
    if isinstance(value.get("additionalProperties"), dict):
        return f"mapping to {_values(value['additionalProperties'])}"
    words = {"object": "mapping", "string": "text", "boolean": "true or false"}
    return words.get(kind, f"{kind}{_bounds(value)}")


def _names(names: Sequence[object]) -> str:
    """Return the allowed names; of many the first ones.

    >>> _names(["gelu", 1])
    '`gelu`, `1`'
    """
    shown = ", ".join(f"`{name if isinstance(name, str) else json.dumps(name)}`" for name in names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} ... ({len(names)} in all)"


def _bounds(value: JsonSchema) -> str:
    """Return the bounds of a number."""
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f" {word} {value[key]:,}" for key, word in words.items() if key in value)

"""Data of files checked against sections and dataclasses; whatever is wrong is told in one form.

`validated` turns plain data into a section or a dataclass, and raises `InputError` only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from simulator.config import synonyms
from simulator.config.number_fixes import number_fix, swept
from simulator.config.section import AsSection, docstring_of, fields_by_key, is_whole, paths, section_of, sections_in
from simulator.errors import (
    MAX_ERRORS,
    InputError,
    MissingKeyError,
    PlaceOfKey,
    UnknownKeyError,
    each,
    located,
    nearest_names,
    raise_all,
)
from simulator.input_files import brief, closest
from simulator.quantities import (
    SEQUENCE_COUNTS,
    UNUSUAL,
    has_foreign_unit,
    in_sequences,
    is_unusual,
    nearest_spellings,
    plain_spellings,
    quantity_of,
)

T = TypeVar("T")


def validated(form: type[T], data: Any, file: object = None, *, place: PlaceOfKey | None = None) -> T:
    """Return ``data`` as a ``form``, a section or a dataclass.

    ``file`` is named in errors, or what ``place`` says of the key that is wrong. Raises one `InputError` that lists
    everything wrong, each with its dotted key, what was found and what is allowed.
    """
    more = 0
    try:
        check: Callable[[Any], T] = _check(form)  # type: ignore[arg-type]  # of a cache, that wants what it can hash
        value = check(data)
        return value
    except ValidationError as failure:
        section = _section(form)
        details = [detail for detail in failure.errors(include_url=False) if detail["type"] != _FOLLOWS]
        details = _one_per_union(details)
        errors = [_explained(section, detail, place, data) for detail in details[:MAX_ERRORS]]
        more = len(details) - len(errors)
    except InputError as failure:  # raised by the checks of a section itself, which do not know the file
        single, more = each(failure)
        errors = list(single)
    with located(lambda key: place(key) if place and key else (file, key)):
        raise_all(errors, more)
    raise AssertionError("a validation error without details")


@cache
def _check(form: Any) -> Callable[[Any], Any]:
    """Return pydantic's check of data against a section or a dataclass."""
    if dataclasses.is_dataclass(form):
        return TypeAdapter(Annotated[form, AsSection()]).validate_python
    section: type[BaseModel] = form
    return section.model_validate


def _section(form: type) -> type[BaseModel]:
    return section_of(form) if dataclasses.is_dataclass(form) else form


#: The kind of an error that follows from another, which is listed.
_FOLLOWS = "default_factory_not_called"
_WANTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "printable text, on one line",
    "predicate_failed": "printable text, on one line",
    "tuple_type": "a list",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}
_ALL_KEYS = "llmsim check --schema workload, or docs/reference"
_LENGTHS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}


def _one_per_union(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return errors with one for each union, of whose members pydantic tells one by one why they are not meant.

    Where something inside a member is wrong, such as an item of a list, that member is meant. Else the error is that of
    the first member with words, or of the first, with the kinds of all ``members``.
    """
    unions: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in details:
        unions.setdefault(_place_of_union(detail) or detail["loc"], []).append(detail)
    kept: list[ErrorDetails] = []
    for place, members in unions.items():
        inside = [one for one in members if len(one["loc"]) > len(place) + 1]
        if inside or members[0]["loc"] == place:
            kept += inside or members
            continue
        told = next((one for one in members if one["type"] == "literal_error"), members[0])
        kept.append({**told, "loc": place, "ctx": told.get("ctx", {}) | {"members": [one["type"] for one in members]}})
    return kept


def _place_of_union(detail: ErrorDetails) -> tuple[int | str, ...] | None:
    """Return where the union of plain values is that an error is of; None where it is of none."""
    loc = detail["loc"]
    tags = (i for i, part in enumerate(loc) if i and isinstance(part, str) and _UNTAGGED.match(part))
    tag = next(tags, None) if detail["type"] != "extra_forbidden" else None
    return None if tag is None else loc[:tag]


def _any_of(words: Iterable[str]) -> str:
    """Return words as what is allowed: ``a, b or c``."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _bound(sign: str, value: float) -> str:
    """Return text such as ``<= 10,000`` or ``>= 1e-06``."""
    return f"{sign} {value:,.0f}" if value == int(value) else f"{sign} {value:g}"


def _explained(model: type[BaseModel], detail: ErrorDetails, place: PlaceOfKey | None, data: Any) -> InputError:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    key, owner = _locate(model, detail["loc"])
    written_key = place(key)[1] if place and key else key
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "extra_forbidden":
        return _unknown_key(model, owner, key, value)
    field = _field(owner, detail["loc"])
    if kind == "missing":
        meaning = _meaning(owner, name)
        message = "a required key is missing" + (f" ({meaning})" if meaning else "")
        return MissingKeyError(message, key=key, allowed=_allowed(field) or _keys(field))
    if kind in ("literal_error", "tuple_type", *_LENGTHS) or "members" in context:
        return _no_member(detail, key, written_key, field)
    if kind in _BOUNDS:
        nearest = context[_BOUNDS[kind][0]]
        fix = f"{key.rpartition('.')[2]}: {nearest}" if kind.endswith("_equal") and isinstance(nearest, int) else None
        return InputError("is out of range", key=key, found=brief(value), allowed=", ".join(_bounds(field)), fix=fix)
    if kind in _WANTED:
        error = _wrong_type(kind, key, written_key, name, field, value, data)
        if kind == "model_type" and is_whole(value) and f"{name}s" in owner.model_fields:
            error.fix = f"{name}s: {value}"  # a number of such sections
        return error
    return InputError(detail["msg"], key=key, found=brief(value), allowed=_allowed(field), fix=context.get("fix"))


def _no_member(detail: ErrorDetails, key: str, written_key: str, field: FieldInfo | None) -> InputError:
    """Return the error of a value that is none of some words, no list or one of a wrong length, or of no union."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "literal_error":
        return _unknown_word(key, written_key, value, context)
    if kind in _LENGTHS:
        word, limit = _LENGTHS[kind]
        return InputError("has not as many items", key=key, found=brief(value), allowed=f"{word} {context[limit]}")
    if "members" in context:
        wanted = _any_of(_WANTED[one] for one in context["members"])
        return InputError(f"must be {wanted}", key=key, found=brief(value), allowed=wanted)
    return _no_list(key, field, value)


def _unknown_word(key: str, written_key: str, value: object, context: dict[str, Any]) -> InputError:
    """Return the error of a value that is none of the words of ``context``. Text is not told to be a list."""
    words = [text or number for text, number in re.findall(r"'([^']*)'|(\d+)", context["expected"])]
    meant = synonyms.value_here(value)
    near = meant if meant in words else _off_or_on(value, words) or closest(value, words)
    sweep = swept(written_key, value, "|".join(map(re.escape, words)))
    fix = sweep or (f"{key.rpartition('.')[2]}: {near}" if near else None)
    other_types = [kind for kind in context.get("members", ()) if kind != "literal_error"]
    allowed = ", ".join(words)
    if "bool_type" in other_types:
        allowed = _any_of(["true", "false", *words])
    elif other_types and not isinstance(value, str):
        allowed = f"{allowed}, or {_any_of(_WANTED[kind] for kind in other_types)}"
    return InputError("is none of the known values", key=key, found=brief(value), allowed=allowed, fix=fix)


def _off_or_on(value: object, words: list[str]) -> str | None:
    """Return the words that false or true may mean, of some ``words`` with ``none`` among them.

    >>> _off_or_on(False, ["none", "cpu", "nvme"]), _off_or_on(True, ["none", "cpu", "nvme"])
    ('none', 'cpu or nvme')
    """
    if not isinstance(value, bool) or "none" not in words:
        return None
    return " or ".join(word for word in words if word != "none") if value else "none"


def _no_list(key: str, field: FieldInfo | None, value: object) -> InputError:
    """Return the error of a value that is no list, with the words that one can have."""
    words = [] if field is None else list(dict.fromkeys(_values(field.annotation)))
    near = [closest(word.strip(), words) for word in value.split(",")] if isinstance(value, str) else [None]
    return InputError(
        "must be a list",
        key=key,
        found=brief(value),
        allowed=f"a list of {', '.join(words)}" if words else "a list",
        fix=f"{key.rpartition('.')[2]}: [{', '.join(map(str, near))}]" if all(near) else None,
    )


def _wrong_type(
    kind: str, key: str, written_key: str, name: str, field: FieldInfo | None, value: Any, data: Any
) -> InputError:
    """Return the error of a value of another type than the key has."""
    wanted, fix = _WANTED[kind], None
    allowed = ", ".join([wanted, *(_bounds(field) if "number" in wanted else [])])
    if kind in ("float_type", "int_type"):
        if isinstance(value, str) and has_foreign_unit(value, quantity_of(key)):
            return _wrong_unit(key, value, allowed, data)
        if isinstance(value, str) and is_unusual(value):
            plain = " or ".join(plain_spellings(value))
            return InputError(
                UNUSUAL, key=key, found=brief(value), allowed=f"{allowed}: digits 0 to 9", fix=f"{name}: {plain}"
            )
        fix = number_fix(written_key, name, value, kind == "int_type") if isinstance(value, str) else None
    if kind == "string_type" and isinstance(value, int | float) and not isinstance(value, bool):
        fix = f'{name}: "{value}", in quotes'
    if "number" in wanted and (quantity := quantity_of(key)):
        allowed = f"{allowed}; with a unit such as {quantity.example}"
    if kind == "model_type":
        keys = _keys(field)
        allowed = f"{allowed}: {keys}" if keys else allowed
        fix = _key_of_word(written_key, field, value)
    return InputError(f"must be {wanted}", key=key, found=brief(value), allowed=allowed, fix=fix)


def _wrong_unit(key: str, value: str, allowed: str, data: Any) -> InputError:
    """Return the error of a number with a unit that its ``key`` has not; ``data``: of the whole file."""
    name, quantity = key.rpartition(".")[2], quantity_of(key)
    if quantity is not None:
        near = " or ".join(nearest_spellings(value, quantity))
        message, allowed = "has no such unit", f"{allowed}; with a unit such as {quantity.example}"
        return InputError(
            message, key=key, found=brief(value), allowed=allowed, fix=f"{name}: {near}" if near else None
        )
    if name not in SEQUENCE_COUNTS:
        plain = " or ".join(plain_spellings(value))
        fix = f"{name}: {plain}" if plain else None
        return InputError("takes no unit", key=key, found=brief(value), allowed=allowed, fix=fix)
    section = data.get(key.rpartition(".")[0], {}) if isinstance(data, Mapping) else {}
    seq = section.get("seq") if isinstance(section, Mapping) else None
    fix = f"{name}: {in_sequences(value, seq)}"
    return InputError("counts sequences, without a unit", key=key, found=brief(value), allowed=allowed, fix=fix)


def _unknown_key(model: type[BaseModel], owner: type[BaseModel], key: str, value: object) -> InputError:
    name = key.rpartition(".")[2]
    fix = synonyms.replacement(name, value) or _enclosing(model, key, value) or _meant(model, owner, key)
    return UnknownKeyError(
        "unknown key", key=key, allowed=nearest_names(name, fields_by_key(owner), _ALL_KEYS), fix=fix
    )


def _enclosing(model: type[BaseModel], key: str, value: object) -> str | None:
    """Return the key of this name, and its value, in a section around the one that ``key`` was written in."""
    *sections, _, name = re.sub(r"\[\d+\]", "", key).split(".") if "." in key else ["", key]
    keys = set(paths(model))
    around = (".".join([*sections[:depth], name]) for depth in range(len(sections), 0, -1))
    path = next((path for path in around if path in keys), None)
    return f"{path}: {value}" if path and isinstance(value, str | int | float) else path


def _key_of_word(key: str, field: FieldInfo | None, value: object) -> str | None:
    """Return the setting meant by a plain ``value`` where a section must be, as one of its keys lists that value."""
    sections = {} if field is None or not isinstance(value, str) else sections_in(field.annotation)
    for section in sections.values():
        for name, inner in fields_by_key(section).items():
            if value in list(_values(inner.annotation)):
                return f"{key}.{name}={value}"
    return None


def _meant(model: type[BaseModel], owner: type[BaseModel], path_of_key: str) -> str | None:
    """Return the text to write instead of the last name of a key: synonyms come before names that look like it."""
    allowed = fields_by_key(owner)
    above, _, name = path_of_key.rpartition(".")
    if synonym := synonyms.here(name, above.rpartition(".")[2]):
        section, key = synonym
        return f"{key} instead of {name}" if key.split(":")[0] in allowed else f"{section}.{key}"
    inside = (path for path in paths(model) if path.rsplit(".", 1)[-1] == name) if owner is model else iter(())
    if path := next(inside, None):  # a key inside a section is meant for that section
        return path
    near = closest(name, allowed)
    return f"{near} instead of {name}" if near else None


#: Tags of union members that are no sections.
_FORMS = ("text", "list")
#: What pydantic calls members of a union without tags, all of which are plain values.
_UNTAGGED = re.compile(r"(literal|tuple|dict|function-\w+)\[|(bool|int|float|str)$")


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """Return the dotted key of a pydantic location, and the section that holds its last part."""
    key, owner, inside = "", model, {model.__name__: model}
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part in inside and inside[part] is not model:  # the tag of a union's member, no key
            owner = inside[part]
        elif (part in _FORMS or (not inside and _UNTAGGED.match(part))) and part not in fields_by_key(owner):
            continue
        else:
            if len(inside) == 1:
                owner = next(iter(inside.values()))
            if part != getattr(owner, "list_means", None):
                key += f".{part}" if key else part
            inside = sections_in(fields_by_key(owner)[part].annotation) if part in fields_by_key(owner) else {}
    return key, owner


def _field(owner: type[BaseModel], loc: tuple[int | str, ...]) -> FieldInfo | None:
    """Return the field of the value that ``loc`` points to, be it in a list."""
    fields = fields_by_key(owner)
    return next((fields[part] for part in reversed(loc) if part in fields), None)


def _allowed(field: FieldInfo | None) -> str | None:
    """Return the range of a field's number, or the values that it lists."""
    listed = [] if field is None else [*_bounds(field), *_values(field.annotation)]
    return ", ".join(dict.fromkeys(listed)) or None


def _bounds(field: FieldInfo | None) -> list[str]:
    """Return the range of a field's number, such as ``[">= 1", "<= 10,000"]``, be it in a list or beside null."""
    bounds = [] if field is None else [*field.metadata, *_metadata(field.annotation)]
    return [
        _bound(sign, getattr(bound, kind))
        for bound in bounds
        for kind, sign in _BOUNDS.values()
        if getattr(bound, kind, None) is not None
    ]


def _keys(field: FieldInfo | None) -> str | None:
    """Return the keys of the sections that a field can hold."""
    sections = {} if field is None else sections_in(field.annotation)
    return (
        nearest_names("", (key for section in sections.values() for key in fields_by_key(section)), _ALL_KEYS) or None
    )


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yield the notes beside the types inside an annotation."""
    for note in getattr(annotation, "__metadata__", ()):
        yield from note.metadata if isinstance(note, FieldInfo) else [note]
    for part in get_args(annotation):
        yield from _metadata(part)


def _values(annotation: Any) -> Iterator[str]:
    """Yield the values that an annotation lists."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    for part in get_args(annotation):
        yield from _values(part)


def _meaning(owner: type[BaseModel], name: str) -> str | None:
    text = docstring_of(owner, name)
    return text.split("\n\n")[0].replace("\n", " ") if text else None

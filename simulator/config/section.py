"""Sections of input files, and what is wrong with one said in one form.

`validated` turns plain data into a pydantic model, and raises `InputError` only.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from simulator.config import synonyms
from simulator.errors import InputError
from simulator.input_files import brief, closest


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or of a library such as numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain(value: object) -> object:
    """A number or an array of numpy, by its ``tolist``, as Python's own; so too the members of a list."""
    if isinstance(value, list):
        return [one.tolist() if hasattr(one, "tolist") else one for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise PydanticCustomError("printable", "must be printable text, on one line")
    return value


#: Text that is shown to people: no control characters, no line breaks, no halves of characters.
Text = Annotated[str, AfterValidator(_printable)]
#: Put into `Annotated` after the bounds of a whole number: ``25e6`` is one too.
Integral = BeforeValidator(_integral)
#: A whole number without bounds.
Whole = Annotated[int, Integral]
#: Put into `Annotated` beside a tuple type: YAML has lists only.
AsTuple = BeforeValidator(_listed)


class Section(BaseModel):
    """Base of every section of an input file: frozen, unknown keys refused, no coercion but of numpy's numbers to
    Python's, finite numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_without_nulls(cls, data: object) -> object:
        """null is the default."""
        if not isinstance(data, Mapping):
            return data
        return {key: _plain(value) for key, value in data.items() if value is not None or key not in cls.model_fields}


class ShortSection(Section):
    """A section that a plain text may stand for, which is the value of the key that ``text_means``."""

    text_means: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, data: object) -> object:
        return {cls.text_means: data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of what stands in a file."""
        schema = handler.resolve_ref_schema(handler(core))
        mapping = dict(schema)
        schema.clear()
        schema["anyOf"] = [{"enum": mapping["properties"][cls.text_means]["enum"]}, mapping]
        return schema


#: So many things wrong with one file are said; the others are counted.
MAX_ERRORS = 20


class CombinedInputError(InputError):
    """Several things wrong at once; the message lists them, and says how many ``more`` there are."""

    def __init__(self, errors: Iterable[InputError], more: int = 0) -> None:
        self.errors, self.more = tuple(errors), more
        rest = [f"... and {more:,} more"] if more else []
        super().__init__("\n".join([*(str(error) for error in self.errors), *rest]))


def each(error: InputError) -> tuple[tuple[InputError, ...], int]:
    """The things that an error says are wrong, and how many more there are."""
    return (error.errors, error.more) if isinstance(error, CombinedInputError) else ((error,), 0)


def raise_all(errors: Iterable[InputError], more: int = 0) -> None:
    """Raise one `InputError` that says the first of ``errors`` and counts the rest, with the ``more`` that the caller
    has left out; nothing where there is none."""
    found: list[InputError] = []
    for error in errors:
        said, unsaid = each(error)
        found += said
        more += unsaid
    more += len(found[MAX_ERRORS:])
    if found:
        raise found[0] if len(found) == 1 and not more else CombinedInputError(found[:MAX_ERRORS], more)


M = TypeVar("M", bound=BaseModel)
#: Where a dotted key of a model was written: the file to name, and the key as it stands there.
Origin = Callable[[str], tuple[object, str]]


def validated(model: type[M], data: Any, file: object, *, origin: Origin | None = None) -> M:
    """``data`` as a ``model``; ``file`` is named in errors, or what ``origin`` says of the key that is wrong.

    Raises one `InputError` that lists everything wrong, each with its dotted key, what was found and what is allowed.
    """
    more = 0
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        details = [detail for detail in failure.errors(include_url=False) if detail["type"] != _FOLLOWS]
        # Of a key that may also be a list, text that is none of its words is not told to be one.
        words = {_locate(model, detail["loc"])[0] for detail in details if detail["type"] == "literal_error"}
        details = [one for one in details if one["type"] != "tuple_type" or _locate(model, one["loc"])[0] not in words]
        errors = [_explained(model, detail) for detail in details[:MAX_ERRORS]]
        more = len(details) - len(errors)
    except InputError as failure:  # raised by the checks of the model itself, which do not know the file
        said, more = each(failure)
        errors = list(said)
    with located(lambda key: origin(key) if origin and key else (file, key)):
        raise_all(errors, more)
    raise AssertionError("a validation error without details")


@contextmanager
def located(origin: Origin) -> Iterator[None]:
    """What the block raises names the file and the key that ``origin`` says, unless it names a file."""
    try:
        yield
    except InputError as failure:
        errors, more = each(failure)
    else:
        return
    for error in errors:
        if error.file is None:
            where, key = origin(error.key or "")
            error.key, error.file = key or None, None if where is None else str(where)
    raise_all(errors, more)


#: The kind of an error that follows from another, which is listed.
_FOLLOWS = "default_factory_not_called"
_WANTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "printable text, on one line",
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
_LENGTHS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}


def _bound(sign: str, value: float) -> str:
    """Such as ``<= 10,000`` or ``>= 1e-06``."""
    return f"{sign} {value:,.0f}" if value == int(value) else f"{sign} {value:g}"


def _explained(model: type[BaseModel], detail: ErrorDetails) -> InputError:
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    key, owner = _locate(model, detail["loc"])
    name = key.rpartition(".")[2] if kind == "literal_error" else str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "extra_forbidden":
        return _unknown_key(model, owner, key, found)
    field = _field(owner, detail["loc"])
    if kind == "missing":
        meaning = _meaning(owner, name)
        message = "a required key is missing" + (f" ({meaning})" if meaning else "")
        return InputError(message, key=key, allowed=_allowed(field) or _keys(field))
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        known = [text or number for text, number in options]
        near = closest(found, known)
        fix = f"{name}: {near}" if near else None
        return InputError("is none of the known values", key=key, found=brief(found), allowed=", ".join(known), fix=fix)
    if kind in _BOUNDS:
        nearest = context[_BOUNDS[kind][0]]
        fix = f"{key.rpartition('.')[2]}: {nearest}" if kind.endswith("_equal") and isinstance(nearest, int) else None
        return InputError("is out of range", key=key, found=brief(found), allowed=", ".join(_bounds(field)), fix=fix)
    if kind in _LENGTHS:
        word, limit = _LENGTHS[kind]
        return InputError("has not as many items", key=key, found=brief(found), allowed=f"{word} {context[limit]}")
    if kind in _WANTED:
        fix = None
        if kind in ("float_type", "int_type") and isinstance(found, str) and re.fullmatch(r"[-+.\deE]+", found.strip()):
            fix = f"{name}: {found.strip()}, without quotes"
        if kind == "string_type" and isinstance(found, int | float) and not isinstance(found, bool):
            fix = f'{name}: "{found}", in quotes'
        allowed = ", ".join([_WANTED[kind], *(_bounds(field) if "number" in _WANTED[kind] else [])])
        if kind == "model_type":
            allowed = f"{allowed}: {_keys(field)}"
        return InputError(f"must be {_WANTED[kind]}", key=key, found=brief(found), allowed=allowed, fix=fix)
    return InputError(detail["msg"], key=key, found=brief(found), allowed=_allowed(field))


def _unknown_key(model: type[BaseModel], owner: type[BaseModel], key: str, found: object) -> InputError:
    name = key.rpartition(".")[2]
    fix = synonyms.replacement(name, found) or _meant(model, owner, name)
    return InputError("unknown key", key=key, allowed=", ".join(_fields(owner)), fix=fix)


def _meant(model: type[BaseModel], owner: type[BaseModel], name: str) -> str | None:
    """What to write instead of ``name``: what is known of it comes before what it looks like."""
    allowed = _fields(owner)
    if known := synonyms.here(name):
        section, key = known
        return f"{key} instead of {name}" if key.split(":")[0] in allowed else f"{section}.{key}"
    if near := closest(name, allowed):
        return f"{near} instead of {name}"
    if owner is model:  # a key inside a section is meant for that section
        return next((path for path in paths(model) if path.rsplit(".", 1)[-1] == name), None)
    return None


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """By the key that stands in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def likeliest(value: object, *sections: type[BaseModel]) -> str:
    """The name of the one of ``sections`` that ``value`` is of or, where it is a mapping, is meant as: the one whose
    first key it has, or else most keys, nearly right ones after right ones; the first of equals."""
    if not isinstance(value, Mapping):
        return next((one.__name__ for one in sections if isinstance(value, one)), sections[0].__name__)

    def likeness(section: type[BaseModel]) -> tuple[bool, int, int]:
        keys = list(_fields(section))
        return keys[0] in value, sum(key in keys for key in value), sum(closest(key, keys) is not None for key in value)

    return max(sections, key=likeness).__name__


#: Tags of union members that are no sections.
_FORMS = ("text", "list")
#: What pydantic calls members of a union without tags.
_UNTAGGED = re.compile(r"(literal|tuple|dict|function-\w+)\[")


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """The dotted key of a pydantic location, and the section that holds its last part."""
    key, owner, inside = "", model, {model.__name__: model}
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part in inside and inside[part] is not model:  # the tag of a union's member, no key
            owner = inside[part]
        elif (part in _FORMS or _UNTAGGED.match(part)) and part not in _fields(owner):
            continue
        else:
            if len(inside) == 1:
                owner = next(iter(inside.values()))
            key += f".{part}" if key else part
            inside = _sections(_fields(owner)[part].annotation) if part in _fields(owner) else {}
    return key, owner


def _sections(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models that a field of this type can hold, by class name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.__name__: annotation}
    return {name: section for part in get_args(annotation) for name, section in _sections(part).items()}


def paths(model: type[BaseModel]) -> Iterator[str]:
    """The dotted keys of a model and of the sections in it."""
    for name, field in _fields(model).items():
        yield name
        for section in _sections(field.annotation).values():
            yield from (f"{name}.{path}" for path in paths(section))


def _field(owner: type[BaseModel], loc: tuple[int | str, ...]) -> FieldInfo | None:
    """The field that holds what ``loc`` points to, be it in a list."""
    fields = _fields(owner)
    return next((fields[part] for part in reversed(loc) if part in fields), None)


def _allowed(field: FieldInfo | None) -> str | None:
    """The range of a field's number, or the values that it lists."""
    listed = [] if field is None else [*_bounds(field), *_values(field.annotation)]
    return ", ".join(dict.fromkeys(listed)) or None


def _bounds(field: FieldInfo | None) -> list[str]:
    """The range of a field's number, such as ``[">= 1", "<= 10,000"]``, be it in a list or beside null."""
    bounds = [] if field is None else [*field.metadata, *_metadata(field.annotation)]
    return [
        _bound(sign, getattr(bound, kind))
        for bound in bounds
        for kind, sign in _BOUNDS.values()
        if getattr(bound, kind, None) is not None
    ]


def _keys(field: FieldInfo | None) -> str | None:
    """Those of the sections that a field can hold."""
    sections = {} if field is None else _sections(field.annotation)
    return ", ".join(dict.fromkeys(key for section in sections.values() for key in _fields(section))) or None


def _metadata(annotation: Any) -> Iterator[Any]:
    """What stands beside the types inside an annotation."""
    for note in getattr(annotation, "__metadata__", ()):
        yield from note.metadata if isinstance(note, FieldInfo) else [note]
    for part in get_args(annotation):
        yield from _metadata(part)


def _values(annotation: Any) -> Iterator[str]:
    """Those that an annotation lists."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    for part in get_args(annotation):
        yield from _values(part)


def _meaning(owner: type[BaseModel], name: str) -> str | None:
    field = _fields(owner).get(name)
    return field.description.split("\n\n")[0].replace("\n", " ") if field and field.description else None

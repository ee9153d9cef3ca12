"""Sections of input files as pydantic models: those of a workload, and those made from plain dataclasses.

A dataclass says what a section holds: fields, bounds, defaults, and a docstring per field. `section_of` makes the
pydantic model that checks the data of a file; what comes out of the check is the dataclass itself. A class
variable ``text_means`` names the field that a plain text in its place means, ``list_means`` that of a list.
``laid_over`` names the key of another file, over which keys are laid.
"""

from __future__ import annotations

import ast
import dataclasses
import numbers
import sys
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeGuard, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    create_model,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from simulator.input_files import closest
from simulator.quantities import as_written, quantity_of


def _with_units(key: str, schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return the schema of a number under ``key``, or of such a number with a unit; any other schema as it is."""
    quantity = quantity_of(key)
    parts = schema.get("anyOf", [schema])
    if quantity is None or not any(part.get("type") in ("number", "integer") for part in parts):
        return schema
    beside = {name: value for name, value in schema.items() if name in ("title", "default", "description")}
    number = [{name: value for name, value in part.items() if name not in beside} for part in parts]
    return {**beside, "anyOf": [*number, {"type": "string", "examples": [quantity.example.partition(",")[0]]}]}


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, of Python or of a library such as numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain(value: object) -> object:
    """Return a number or an array of numpy, by its ``tolist``, as Python's own; so too the members of a list."""
    if isinstance(value, list):
        return [one.tolist() if hasattr(one, "tolist") else one for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


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
        protected_namespaces=(),
        defer_build=True,  # of the many sections only those are built that a command reads
    )
    #: The class under whose fields their docstrings stand; None: this one.
    documented_in: ClassVar[type | None] = None

    @model_validator(mode="before")
    @classmethod
    def _plain_without_nulls(cls, data: object) -> object:
        """Leave out keys that are null: they have their default. Read numbers with units."""
        if not isinstance(data, Mapping):
            return data
        return {
            key: as_written(str(key), _plain(value))
            for key, value in data.items()
            if value is not None or key not in cls.model_fields
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema, with the docstrings of the fields, whose numbers may have units."""
        schema = handler.resolve_ref_schema(handler(core))
        for key in fields_by_key(cls):
            schema["properties"][key] = _with_units(key, schema["properties"][key])
            if text := docstring_of(cls, key):
                schema["properties"][key]["description"] = text
        return schema


class ShortSection(Section):
    """A section that a plain text may stand for, which is the value of the key that ``text_means``.

    A plain number is taken so too, to be refused with the values that the key has.
    """

    text_means: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: object) -> object:
        return {cls.text_means: data} if isinstance(data, str | bool | int | float) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of what stands in a file."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        mapping = dict(schema)
        short = mapping["properties"][cls.text_means]
        schema.clear()
        schema["anyOf"] = [{key: short[key] for key in ("type", "enum") if key in short}, mapping]
        return schema


class ListedSection(Section):
    """A section that stands in a file as a list, which is the value of the key that ``list_means``."""

    list_means: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: object) -> object:
        return {cls.list_means: data} if isinstance(data, list | tuple) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of the list that stands in a file."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        listed = {**schema["properties"][cls.list_means], "description": schema.get("description", "")}
        schema.clear()
        schema.update(listed)
        return schema


class LaidOverSection(Section):
    """A section whose file may lay some keys over those of another file, which the key ``laid_over`` names."""

    laid_over: ClassVar[str]

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of a whole section, or of any keys beside the name of the other file."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        whole = dict(schema)
        schema.clear()
        schema["anyOf"] = [{"type": "object", "required": [cls.laid_over]}, whole]
        return schema


class AsSection:
    """Put into `Annotated` beside a dataclass: data is checked by its `section_of`; an instance is taken as it is."""

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        def check(value: object, inner: Any) -> object:
            if isinstance(value, source):
                return value
            section = inner(value)
            return source(**{name: getattr(section, name) for name in type(section).model_fields})

        return core_schema.no_info_wrap_validator_function(
            check,
            handler.generate_schema(section_of(source)),
            serialization=core_schema.plain_serializer_function_ser_schema(as_data),
        )


@cache
def section_of(plain: type) -> type[Section]:
    """Return the pydantic model that checks the data of a dataclass."""
    hints = get_type_hints(plain, include_extras=True)
    fields: dict[str, Any] = {
        field.name: (_checked(hints[field.name]), _field_info(field)) for field in dataclasses.fields(plain)
    }
    return create_model(plain.__name__, __base__=_base_of(plain), __doc__=plain.__doc__, **fields)


def _base_of(plain: type) -> type[Section]:
    """Return the base of a dataclass's model, which says whether a text, a list or another file stands for it."""
    base: type[Section] = Section
    members: dict[str, Any] = {"__module__": plain.__module__, "documented_in": plain}
    kinds = {"text_means": ShortSection, "list_means": ListedSection, "laid_over": LaidOverSection}
    for name, kind in kinds.items():
        if key := getattr(plain, name, None):
            base, members = kind, members | {name: key}
    return type("Base", (base,), members)


def _field_info(field: dataclasses.Field[Any]) -> Any:
    """Return pydantic's form of a field; one called ``from_`` stands under the key ``from``, which Python reserves."""
    arguments: dict[str, Any] = {}
    if field.name.endswith("_"):
        arguments["alias"] = field.name.rstrip("_")
    if field.default is not dataclasses.MISSING:
        arguments["default"] = field.default
    elif field.default_factory is not dataclasses.MISSING:
        arguments["default_factory"] = field.default_factory
    return Field(**arguments)


def _checked(hint: Any, *bounds: Any) -> Any:
    """Return the annotation by which pydantic checks a field with this type hint.

    Whole numbers may be written as ``1e3``, and tuples as lists.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(args[0], *args[1:], *bounds)
    if hint is int:
        return _with(int, *bounds, Integral)
    if dataclasses.is_dataclass(hint):
        return _with(hint, AsSection())
    if origin is tuple:
        parts = [part if part is ... else _checked(part) for part in args]
        return _with(tuple[*parts], *bounds, AsTuple)  # type: ignore[valid-type]
    if origin is dict:
        return dict[*map(_checked, args)]  # type: ignore[misc]
    if origin in (Union, types.UnionType):
        kinds: list[type] = [part for part in args if isinstance(part, type) and dataclasses.is_dataclass(part)]
        if len(kinds) == len(args):
            members = [_with(kind, AsSection(), Tag(kind.__name__)) for kind in kinds]
            return _with(
                Union[*members],
                Discriminator(lambda value: likeliest(value, *kinds)),
            )
        return Union[*map(_checked, args)]
    return _with(hint, *bounds)


def _with(hint: Any, *notes: Any) -> Any:
    return Annotated[hint, *notes] if notes else hint


def docstring_of(section: type[BaseModel], key: str) -> str | None:
    """Return the docstring under the field of a section that stands under ``key``; None without one.

    Sources are read when somebody asks, and each once. Pydantic would read them for every section that is made.
    """
    name = next((name for name, field in section.model_fields.items() if (field.alias or name) == key), key)
    owner = getattr(section, "documented_in", None) or section
    bases = [base for base in owner.__mro__ if dataclasses.is_dataclass(base) or issubclass(base, Section)]
    texts = (_docstrings_of_module(base.__module__).get(base.__name__, {}).get(name) for base in bases)
    return next(filter(None, texts), None)


@cache
def _docstrings_of_module(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings under the fields of every class of a module, by class and name."""
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    texts: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            texts[node.name] = dict(_docstrings_of_class(node))
    return texts


def _docstrings_of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                yield name, "\n".join(line.strip() for line in words.splitlines())


def as_data(value: Any, *, nulls: bool = True, defaults: bool = True) -> Any:
    """Return a dataclass as the mapping that a file would hold, with all in it.

    Fields that are None are left out without ``nulls``, those that have their default without ``defaults``.
    """
    if (listed := getattr(value, "list_means", None)) is not None:
        return as_data(getattr(value, listed), nulls=nulls, defaults=defaults)
    if dataclasses.is_dataclass(value):
        return {
            field.name.rstrip("_"): as_data(member, nulls=nulls, defaults=defaults)
            for field in dataclasses.fields(value)
            for member in (getattr(value, field.name),)
            if (nulls or member is not None) and (defaults or not _is_default(field, member))
        }
    if isinstance(value, Mapping):
        return {key: as_data(member, nulls=nulls, defaults=defaults) for key, member in value.items()}
    if isinstance(value, tuple):
        return tuple([as_data(member, nulls=nulls, defaults=defaults) for member in value])
    return value


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return bool(value == field.default)


def fields_by_key(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by the keys that stand in a file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def sections_in(annotation: Any) -> dict[str, type[BaseModel]]:
    """Return the sections that a field of this type can hold, by class name."""
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return {annotation.__name__: annotation}
        if dataclasses.is_dataclass(annotation):
            return {annotation.__name__: section_of(annotation)}
    return {name: section for part in get_args(annotation) for name, section in sections_in(part).items()}


def paths(section: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted keys of a section and of the sections in it."""
    for name, field in fields_by_key(section).items():
        yield name
        for inner in sections_in(field.annotation).values():
            yield from (f"{name}.{path}" for path in paths(inner))


def likeliest(value: object, *kinds: type) -> str:
    """Return the name of the dataclass of ``kinds`` that ``value`` is of or, if it is a mapping or list, is meant as.

    A list is the one that stands as a list. A mapping is the one whose first key it has, or else most keys, nearly
    right ones after right ones; the first of equals.
    """
    if isinstance(value, list | tuple):
        return next((kind.__name__ for kind in kinds if hasattr(kind, "list_means")), kinds[0].__name__)
    if not isinstance(value, Mapping):
        return next((kind.__name__ for kind in kinds if isinstance(value, kind)), kinds[0].__name__)

    def likeness(kind: type) -> tuple[bool, int, int]:
        keys = list(fields_by_key(section_of(kind)))
        return keys[0] in value, sum(key in keys for key in value), sum(closest(key, keys) is not None for key in value)

    return max(kinds, key=likeness).__name__

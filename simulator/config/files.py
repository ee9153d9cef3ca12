"""Reading YAML and JSON strictly, and saying what is wrong in them in one form.

`read_yaml` gives plain data; `validated` turns it into a pydantic model. Both raise `InputError` only.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from simulator.errors import InputError

MAX_FILE_BYTES = 10_000_000


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


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
    """Base of every section of an input file: frozen, unknown keys refused, no coercion, finite numbers."""

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
    def _null_is_the_default(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in cls.model_fields}


class _Loader(yaml.SafeLoader):
    """YAML with the numbers of YAML 1.2 (``450e9`` is one, ``010`` is ten, ``1:30`` is text) and no duplicate keys."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._flat: set[yaml.Node] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # PyYAML's constructors raise whatever the text of a tagged value leads them to
            value = brief(node.value) if isinstance(node, yaml.ScalarNode) else "this value"
            kind = node.tag.rsplit(":", 1)[-1]
            problem = f"holds a value that cannot be read: {value} as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put in what merge keys (``<<: *anchor``) stand for; keys beside them win."""
        if node in self._flat:
            return
        self._flat.add(node)
        self._refuse_duplicates(node)
        super().flatten_mapping(node)
        node.value = list(  # one of each key, so that merges of merges do not multiply
            {
                (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key: (key, value)
                for key, value in node.value
            }.values()
        )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):  # anything else is refused below
            self.flatten_mapping(node)
        return super().construct_mapping(node, deep=deep)

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            if isinstance(key, Hashable):
                seen.add(key)


def _yaml_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16 if "x" in text else 8 if "o" in text else 10)


def _yaml_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(
        str(loader.construct_scalar(node)).replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
    )


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rsplit(":", 1)[-1] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _construct in (
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7_]+|0x[0-9a-fA-F_]+", _yaml_int),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _yaml_float,
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)


#: Every file read so far, so that a command does not write over its own input.
files_read: set[Path] = set()


def as_path(text: str | Path, *, base: Path | None = None, file: object = None, key: str | None = None) -> Path:
    """The path that ``text`` means, from ``base`` where there is such a file; ``~`` is a home.

    Raises `InputError`, naming ``file`` and ``key`` as the place of the text, where no file can have this name.
    """
    try:
        path = Path(text).expanduser()
        if "\0" in str(path):  # which `exists` answers with no
            raise ValueError("embedded null character")
        if base is not None and (base / path).exists():
            return base / path
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, not encodable
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be a file: {reason}", file=file, key=key, found=brief(str(text))) from None
    return path


def read_text(path: Path) -> str:
    """The file's text (UTF-8, at most 10 MB). Raises `InputError`: missing, a directory, unreadable, binary, empty."""
    try:
        if path.is_dir():
            raise InputError("is a directory, not a file", file=path)
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        files_read.add(path.resolve())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError("is too large for an input file", file=path, allowed=f"at most {MAX_FILE_BYTES // 10**6} MB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError("is not text (UTF-8)", file=path)
    if not text.strip():
        raise InputError("is empty", file=path)
    return text


def parse_yaml(text: str, file: object) -> Any:
    """The value of one YAML document. Raises `InputError` with the line of a syntax error or a duplicate key."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{line}{error.problem or error.context}", file=file) from None
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {str(error).splitlines()[0]}", file=file) from None
    except RecursionError:
        raise InputError("is nested too deeply", file=file) from None
    except ValueError as error:
        raise InputError(f"holds a value that cannot be read: {error}", file=file) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises `InputError` where the file is missing, a directory, empty, binary, no YAML, or no mapping at its top level.
    """
    return as_mapping(parse_yaml(read_text(path), path), path)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises `InputError` as `read_yaml` does."""
    try:
        return as_mapping(json.loads(read_text(path)), path)
    except json.JSONDecodeError as error:
        raise InputError(f"line {error.lineno}, column {error.colno}: {error.msg}", file=path) from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"cannot be read as JSON: {error}", file=path) from None


def as_mapping(data: Any, path: Path) -> dict[str, Any]:
    """``data``, read from a file, where it is a mapping. Raises `InputError` where it is not."""
    if data is None:
        raise InputError("is empty", file=path)
    if not isinstance(data, dict):
        raise InputError("must hold keys and values at its top level", file=path, found=brief(data))
    return data


def closest(word: object, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``word`` most likely means, or None.

    >>> closest("gpt3_175b", ["gpt3-175b", "gpt3-13b"]), closest("1F1B", ["1f1b"]), closest("zebra", ["1f1b"])
    ('gpt3-175b', '1f1b', None)
    """
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(str(word).lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


class _Brief(str):
    __slots__ = ()
    __repr__ = str.__str__


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 2, 6, 8, 8
_SHORT.maxstring = _SHORT.maxother = 100


def brief(value: object) -> object:
    """``value`` as it stands in an error message: as YAML writes it, and cut where it is long or deep."""
    if value is None or isinstance(value, bool):
        return _Brief({None: "null", True: "true", False: "false"}[value])
    return _Brief(_SHORT.repr(value))


#: So many things wrong with one file are said; the others are counted.
MAX_ERRORS = 20


class CombinedInputError(InputError):
    """Several things wrong at once; the message lists them, and says how many ``more`` there are."""

    def __init__(self, errors: Iterable[InputError], more: int = 0) -> None:
        self.errors, self.more = tuple(errors), more
        rest = [f"... and {more:,} more"] if more else []
        super().__init__("\n".join([*(str(error) for error in self.errors), *rest]))


def raise_all(errors: Iterable[InputError], more: int = 0) -> None:
    """Raise one `InputError` that says the first of ``errors`` and counts the rest, with the ``more`` that the caller
    has left out; nothing where there is none."""
    found = list(errors)
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
        errors = [_explained(model, detail) for detail in details[:MAX_ERRORS]]
        more = len(details) - len(errors)
    except CombinedInputError as failure:  # raised by the checks of the model itself, which do not know the file
        errors, more = list(failure.errors), failure.more
    except InputError as failure:
        errors = [failure]
    for error in errors:
        if error.file is None:
            where, error.key = origin(error.key) if origin and error.key else (file, error.key)
            error.file = None if where is None else str(where)
    raise_all(errors, more)
    raise AssertionError("a validation error without details")


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
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


def _bound(sign: str, value: float) -> str:
    """Such as ``<= 10,000`` or ``>= 1e-06``."""
    return f"{sign} {value:,.0f}" if value == int(value) else f"{sign} {value:g}"


def _explained(model: type[BaseModel], detail: ErrorDetails) -> InputError:
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    key, owner = _locate(model, detail["loc"])
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "extra_forbidden":
        return _unknown_key(model, owner, key, name)
    if kind == "missing":
        meaning = _meaning(owner, name)
        message = "a required key is missing" + (f" ({meaning})" if meaning else "")
        return InputError(message, key=key, allowed=", ".join(_bounds(owner, name)) or None)
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        known = [text or number for text, number in options]
        near = closest(found, known)
        fix = f"{name}: {near}" if near else None
        return InputError("is none of the known values", key=key, found=brief(found), allowed=", ".join(known), fix=fix)
    if kind in _BOUNDS:
        bound, sign = _BOUNDS[kind]
        return InputError("is out of range", key=key, found=brief(found), allowed=_bound(sign, context[bound]))
    if kind in _WANTED:
        fix = None
        if kind in ("float_type", "int_type") and isinstance(found, str) and re.fullmatch(r"[-+.\deE]+", found.strip()):
            fix = f"{name}: {found.strip()}, without quotes"
        allowed = ", ".join([_WANTED[kind], *_bounds(owner, name)])
        return InputError(f"must be {_WANTED[kind]}", key=key, found=brief(found), allowed=allowed, fix=fix)
    return InputError(detail["msg"], key=key, found=brief(found))


def _unknown_key(model: type[BaseModel], owner: type[BaseModel], key: str, name: str) -> InputError:
    allowed = list(owner.model_fields)
    near = closest(name, allowed)
    fix = f"{near} instead of {name}" if near else None
    if near is None and owner is model:  # a key inside a section is meant for that section
        elsewhere = [path for path in _paths(model) if path.rsplit(".", 1)[-1] == name]
        if elsewhere:
            fix = elsewhere[0]
    return InputError("unknown key", key=key, allowed=", ".join(allowed), fix=fix)


#: Tags of union members that are no sections.
_FORMS = ("text", "list")
#: What pydantic calls members of a union without tags.
_UNTAGGED = re.compile(r"(literal|tuple|function-\w+)\[")


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, type[BaseModel]]:
    """The dotted key of a pydantic location, and the section that holds its last part."""
    key, owner, inside = "", model, {model.__name__: model}
    for part in loc:
        if isinstance(part, int):
            key += f"[{part}]"
        elif part in inside and inside[part] is not model:  # the tag of a union's member, no key
            owner = inside[part]
        elif (part in _FORMS or _UNTAGGED.match(part)) and part not in owner.model_fields:
            continue
        else:
            if len(inside) == 1:
                owner = next(iter(inside.values()))
            key += f".{part}" if key else part
            inside = _sections(owner.model_fields[part].annotation) if part in owner.model_fields else {}
    return key, owner


def _sections(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models that a field of this type can hold, by class name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.__name__: annotation}
    return {name: section for part in get_args(annotation) for name, section in _sections(part).items()}


def _paths(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        for section in _sections(field.annotation).values():
            yield from (f"{name}.{path}" for path in _paths(section))


def _bounds(owner: type[BaseModel], name: str) -> list[str]:
    """The range of a number, such as ``[">= 1", "<= 10,000"]``."""
    field = owner.model_fields.get(name)
    return [
        _bound(sign, getattr(bound, kind))
        for bound in (field.metadata if field else ())
        for kind, sign in _BOUNDS.values()
        if getattr(bound, kind, None) is not None
    ]


def _meaning(owner: type[BaseModel], name: str) -> str | None:
    field = owner.model_fields.get(name)
    return field.description.split("\n\n")[0].replace("\n", " ") if field and field.description else None


def with_changes(data: Mapping[str, Any], changes: Mapping[str, Any], shorthands: Mapping[str, str]) -> dict[str, Any]:
    """``data`` with the value of each dotted path in ``changes`` put in, sections made where they are missing.

    ``shorthands``: dotted path of a section -> the key of it that a plain value in its place means, so that
    ``cluster.nodes`` can be set where the file says ``cluster: dgx_a100``.

    >>> with_changes({"cluster": "dgx_a100"}, {"cluster.nodes": 4}, {"cluster": "name"})
    {'cluster': {'name': 'dgx_a100', 'nodes': 4}}
    """
    result = dict(data)
    for path, value in changes.items():
        parts = path.split(".")
        section = result
        for depth, part in enumerate(parts[:-1], start=1):
            here = ".".join(parts[:depth])
            inner = section.get(part)
            if here in shorthands and isinstance(inner, str):
                inner = {shorthands[here]: inner}
            if inner is not None and not isinstance(inner, Mapping):
                raise InputError(
                    f"{here} has no keys inside; set it as a whole", file=f"--set {path}", found=brief(inner)
                )
            section[part] = dict(inner or {})
            section = section[part]
        section[parts[-1]] = value
    return result


def parse_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """``KEY=VALUE`` texts of the command line as dotted path -> value, read as YAML; of equal keys the last counts.

    >>> parse_changes(["parallelism.pp=4", "training.total_tokens=300e9", "parallelism.layers_per_stage=[3, 4]"])
    {'parallelism.pp': 4, 'training.total_tokens': 300000000000.0, 'parallelism.layers_per_stage': [3, 4]}
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key or not all(key.split(".")):
            raise InputError("is not KEY=VALUE", file="--set", found=text, allowed="such as parallelism.pp=4")
        changes[key] = parse_yaml(value, f"--set {key}")
    return changes

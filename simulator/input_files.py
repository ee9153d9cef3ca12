"""Reading YAML and JSON strictly, as plain data, and changing it by dotted keys. Raises `InputError` only."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import re
import shlex
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from simulator.encodings import decoded
from simulator.errors import InputError, UnknownKeyError, written

MAX_FILE_BYTES = 10_000_000
#: Keys, values and lists of a YAML file; the largest one that is shipped has about 6,000.
MAX_YAML_NODES = 50_000


class _Values(yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """YAML with decimal numbers alone, and no duplicate keys.

    ``450e9`` is a number, as in YAML 1.2, ``010`` is ten, ``1:30`` and ``0x20`` are text.
    """

    def _begin(self) -> None:
        yaml.composer.Composer.__init__(self)
        self._flat: set[yaml.Node] = set()
        self._nodes = 0
        self._unfinished: set[str] = set()  # anchors whose value is being read

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[attr-defined]
        anchor, mark = event.anchor, event.start_mark
        self._nodes += 1
        if self._nodes > MAX_YAML_NODES:
            problem = f"has more than {MAX_YAML_NODES:,} keys and values"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        if isinstance(event, yaml.AliasEvent) and anchor in self._unfinished:
            raise yaml.composer.ComposerError(None, None, f"a value refers to itself by *{anchor}", mark)
        self._unfinished.add(anchor)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._unfinished.discard(anchor)
        return node

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


def _yaml_int(loader: _Values, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


def _yaml_float(loader: _Values, node: yaml.ScalarNode) -> float:
    return float(
        str(loader.construct_scalar(node)).replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
    )


_Values.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rsplit(":", 1)[-1] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _construct in (
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", _yaml_int),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(?:_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        _yaml_float,
    ),
):
    _Values.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list("-+.0123456789"))
    _Values.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)  # type: ignore[type-var]


class _Loader(_Values, yaml.SafeLoader):
    """The loader in Python, whose errors say what is wrong where."""

    def __init__(self, stream: str) -> None:
        yaml.SafeLoader.__init__(self, stream)
        self._begin()


if yaml.__with_libyaml__:

    class _QuickLoader(_Values, yaml.CSafeLoader):
        """The loader whose scanner and parser are those of libyaml, ten times as fast."""

        def __init__(self, stream: str) -> None:
            yaml.CSafeLoader.__init__(self, stream)
            self._begin()


#: Tabs, tags, comments right behind the sign of a block of text, and some question marks. PyYAML refuses them or reads
#: another value than libyaml.
_READ_OTHERWISE = re.compile(r"[\t!]|[|>][-+0-9]*#|\?\s")


def _value(text: str) -> Any:
    """Return the value of a document. Raises what PyYAML raises.

    What libyaml refuses is read again in Python, for the sake of the message. Text with `_READ_OTHERWISE` in it is read
    in Python alone: a file is to be legal, and to mean the same, on every installation or on none.
    """
    if yaml.__with_libyaml__ and not _READ_OTHERWISE.search(text):
        with contextlib.suppress(yaml.YAMLError):
            return yaml.load(text, Loader=_QuickLoader)
    return yaml.load(text, Loader=_Loader)


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


def real_path(path: Path, *, file: object = None) -> Path:
    """Return ``path`` without symbolic links; raise `InputError` where they lead back to themselves.

    ``file`` is where the path was written, for the message; the path where it is None.
    """
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError("is a symbolic link to itself", file=file or path, found=brief(str(path))) from None
    return path.resolve()


def read_content(path: Path) -> bytes:
    """Return the bytes of a file, at most 10 MB. Raises OSError, and `InputError` where there are more."""
    with path.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    files_read.add(path.resolve())
    if len(content) > MAX_FILE_BYTES:
        raise InputError("is too large for an input file", file=path, allowed=f"at most {MAX_FILE_BYTES // 10**6} MB")
    return content


def read_text(path: Path) -> str:
    """The file's text (`encodings`, at most 10 MB). Raises `InputError`: no file, a folder, no text, empty."""
    try:
        if path.is_dir():
            raise InputError("is a directory, not a file", file=path)
        content = read_content(path)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", file=path) from None
    text = decoded(content, path)
    if not text.strip():
        raise InputError("is empty", file=path)
    return text


def parse_yaml(text: str, file: object) -> Any:
    """The value of one YAML document. Raises `InputError` with the line of a syntax error or a duplicate key."""
    try:
        return _value(text)
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
    return deepcopy(_yaml_document(read_text(path), path))


@lru_cache(maxsize=128)
def _yaml_document(text: str, path: Path) -> dict[str, Any]:
    """Return the mapping of a file's text. It is parsed once, for many jobs name one cluster. Raises `InputError`."""
    return as_mapping(parse_yaml(text, path), path)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises `InputError` as `read_yaml` does."""
    try:
        return as_mapping(json.loads(read_text(path), object_pairs_hook=_without_duplicates, parse_int=_json_int), path)
    except json.JSONDecodeError as error:
        raise InputError(f"line {error.lineno}, column {error.colno}: {error.msg}", file=path) from None
    except RecursionError:
        raise InputError("is nested too deeply", file=path) from None
    except ValueError as error:
        raise InputError(f"cannot be read as JSON: {error}", file=path) from None


def _json_int(text: str) -> int:
    """Return a whole number of JSON. Raises `ValueError` where it has more digits than Python reads."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a number has {len(text):,} digits") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON text. Raises `ValueError` where a key stands twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def as_mapping(data: Any, path: Path) -> dict[str, Any]:
    """Return ``data``, read from a file, where it is a mapping. Raises `InputError` where it is not."""
    if data is None:
        raise InputError("is empty", file=path)
    if not isinstance(data, dict):
        raise InputError("must hold keys and values at its top level", file=path, found=brief(data))
    return data


def closest(word: object, names: Iterable[str], likeness: float = 0.75) -> str | None:
    """Return the one of ``names`` that ``word`` most likely means, or None; ``likeness``: difflib's ratio, at least.

    A name that is the word and goes on after a dash comes before one that is spelt much like the word.

    >>> closest("gpt3_175b", ["gpt3-175b", "gpt3-13b"]), closest("1B1F", ["1f1b"]), closest("nodes", ["note"])
    ('gpt3-175b', '1f1b', None)
    >>> closest("llama3-8b", ["llama3-70b", "llama3-8b-dgx"])
    'llama3-8b-dgx'
    """
    by_lower, lower = {name.lower(): name for name in names}, str(word).lower()
    matches = [name for name in by_lower if name == lower or (lower and name.startswith((f"{lower}_", f"{lower}-")))]
    matches.sort(key=len)
    matches += difflib.get_close_matches(lower, by_lower, n=1, cutoff=likeness)
    matches += [name for name in by_lower if sorted(name) == sorted(lower)]  # letters that changed places
    return by_lower[matches[0]] if matches else None


def brief(value: object) -> object:
    """Return ``value`` as an error message shows it: as YAML writes it, and cut where it is long or deep."""
    return written(value)


def with_changes(
    data: Mapping[str, Any], changes: Mapping[str, Any], shorthands: Mapping[str, str], by: str = "--set"
) -> dict[str, Any]:
    """Return ``data`` with the value of each dotted path in ``changes`` put in. Raises `InputError`.

    Missing sections are made. Whole sections are put in first, so that a key inside one counts whatever the order.

    ``shorthands``: dotted path of a section -> the key that a plain value in place of the section means. Thus
    ``cluster.nodes`` can be set where the file says ``cluster: dgx_a100``. ``by``: where changes stand, for errors.

    >>> with_changes({"cluster": "dgx_a100"}, {"cluster.nodes": 4, "cluster": "dgx_h100"}, {"cluster": "name"})
    {'cluster': {'name': 'dgx_h100', 'nodes': 4}}
    """
    if not isinstance(changes, Mapping):
        allowed = "a mapping of dotted keys, such as {'parallelism.tp': 4}"
        raise InputError("must be a mapping", key="set", found=brief(changes), allowed=allowed)
    for path in changes:
        if not isinstance(path, str):
            allowed = "dotted keys, such as 'parallelism.tp'"
            raise InputError("has a key that is no text", key="set", found=brief(path), allowed=allowed)
    for path, key in shorthands.items():
        part = f"{path}.{key}"
        if part in changes and isinstance(changes.get(path), str) and changes[part] != changes[path]:
            values = brief([changes[path], changes[part]])
            raise InputError(f"{path} and {part} are one thing", file=by, found=values, fix="only one of them")
    result = dict(data)
    for path, value in sorted(changes.items(), key=lambda change: change[0].count(".")):
        parts = path.split(".")
        section = result
        for depth, part in enumerate(parts[:-1], start=1):
            here = ".".join(parts[:depth])
            inner = section.get(part)
            if here in shorthands and isinstance(inner, str):
                inner = {shorthands[here]: inner}
            if inner is not None and not isinstance(inner, Mapping):
                raise UnknownKeyError(
                    f"{here} has no keys inside; set it as a whole", file=f"{by} {path}", found=brief(inner)
                )
            section[part] = dict(inner or {})
            section = section[part]
        section[parts[-1]] = value
    return result


def parse_changes(assignments: Iterable[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts of the command line as dotted path -> value, read as YAML.

    Of equal keys the last counts. ``null`` stands for a key's default. An empty value, as of a shell variable that is
    not set, is an error.

    >>> parse_changes(["parallelism.pp=4", "training.total_tokens=300e9", "parallelism.layers_per_stage=[3, 4]"])
    {'parallelism.pp': 4, 'training.total_tokens': 300000000000.0, 'parallelism.layers_per_stage': [3, 4]}
    """
    changes: dict[str, Any] = {}
    for text in assignments:
        key, value = parse_assignment(text, "--set")
        changes[key] = parse_value(key, value, "--set")
    return changes


def as_options(changes: Mapping[str, Any]) -> str:
    """Return ``changes``, dotted path -> value, as the options that set them: what `parse_changes` reads.

    >>> as_options({"parallelism.layers_per_stage": [3, 4], "training.keep_gradients": False, "training.loss": "eager"})
    "--set 'parallelism.layers_per_stage=[3,4]' --set training.keep_gradients=false --set training.loss=eager"
    """
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for key, value in changes.items()
    }
    return " ".join(f"--set {shlex.quote(f'{key}={text}')}" for key, text in texts.items())


def parse_assignment(text: str, option: str, example: str = "parallelism.pp=4") -> tuple[str, str]:
    """Return the dotted key and the text behind the sign of a ``KEY=VALUE``, given with ``option``."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        form = "KEY=VALUE" if "," not in example else "KEY=V1,V2"
        raise InputError(f"is not {form}", file=option, found=text, allowed=f"such as {example}")
    return key, value


def parse_value(key: str, text: str, option: str) -> Any:
    """Return the value of a key that ``option`` gives, read as YAML. Raises `InputError` where there is none."""
    value = parse_yaml(text, f"{option} {key}")
    if value is None and text.strip().lower() not in ("null", "~"):
        fix = f"{option} {key}=null for the default, or leave it out"
        raise InputError("has no value", file=f"{option} {key}", found=f"{key}={text}", allowed=f"{key}=VALUE", fix=fix)
    return value

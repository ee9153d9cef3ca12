"""Models by name, or from the `config.json` that Hugging Face checkpoints carry, as keys of a workload's `model`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from simulator.config.captured_file import model_keys
from simulator.config.misplaced_file import CONFIG, expecting
from simulator.config.section import is_whole
from simulator.errors import InputError, PlaceOfKey, nearest_names
from simulator.input_files import as_path, brief, closest, parse_yaml, read_json, read_text


class _Presets(Mapping[str, Mapping[str, Any]]):
    """The presets of a file, each of which is parsed when it is asked for; a line without indent begins one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        entries = re.split(r"^(?=[\w.])", read_text(path), flags=re.MULTILINE)[1:]
        self._text = {entry.partition(":")[0]: entry for entry in entries}
        self._read: dict[str, Mapping[str, Any]] = {}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if name not in self._read:
            self._read |= parse_yaml(self._text[name], self._path)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._text)

    def __len__(self) -> int:
        return len(self._text)


#: Keys that say something of layer after layer.
_PATTERNS = ("mixers", "mlps")


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Preset name -> keys of a workload's `model`, and `source`."""
    return _Presets(Path(__file__).with_name("presets.yaml"))


def expand_model(section: Mapping[str, Any], *, base: Path | None, origin: PlaceOfKey) -> dict[str, Any]:
    """A `model` section with its `preset` or `hf_config` replaced by what they stand for; keys beside them win.

    A key that is null has its default, whatever the preset says of it.

    ``base``: folder that a relative `hf_config` starts from. ``origin``: where a key was written, for `InputError`.
    """
    fields = {key: value for key, value in section.items() if key not in ("preset", "hf_config")}
    section = {key: value for key, value in section.items() if value is not None}
    if section.get("captured", "") != "":
        return _captured(section, base, origin)
    if "preset" in section and "hf_config" in section:
        file, key = origin("model.hf_config")
        message, leave = "give either a preset or hf_config", "model.preset: null, which hf_config then replaces"
        raise InputError(message, file=file, key=key, found=brief(section["hf_config"]), fix=leave)
    if "preset" in section:
        name = section["preset"]
        if not isinstance(name, str) or name not in presets():
            near = nearest_preset(name)
            fix = f"preset: {near}" if near else None
            if fix is None and isinstance(name, str) and "/" in name:  # an id of Hugging Face
                fix = f"hf_config: PATH of its config.json, in place of preset; or llmsim init --model {name}"
            file, key = origin("model.preset")
            raise InputError(
                "no shipped model of this name",
                file=file,
                key=key,
                found=brief(name),
                allowed=nearest_names(name, presets(), "llmsim list models"),
                fix=fix,
            )
        return _over({key: value for key, value in presets()[name].items() if key != "source"}, fields)
    if "hf_config" in section:
        name = section["hf_config"]
        if not isinstance(name, str):
            file, key = origin("model.hf_config")
            raise InputError("must be a path", file=file, key=key, found=brief(name))
        file, key = origin("model.hf_config")
        return _over(_config_fields(name, base, file, key), fields)
    return fields


def inherited_keys(section: Mapping[str, Any], expanded: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of an ``expanded`` section that the section in the file does not have itself.

    >>> list(inherited_keys({"preset": "x", "moe": {"top_k": 2}}, {"layers": 4, "moe": {"experts": 8, "top_k": 2}}))
    ['layers', 'moe.experts']
    """
    for key, value in expanded.items():
        inside = section.get(key)
        if inside is None:
            yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from inherited_keys(inside if isinstance(inside, Mapping) else {}, value, f"{above}{key}.")


def config_path(section: Mapping[str, Any], base: Path | None) -> str:
    """Return the whole path of the config.json that a `model` section names, or nothing."""
    name = section.get("hf_config")
    return str(as_path(name.partition("#")[0], base=base).absolute()) if isinstance(name, str) else ""


def nearest_preset(name: object) -> str | None:
    """Return the shipped model that a name most likely means: the first of its family, or one spelt nearly so.

    >>> nearest_preset("gpt2"), nearest_preset("llama3_8b"), nearest_preset("x")
    ('gpt2-124m', 'llama3-8b', None)
    """
    family = (preset for preset in presets() if preset.startswith(f"{name}-"))
    return next(family, None) or closest(name, presets())


def _captured(section: Mapping[str, Any], base: Path | None, origin: PlaceOfKey) -> dict[str, Any]:
    """Return the keys that a captured model gives, with another number of layers where the section asks for one.

    Raises `InputError` of other keys that contradict them.
    """
    file, key = origin("model.captured")
    if not isinstance(section["captured"], str):
        raise InputError(
            "must be a path",
            file=file,
            key=key,
            found=brief(section["captured"]),
            allowed="a file that llmsim capture wrote",
        )
    path = as_path(section["captured"], base=base, file=file, key=key).absolute()
    keys = model_keys(path)
    for name, value in section.items():
        if name not in ("captured", "layers") and keys.get(name) != value:
            file, key = origin(f"model.{name}")
            raise InputError(
                f"is what {path.name} has captured; only the number of layers may differ",
                file=file,
                key=key,
                found=brief(value),
                allowed="captured, layers",
            )
    return {**keys, **{key: value for key, value in section.items() if key == "layers"}, "captured": str(path)}


def _over(shipped: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """``shipped`` with ``fields`` laid over it, key by key inside sections such as ``moe`` too.

    A field that is None takes the key away. Fewer ``layers`` are the model's first ones.

    >>> _over({"layers": 4, "mixers": ["window", "window", "window", "attention"]}, {"layers": 2})
    {'layers': 2, 'mixers': ['window', 'window']}
    """
    merged = dict(shipped)
    if is_whole(layers := fields.get("layers")) and 0 < layers < shipped["layers"]:
        patterns = {key: fields[key] for key in _PATTERNS if key in fields}
        merged |= {
            key: value for key, value in _first_layers({**shipped, **patterns}, layers).items() if key not in fields
        }
    for key, value in fields.items():
        inside = merged.get(key)
        merged[key] = {**inside, **value} if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
    return {key: value for key, value in merged.items() if value is not None}


def _first_layers(shipped: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return what a model's first ``layers`` have of the keys that say something of layers by their place.

    None stands for what only the rest has. Layers that reuse keys are the last ones.

    >>> _first_layers({"layers": 6, "reused_keys": {"layers": 3}, "moe": {"first_dense_layers": 2}}, 4)
    {'reused_keys': {'layers': 1}}
    >>> _first_layers({"layers": 6, "reused_keys": {"layers": 3}, "moe": {"first_dense_layers": 2}}, 2)
    {'reused_keys': None, 'moe': None}
    """
    kept: dict[str, Any] = {key: shipped[key][:layers] for key in _PATTERNS if isinstance(shipped.get(key), list)}
    if reused := shipped.get("reused_keys"):
        left = reused["layers"] - (shipped["layers"] - layers)
        kept["reused_keys"] = {**reused, "layers": left} if left > 0 else None
    if moe := shipped.get("moe"):
        mlps = kept.get("mlps")
        dense = "moe" not in mlps if mlps is not None else moe.get("first_dense_layers", 0) >= layers
        kept |= {"moe": None} if dense else {}
    return kept


def _config_fields(name: str, base: Path | None, file: object, key: str | None) -> dict[str, Any]:
    """Return the keys that a config.json means; behind a ``#`` stands the key of a section that is meant alone."""
    name, _, section = name.partition("#")
    path = as_path(name, base=base, file=file, key=key)
    if not path.exists():
        tried = dict.fromkeys(str(folder.resolve()) for folder in (base, Path()) if folder is not None)
        looked = "" if path.is_absolute() else f"a path that starts in {' or '.join(tried)}"
        raise InputError("no such file", file=file, key=key, found=name, allowed=looked or "the path of a config.json")
    with expecting(CONFIG, path):
        config: object = read_json(path)
    if section and isinstance(config, Mapping):
        config = config.get(section)
    if not isinstance(config, Mapping):
        raise InputError("no such section", file=path, key=section, found=brief(config))
    from simulator.config.hugging_face import from_hugging_face

    with expecting(CONFIG, path):
        return from_hugging_face(config, path)

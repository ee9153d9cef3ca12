"""A short profile of a GPU that nobody has measured, completed from the profile of one like it.

The rule is this. Shares of a peak are taken over as they are: efficiencies, speeds of layouts, shares of the memory
bandwidth. So are times (starts, latencies, launches) and counts. Rates go with the peak that bounds them (`_RATES`).
All of it counts as assumed, and nothing of it as measured on this GPU. A figure of the file replaces another's.

A part of a section may be taken from a third profile: ``attention: {like: NAME}``. ``interference: without_nvswitch``
has NCCL hold no SMs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simulator.errors import InputError

#: Sections that a file may leave out, and one that is there only to give a figure of its own, such as another limit.
SECTIONS = ("kernels", "host", "interference", "transports")
_WHERE_GIVEN = "power"
_ORIGIN = frozenset(("kind", "source", "note"))

Data = Mapping[str, Any]
#: Name of a profile, and the key that gives it -> data of the profile's file.
ReadProfile = Callable[[str, str], Data]

#: `interference` of a GPU that NVSwitches do not join: how many SMs NCCL holds of it is not known.
WITHOUT_NVSWITCH = "without_nvswitch"
_NO_SMS = {
    "sms": {"collective": 0, "p2p": 0},
    "matmul_sms": 0,
    "kind": "assumed",
    "source": WITHOUT_NVSWITCH,
}
_NO_SMS_SOURCE = "nobody has published how many SMs NCCL holds of a GPU without NVSwitch: none are assumed"


def _memory(spec: Data) -> float:
    return float(spec["memory_bandwidth_Bps"]["value"])


def _memory_per_sm(spec: Data) -> float:
    return _memory(spec) / float(spec["sms"])


#: Name of a rate, wherever it stands -> the peak that it goes with, or of a time, and the inverse of one. FLOP/s that
#: the power limit sustains go with the peak of their type.
_RATES: dict[str, Callable[[Data], float]] = {
    "store_Bps_per_sm": _memory_per_sm,
    "load_Bps_per_sm": _memory_per_sm,
    "split_sum_Bps": _memory,
    "copy_Bps": _memory,
    "p2p_copy_Bps": _memory,
    "element_s": lambda spec: 1 / float(spec["sms"]),
}


def completed(data: Data, like: Data, read: ReadProfile, file: object = None) -> dict[str, Any]:
    """Return ``data`` of a profile whose ``gpu_spec`` is valid, completed from ``like``, the data of a whole one.

    ``read``: reads the profiles that parts of sections are like. Raises `InputError`, naming ``file``, where figures
    replace others without saying where they come from, and where a profile does not give what is to be like it.
    """
    name, spec, other = str(like["name"]), data["gpu_spec"], like["gpu_spec"]
    ratios = _ratios(spec, other)
    data = _with_parts_of_others(data, read, file)
    result = dict(data)
    replaced = [_WHERE_GIVEN] if data.get(_WHERE_GIVEN) and like.get(_WHERE_GIVEN) else []
    for section in (*SECTIONS, *replaced):
        assumed = _assumed(like[section], name, ratios)
        if section == "kernels":
            _keep_types(assumed["matmul"], spec["peak_flops_per_s"], other["peak_flops_per_s"])
        figures = data.get(section) or {}
        result[section] = _over(assumed, figures, section, name, file) if isinstance(figures, Mapping) else figures
    if isinstance(sources := data.get("sources"), Mapping):
        result["sources"] = {**sources, name: _source(like)}
    return result


def _ratios(spec: Data, other: Data) -> dict[str, float]:
    """Return what rates of a GPU with ``spec`` are of another's."""
    return {rate: peak(spec) / peak(other) for rate, peak in _RATES.items()}


def _with_parts_of_others(data: Data, read: ReadProfile, file: object) -> Data:
    """Return ``data`` with the parts that are like a third profile's, and with the sources of these parts."""
    sources: dict[str, str] = {}

    def filled(node: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(node, Mapping):
            return node
        figures = {key: filled(value, (*path, str(key))) for key, value in node.items() if key != "like"}
        if "like" not in node:
            return figures
        key = ".".join((*path, "like"))
        third = read(str(node["like"]), key)
        part: Any = third
        for step in path:
            part = part.get(step) if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping):
            raise InputError(f"its file has no {'.'.join(path)}", file=file, key=key, found=node["like"])
        sources[third["name"]] = _source(third)
        return {**_assumed(part, third["name"], _ratios(data["gpu_spec"], third["gpu_spec"])), **figures}

    result = {key: filled(value, (key,)) if key in SECTIONS else value for key, value in data.items()}
    if result.get("interference") == WITHOUT_NVSWITCH:
        result["interference"] = _NO_SMS
        sources[WITHOUT_NVSWITCH] = _NO_SMS_SOURCE
    cited = data.get("sources")
    return {**result, "sources": {**cited, **sources}} if isinstance(cited, Mapping) else result


def _source(profile: Data) -> str:
    return f"profile {profile['name']} of {profile['date']} ({profile['kind']}), as shares of peaks"


def _assumed(node: Any, name: str, ratios: Mapping[str, float]) -> Any:
    """Return a part of the other profile as an assumption about this GPU."""
    if not isinstance(node, Mapping):
        return node
    part = {
        key: value * ratios[key] if key in ratios else _assumed(value, name, ratios)
        for key, value in node.items()
        if key != "fitted_range"
    }
    return part | {"kind": "assumed", "source": name, "note": f"as {name}"} if _cited(node) else part


def _keep_types(matmul: dict[str, Any], peaks: Data, other_peaks: Data) -> None:
    """Leave the types that this GPU has, at its own peaks."""
    for table in ("sustained_flops_per_s", "layout_speed"):
        matmul[table] = {dtype: figure for dtype, figure in matmul[table].items() if dtype in peaks}
    for dtype, figure in matmul["sustained_flops_per_s"].items():
        figure["value"] *= peaks[dtype]["value"] / other_peaks[dtype]["value"]


def _over(assumed: Data, figures: Data, key: str, name: str, file: object) -> dict[str, Any]:
    """Return ``figures`` laid over ``assumed``, figure by figure.

    A table of numbers within a figure replaces the other's whole."""
    result, replaced = dict(assumed), False
    for part, value in figures.items():
        old = assumed.get(part)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and _holds_figures(old):
            result[part] = _over(old, value, f"{key}.{part}", name, file)
        else:
            result[part], replaced = value, replaced or part not in _ORIGIN
    if replaced and _cited(assumed):
        if absent := {"kind", "source"} - set(figures):
            raise InputError(
                f"figures replace those of {name}, and have to say where they come from",
                file=file,
                key=key,
                found=", ".join(figures),
                fix=f"{' and '.join(sorted(absent))} beside them",
            )
        rest = set(assumed) - set(figures) - _ORIGIN
        notes = [str(figures.get("note", "")), f"the rest as {name}" if rest else ""]
        result["note"] = "; ".join(filter(None, notes))
    return result


def _cited(node: Any) -> bool:
    return isinstance(node, Mapping) and "source" in node


def _holds_figures(node: Any) -> bool:
    return isinstance(node, Mapping) and (_cited(node) or any(map(_holds_figures, node.values())))

"""A short profile of a GPU that nobody has measured, completed from the profile of one like it.

The rule is this. Shares of a peak are taken over as they are: efficiencies, speeds of layouts, shares of the memory
bandwidth. So are times (starts, latencies, launches) and counts. Rates go with the peak that bounds them (`_RATES`).
All of it counts as assumed, and nothing of it as measured on this GPU. A figure of the file replaces another's.
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


def completed(data: Data, like: Data, file: object = None) -> dict[str, Any]:
    """Return ``data`` of a profile whose ``gpu_spec`` is valid, completed from ``like``, the data of a whole one.

    Raises `InputError`, naming ``file``, where figures replace others without saying where they come from.
    """
    name, spec, other = str(like["name"]), data["gpu_spec"], like["gpu_spec"]
    ratios = {rate: peak(spec) / peak(other) for rate, peak in _RATES.items()}
    result = dict(data)
    replaced = [_WHERE_GIVEN] if data.get(_WHERE_GIVEN) and like.get(_WHERE_GIVEN) else []
    for section in (*SECTIONS, *replaced):
        assumed = _assumed(like[section], name, ratios)
        if section == "kernels":
            _keep_types(assumed["matmul"], spec["peak_flops_per_s"], other["peak_flops_per_s"])
        figures = data.get(section) or {}
        result[section] = _over(assumed, figures, section, name, file) if isinstance(figures, Mapping) else figures
    if isinstance(sources := data.get("sources"), Mapping):
        result["sources"] = {**sources, name: f"profile {name} of {like['date']} ({like['kind']}), as shares of peaks"}
    return result


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

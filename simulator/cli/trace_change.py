"""Options of ``trace replay`` that change a profiler's trace, as the change that they ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from simulator.errors import InputError, located
from simulator.input_files import parse_assignment

if TYPE_CHECKING:
    from simulator.traces.trace import RunTrace
    from simulator.traces.what_if import WhatIf


def naming_options(**options: str) -> AbstractContextManager[None]:
    """Errors of the block name the option that gives a parameter, ``options``: parameter -> option."""

    def place(key: str) -> tuple[str | None, str]:
        parameter, _, rest = key.partition(".")
        return (options[parameter], rest) if parameter in options else (None, key)

    return located(place)


def parse_factors(texts: list[str] | None, option: str) -> dict[str, float]:
    """Return ``KEY=FACTOR`` texts as key -> factor. Raises `InputError`."""
    factors: dict[str, float] = {}
    for text in texts or ():
        key, value = parse_assignment(text, option, "matmul=0.8" if option == "--scale" else "1=1.2")
        key = str(int(key)) if key.isdecimal() else key
        if key in factors:
            raise InputError("is given twice", file=f"{option} {key}", found=text, fix="one of them")
        factors[key] = _factor(value, f"{option} {key}")
    return factors


def _factor(value: object, place: str) -> float:
    try:
        factor = float(cast(str, value))
    except ValueError:
        factor = math.nan
    if not 0 <= factor <= 1e6:
        raise InputError("is no factor", file=place, found=value, allowed="0 to 1e6")
    return factor


def _class_meant(name: str) -> str | None:
    """Return the class that a misspelt one means, or to which a kernel of that name belongs; None: none is likely."""
    from simulator.input_files import closest
    from simulator.traces.classes import CLASSES, kernel_class

    by_kernel = kernel_class(name).name
    return closest(name, CLASSES) or (by_kernel if by_kernel != "memory" else None)


def _without_effect(trace: RunTrace, classes: Mapping[str, float], overlap: str) -> list[str]:
    """Return a sentence per option that changes kernels of which the trace has none."""
    from simulator.traces.classes import EXCHANGES
    from simulator.traces.figures import class_seconds

    present = {name for rank in trace.ranks for name in class_seconds(rank.ops)}
    idle = [f"--scale {name} has no effect: no kernel is of this class" for name in classes if name not in present]
    if overlap == "full" and present.isdisjoint(EXCHANGES):
        idle.append("--overlap full has no effect: no kernel communicates")
    return idle


def played_cluster(cluster: str | None, changes: list[str] | None) -> dict[str, Any] | None:
    """Return the cluster that an execution trace is to run on; None: it is played as recorded. Raises `InputError`."""
    from simulator.input_files import parse_changes, with_changes

    if cluster is None and changes:
        raise InputError("needs --cluster beside it", file="--set", found=changes[0])
    return None if cluster is None else with_changes({"name": cluster}, parse_changes(changes or ()), {})


def target_cluster(cluster: str | None, changes: list[str] | None, recorded: str | None) -> dict[str, Any] | None:
    """Return the cluster that communication is to run on; None where it stays. Raises `InputError`."""
    from simulator.input_files import parse_changes, with_changes

    option, value = ("--cluster", cluster) if cluster is not None else ("--set", changes[0] if changes else None)
    if value is None and recorded is not None:
        raise InputError("needs --cluster or --set beside it", file="--recorded-cluster", found=recorded)
    if value is None:
        return None
    if recorded is None:
        raise InputError("needs --recorded-cluster beside it", file=option, found=value)
    return with_changes({"name": cluster or recorded}, parse_changes(changes or ()), {})


@dataclass(frozen=True)
class ChangeOptions:
    """Options of ``trace replay``. ``classes`` and ``ranks``: factors on times, by class of kernels and by rank.

    ``gpu`` and ``cluster`` are what is asked for, ``recorded_gpu`` and ``recorded_cluster`` what the trace is of.
    """

    classes: Mapping[str, float]
    ranks: Mapping[str, float]
    host: float | None
    gpu: str | None
    recorded_gpu: str | None
    cluster: Mapping[str, Any] | None
    recorded_cluster: str | None
    overlap: str


def asked_change(trace: RunTrace, options: ChangeOptions) -> tuple[WhatIf | None, list[str]]:
    """Return what the options change, None where that is nothing; with what the trace lacks and what has no effect.

    Raises `InputError`.
    """
    from simulator.traces.classes import CLASSES
    from simulator.traces.hardware import exchange_factor, gpu_factors, unknown_exchanges
    from simulator.traces.what_if import OVERLAPS, WhatIf

    classes, ranks, host, overlap = options.classes, options.ranks, options.host, options.overlap
    gpu, recorded_gpu = options.gpu, options.recorded_gpu
    if recorded_gpu is not None and gpu is None:
        raise InputError("has no meaning without --gpu", file="--recorded-gpu", found=recorded_gpu)
    if unknown := [name for name in classes if name not in CLASSES]:
        meant = _class_meant(unknown[0])
        fix = meant and f"--scale {meant}={classes[unknown[0]]:g}"
        raise InputError(
            "is no class of kernels", file="--scale", found=unknown[0], allowed=", ".join(CLASSES), fix=fix
        )
    if numbers := [number for number in ranks if not number.isdecimal()]:
        raise InputError("is no rank", file="--rank", found=numbers[0], allowed="0, 1, ..")
    if overlap not in OVERLAPS:
        raise InputError("is no way to overlap", file="--overlap", found=overlap, allowed=", ".join(OVERLAPS))
    if host is not None and not any((one.ops.call >= 0).any() for one in trace.ranks):
        raise InputError("the trace does not tell which call launched which kernel", file="--host", found=host)
    warnings = [*trace.missing, *_without_effect(trace, classes, overlap)]
    scaled = dict(classes)
    if gpu is not None:
        with naming_options(target="--gpu", recorded="--recorded-gpu"):
            factors_of_gpu = gpu_factors(trace, gpu, recorded_gpu)
        for name, factor in factors_of_gpu.items():
            scaled[name] = scaled.get(name, 1.0) * factor
    change = WhatIf(
        classes=scaled,
        ranks={int(number): factor for number, factor in ranks.items()},
        host=1.0 if host is None else _factor(host, "--host"),
        overlap=cast(Any, overlap),
    )
    target, recorded = options.cluster, options.recorded_cluster
    if target is not None and recorded is not None:
        with naming_options(target="--cluster", recorded="--recorded-cluster"):
            exchange = exchange_factor(trace, recorded, target)
        change = replace(change, exchange=exchange)
        if count := unknown_exchanges(trace):
            warnings.append(f"{count:,} communications do not tell their bytes or group, and keep their times")
    nothing = not (scaled or ranks or target) and host is None and overlap == "recorded"
    return None if nothing else change, warnings

"""The curves of flash attention, from `scaled_dot_product_attention` with the backend that PyTorch chooses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from calibration.fit.cases import Cases, MeasuredCase, profiled
from calibration.fit.part import Constants, FittedPoint, ProfilePart, every_second, rounded, search
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs.attention import AttentionCost, around_bytes
from simulator.errors import InputError
from simulator.hardware.kernels import AroundCurve, AttentionModel
from simulator.hardware.profile import Profile
from simulator.program import Attention

#: What training uses on each kind of GPU: PyTorch prefers cuDNN's kernels from Hopper on. FlashAttention 2's, which it
#: took there before, stand beside them where both were measured.
DEFAULT_BACKENDS = ("cudnn", "flash")
DIRECTIONS = {"forward": "fwd", "backward": "bwd"}
FEW = 4  # cases of a head dimension that tell no half length of their own
STARTS = [{"limit": 0.6, "half_length": half_length, "tail": 0.4} for half_length in (30.0, 100.0, 300.0)]
LIMITS = {"limit": (0.01, 1.0), "half_length": (1.0, 1e4), "tail": (1e-3, 3.0)}


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """The sections ``kernels.attention`` and, of a GPU that has newer kernels, ``kernels.attention_flash2``; nothing
    where no attention was measured."""
    measured = cases.rows_of("attention")
    backends = {str(case.params["backend"]) for case in measured}
    backend = next((name for name in DEFAULT_BACKENDS if name in backends), None)
    if backend is None:
        return ProfilePart({})
    figures, points = _fit_backend(cases, profile, backend, "attention")
    if backend == "flash" or "flash" not in backends:
        return ProfilePart({"kernels.attention": figures}, points)
    older, points_of_older = _fit_backend(cases, profile, "flash", "attention_flash2")
    return ProfilePart({"kernels.attention": figures, "kernels.attention_flash2": older}, points + points_of_older)


def _fit_backend(
    cases: Cases, profile: Profile, backend: str, section: str
) -> tuple[dict[str, Any], list[FittedPoint]]:
    """Return the curves of one backend for a ``section`` of the kernels, and its cases beside the fit.

    The points of the section that training uses hold the cases of PyTorch's own choice too.
    """
    measured = cases.rows_of("attention")
    around = _around(cases, profile, backend)
    profile = _with_around(profile, around)
    figures: dict[str, Any] = {"start_s": as_data(profile.kernels.attention.start_s), "tail": {}}
    figures["around"] = around and as_data(around)
    if section == "attention":  # what was measured apart stays
        apart = as_data(profile.kernels.attention, nulls=False)
        figures |= {name: apart[name] for name in ("dropout", "bias", "fp32") if apart.get(name)}
    halves: dict[bool, list[MeasuredCase]] = {False: [], True: []}
    for direction, op in DIRECTIONS.items():
        mine = [case for case in measured if case.op == op and case.params["backend"] == backend]
        curves: dict[int, dict[str, Any]] = {}
        by_dim = {dim: [case for case in mine if _dim(case) == dim] for dim in {_dim(case) for case in mine}}
        if max(map(len, by_dim.values()), default=0) <= FEW:
            raise InputError(
                f"too few cases of {backend} attention, {direction}, to fit it",
                key=f"attention/{op}",
                found=len(mine),
                allowed=f"more than {FEW} lengths of one head dimension",
                fix="measure --full",
            )
        tail: float | None = None
        for dim in sorted(by_dim, key=lambda dim: (-len(by_dim[dim]), dim)):
            fitted, held_out = every_second(by_dim[dim], lambda case: float(case.params["length"]))
            halves[False] += fitted
            halves[True] += held_out
            fixed: Constants = {}
            if tail is not None:
                fixed["tail"] = tail
            if len(by_dim[dim]) <= FEW:
                near = min(curves, key=lambda other: abs(other - dim))
                fixed["half_length"] = curves[near]["half_length"]
            constants = fixed | _searched(profile, fitted, fixed)
            constants = {name: rounded(value) for name, value in constants.items()}
            tail = constants["tail"] if tail is None else tail
            lengths = [int(case.params["length"]) for case in by_dim[dim]]
            curve = {"limit": constants["limit"], "half_length": constants["half_length"]}
            note = "" if "half_length" not in fixed else "half length of the nearest dimension with more cases"
            curves[dim] = curve | {"fitted_range": (min(lengths), max(lengths))} | cases.cited | {"note": note}
        figures[direction] = {dim: curves[dim] for dim in sorted(curves)}
        figures["tail"][direction] = {"value": tail} | cases.cited
    model = validated(AttentionModel, figures)
    figures = as_data(model, nulls=False)
    cost = AttentionCost(profile.gpu_spec, model)
    if section == "attention":
        halves[True] += [case for case in measured if case.params["backend"] == "default"]
    return figures, [_point(cost, case, held_out, section) for held_out, some in halves.items() for case in some]


def kernel_of(case: MeasuredCase) -> Attention:
    """The kernel that a case runs."""
    p = case.params
    batch, heads, kv_heads, length = (int(p[name]) for name in ("batch", "heads", "kv_heads", "length"))
    return Attention(
        batch,
        heads,
        kv_heads,
        length,
        length,
        _dim(case),
        causal=bool(p["causal"]),
        backward=case.op == "bwd",
        v_head_dim=int(p.get("value_dim", 0)),
    )


def _dim(case: MeasuredCase) -> int:
    return int(case.params["head_dim"])


def _searched(profile: Profile, cases: Sequence[MeasuredCase], fixed: Constants) -> Constants:
    kernels = [(kernel_of(case), case.seconds) for case in cases]
    base = profile.kernels.attention

    def loss(constants: Constants) -> float:
        c = fixed | constants
        curve = replace(next(iter(base.forward.values())), limit=c["limit"], half_length=c["half_length"])
        tails = {name: replace(figure, value=c["tail"]) for name, figure in base.tail.items()}
        dims = dict.fromkeys({kernel.head_dim for kernel, _ in kernels}, curve)
        model = replace(base, forward=dims, backward=dims, tail=tails)
        cost = AttentionCost(profile.gpu_spec, model)
        return statistics.fmean(abs(math.log(cost.seconds(kernel) / seconds)) for kernel, seconds in kernels)

    starts = [{name: value for name, value in start.items() if name not in fixed} for start in STARTS]
    return min((search(start, loss, limits=LIMITS) for start in starts), key=loss)


def _around(cases: Cases, profile: Profile, backend: str) -> AroundCurve | None:
    """The kernels around a backward one by their bytes, as a profiler saw them: all but the longest."""
    measured: list[tuple[float, float]] = []
    for case in cases.rows_of("kernels", "attention"):
        whole = profiled(case)
        if whole.op == "bwd" and whole.params["backend"] == backend and len(case.row["kernels"]) > 1:
            seconds = [float(seconds) for _, seconds in case.row["kernels"]]
            measured.append((around_bytes(kernel_of(whole)), sum(seconds) - max(seconds)))
    if not measured:
        return profile.kernels.attention.around
    bandwidth_Bps = profile.gpu_spec.memory_bandwidth_Bps.value

    def loss(c: Constants) -> float:
        return statistics.fmean(
            abs(math.log((c["start_s"] + nbytes / (c["share"] * bandwidth_Bps)) / seconds))
            for nbytes, seconds in measured
        )

    constants = search({"share": 0.8, "start_s": 3e-6}, loss, limits={"share": (0.1, 1.0)})
    fitted = {name: rounded(value) for name, value in constants.items()}
    return validated(AroundCurve, fitted | cases.cited)


def _with_around(profile: Profile, around: AroundCurve | None) -> Profile:
    attention = replace(profile.kernels.attention, around=around)
    return replace(profile, kernels=replace(profile.kernels, attention=attention))


def _point(cost: AttentionCost, case: MeasuredCase, held_out: bool, section: str) -> FittedPoint:
    kernel = kernel_of(case)
    backend = "default." if case.params["backend"] == "default" else ""
    return FittedPoint(
        f"{section}.{backend}{_dim(case)}.{case.op}", kernel.flops, case.seconds, cost.seconds(kernel), held_out
    )

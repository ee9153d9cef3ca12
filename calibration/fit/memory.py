"""Shares of the memory bandwidth, from the kernels that eager PyTorch launches."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from calibration.fit.cases import Cases, MeasuredCase
from calibration.fit.part import FittedPoint, ProfilePart, every_second, rounded, search
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.costs.memory import MemoryCost
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import ColumnSums, MemoryCurve, RowCurve
from simulator.hardware.profile import Profile
from simulator.optimizers.adam import FOREACH
from simulator.program import Memory

#: Spread between the tenth and the ninetieth percentile, of the median.
STEADY = 0.05
#: Cases that tell no start of their own.
FEW = 2
#: Lookups of fewer bytes than so many L2 caches ran from the cache.
CACHE = 2
LIMITS = {"share": (0.005, 1.0), "start_s": (0.5e-6, 1e-3)}


class Launched(NamedTuple):
    """A kernel: its class, the bytes that it moves, and those of them that it writes where its time depends on them."""

    name: str
    nbytes: float
    written: float = 0.0


LaunchedKernels = list[Launched]  # of a case, in order


def _parts(*kernels: tuple[str, float], counted: float = 0.0) -> Callable[[MeasuredCase], LaunchedKernels]:
    """Kernels by their bytes per element. ``counted``: those that the row's bytes are of, where not of all kernels."""
    whole = counted or sum(share for _, share in kernels)
    return lambda case: [Launched(name, float(case.row["bytes"]) * share / whole) for name, share in kernels]


def _embedding_bwd(case: MeasuredCase) -> LaunchedKernels:
    """The table's gradient is zeroed, then rows are added into it (one read, one written per token)."""
    tokens, hidden, vocab = (int(case.params[name]) for name in ("tokens", "hidden", "vocab"))
    return [Launched("zero", 2.0 * vocab * hidden), Launched("embedding_bwd", 4.0 * tokens * hidden)]


def _token_kernel(name: str, *, rows: bool) -> Callable[[MeasuredCase], LaunchedKernels]:
    """One kernel, which writes ``top_k`` rows of each token, or one."""

    def kernels(case: MeasuredCase) -> LaunchedKernels:
        tokens, top_k, width = (int(case.params[size]) for size in ("tokens", "top_k", "width"))
        return [Launched(name, float(case.row["bytes"]), 2.0 * tokens * width * (top_k if rows else 1))]

    return kernels


#: What each measured op launches (`calibration.measure.memory`), with the bytes per element of each kernel; the
#: rows of kind ``kernels`` have their names.
OPS: Mapping[str, Callable[[MeasuredCase], LaunchedKernels]] = {
    "layer_norm": _parts(("norm", 4)),
    "rms_norm": _parts(("rms_norm", 4)),
    "layer_norm_bwd": _parts(("norm_bwd", 6), ("norm_bwd", 4), counted=6),
    "rms_norm_bwd": _parts(("rms_norm_bwd", 6), ("rms_norm_bwd", 4), counted=6),
    "softmax": _parts(("softmax", 4)),
    "scores_softmax": _parts(("softmax", 4)),
    "scores_softmax_bwd": _parts(("softmax_bwd", 6)),  # with the product before it
    "scores_mask": _parts(("mask", 4)),  # with the copy before it
    "dropout": _parts(("dropout", 5)),
    "dropout_bwd": _parts(("dropout_bwd", 5)),
    "gelu": _parts(("gelu", 4)),
    "gelu_tanh": _parts(("activation", 4)),
    "relu": _parts(("activation", 4)),
    "silu": _parts(("activation", 4)),
    "gelu_bwd": _parts(("gelu_bwd", 6)),
    "gelu_tanh_bwd": _parts(("activation_bwd", 6)),
    "relu_bwd": _parts(("activation_bwd", 6)),
    "bias_add": _parts(("bias", 4)),
    "residual_add": _parts(("residual", 6)),
    "multiply": _parts(("residual", 6)),
    "grad_add_bf16": _parts(("residual", 6)),
    "swiglu_split": _parts(("strided", 2), ("strided", 3)),
    "swiglu_split_bwd": _parts(("residual", 3), ("strided", 3), ("strided", 3), ("copy", 4)),
    "swiglu": _parts(("activation", 4), ("residual", 6)),
    "swiglu_bwd": _parts(("residual", 6), ("residual", 6), ("activation_bwd", 6)),
    "rope": _parts(("rope", 4), ("rope", 2), ("rope", 4), ("rope", 4), ("rope", 6)),
    "rope_bwd": _parts(("rope", 4), ("rope", 2), ("rope", 4), ("rope", 4), ("rope", 6)),
    "embedding": _parts(("embedding", 4)),
    "embedding_bwd": _embedding_bwd,
    "loss": _parts(("upcast", 6), ("loss", 8), ("loss", 0)),
    "loss_bwd": _parts(("zero", 4), ("loss_bwd", 0), ("loss_bwd", 12), ("cast", 6)),
    "cast_fp32_bf16": _parts(("cast", 6)),
    "cast_bf16_fp32": _parts(("upcast", 6)),
    "adamw_foreach_fp32": _parts(*(("foreach", 4.0 * len(r + w)) for _, r, w, _ in FOREACH), counted=28),
    "adamw_foreach_bf16": _parts(*(("foreach_bf16", 2.0 * len(r + w)) for _, r, w, _ in FOREACH), counted=14),
    "adamw_fused_fp32": _parts(("optimizer", 28)),
    "adamw_fused_bf16": _parts(("fused_bf16", 14)),
    "foreach_norm_fp32": _parts(("optimizer", 4)),
    "foreach_copy_fp32_bf16": _parts(("optimizer", 6)),
    "foreach_zero_fp32": _parts(("optimizer", 4)),
    "foreach_copy_bf16": _parts(("foreach_copy", 4)),
    "split_copy_bf16": _parts(("split_copy", 4)),
    "chunk_cat_bf16": _parts(("chunk_cat", 4)),
    "chunk_cat_bf16_fp32": _parts(("chunk_upcast", 6)),
    "clip_grad_fp32": _parts(("optimizer", 4), ("optimizer", 8)),
    "grad_add_fp32": _parts(("accumulate", 10)),
    "grad_scale_fp32": _parts(("activation", 8)),
    "bias_grad": _parts(("reduce", 2)),
    "copy": _parts(("copy", 4)),
    "concat": _parts(("copy", 8)),
    "choices_weigh": _token_kernel("weigh", rows=True),
    "choices_weigh_bwd": _token_kernel("weigh", rows=True),
    "choices_weights_bwd": _token_kernel("weigh", rows=True),
    "choices_sum": _token_kernel("combine", rows=False),
    "zero": _parts(("zero", 2)),
}
#: Classes whose kernels may take longer to find the operands of an element than to move them.
PER_ELEMENT = ("weigh", "combine")
#: Classes in the order in which they are fitted, so that those that run beside one are known before it.
ORDER = (
    *("copy", "zero", "cast", "upcast", "activation", "activation_bwd", "gelu", "gelu_bwd", "residual", "bias"),
    "strided",
    *("norm", "norm_bwd", "rms_norm", "rms_norm_bwd", "softmax", "softmax_bwd", "mask", "dropout", "dropout_bwd"),
    *("rope", "embedding", "embedding_bwd", "loss", "loss_bwd", "optimizer", "fused_bf16"),
    *("foreach", "foreach_bf16"),
    *("accumulate", "reduce", "foreach_copy", "split_copy", "chunk_cat", "chunk_upcast"),
    *PER_ELEMENT,
)
#: Ops that work on whole rows, and the parameter that says how long those are.
ROWS = {
    **dict.fromkeys(("layer_norm", "layer_norm_bwd", "rms_norm", "rms_norm_bwd", "softmax", "bias_grad"), "width"),
    **dict.fromkeys(("scores_softmax", "scores_softmax_bwd"), "length"),
    **dict.fromkeys(("loss", "loss_bwd"), "vocab"),
}
#: Ops of kernels that are all fitted on other ops: they show whether times add up.
CHECKS = frozenset({"swiglu", "swiglu_bwd"})


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """The section ``kernels.memory.eager``; nothing where no such kernels were measured."""
    measured = [
        case for case in cases.rows_of("memory") if case.op in OPS and _steady(case) and not _in_cache(case, cases)
    ]
    if not measured:
        return ProfilePart({})
    curves: dict[str, MemoryCurve] = {str(name): curve for name, curve in profile.kernels.memory.eager.items()}
    halves: dict[bool, list[MeasuredCase]] = {False: [], True: []}
    for op in OPS:
        for _, some in itertools.groupby(sorted((case for case in measured if case.op == op), key=_width), key=_width):
            fitted, held_out = every_second(some, _nbytes)
            halves[False] += fitted
            halves[True] += held_out
    for name in ORDER:
        mine = [case for case in halves[False] if case.op not in CHECKS and _own_class(case) == name]
        if mine and (name not in PER_ELEMENT or _tells_elements(mine)):
            sizes = [int(one.nbytes) for case in measured for one in _launched(case) if one.name == name and one.nbytes]
            curve = _curve(mine, name, curves, profile.gpu_spec)
            changes: dict[str, Any] = {**cases.cited, "fitted_range": (min(sizes), max(sizes))}
            curves[name] = replace(curve, **changes)
    points = [
        FittedPoint(
            f"memory.{case.op}", _nbytes(case), case.seconds, _predicted(case, curves, profile.gpu_spec), held_out
        )
        for held_out, some in halves.items()
        for case in some
    ]
    return ProfilePart({"kernels.memory.eager": {name: as_data(curve) for name, curve in curves.items()}}, points)


def _launched(case: MeasuredCase) -> LaunchedKernels:
    return OPS[case.op](case)


def _own_class(case: MeasuredCase) -> str:
    return max((one.name for one in _launched(case)), key=ORDER.index)


def _nbytes(case: MeasuredCase) -> float:
    return float(case.row["bytes"])


def _tells_elements(cases: Sequence[MeasuredCase]) -> bool:
    """Return True where kernels of unlike shares of bytes and of elements written tell the costs of both apart."""
    ratios = {one.nbytes / one.written for case in cases for one in _launched(case)}
    return max(ratios) > 1.5 * min(ratios)


def _width(case: MeasuredCase) -> int:
    """Elements of a row, of those that work on rows."""
    key = ROWS.get(case.op)
    return int(case.params[key]) if key else 0


def _steady(case: MeasuredCase) -> bool:
    """At the clock of memory-bound work batches take the same time, unless something else was going on."""
    return float(case.row.get("p90_s", 0)) - float(case.row.get("p10_s", 0)) < STEADY * case.seconds


def _in_cache(case: MeasuredCase, cases: Cases) -> bool:
    """Lookups are timed again and again on the same tensors, unlike everything else."""
    l2 = max((int(environment.get("l2_bytes", 0)) for environment in cases.environments), default=0)
    return case.op == "embedding" and _nbytes(case) < CACHE * l2


def _predicted(case: MeasuredCase, curves: Mapping[str, MemoryCurve], spec: GpuSpec) -> float:
    cost, width = MemoryCost(spec, curves), _width(case)
    kernels = (Memory(one.name, one.nbytes - one.written, one.written, width=width) for one in _launched(case))
    return sum(map(cost.seconds, kernels))


def _curve(cases: Sequence[MeasuredCase], name: str, curves: Mapping[str, MemoryCurve], spec: GpuSpec) -> MemoryCurve:
    """The class ``name`` from cases whose other kernels are known; one curve per width where it works on rows."""
    base = replace(curves[name], by_width={}, columns=None, element_s=None)
    if name == "reduce":
        return _column_sums(cases, base, curves, spec)
    whole = replace(base, **_searched(cases, base, name, curves, spec))
    by_width = {}
    for width, some in itertools.groupby(sorted(cases, key=_width), key=_width):
        if width:
            mine = list(some)
            by_width[width] = validated(RowCurve, _searched(mine, whole, name, curves, spec, len(mine) < FEW))
    return replace(whole, by_width=by_width)


def _column_sums(
    cases: Sequence[MeasuredCase], base: MemoryCurve, curves: Mapping[str, MemoryCurve], spec: GpuSpec
) -> MemoryCurve:
    """Sums over columns, whose slices follow from rows and width, so that one curve holds for all."""

    def curve(c: Mapping[str, float]) -> MemoryCurve:
        columns = ColumnSums(value_s=c["value_s"], slice_s=c["slice_s"])
        return replace(base, share=c["share"], start_s=c["start_s"], columns=columns)

    def loss(c: Mapping[str, float]) -> float:
        return _error(cases, {**curves, "reduce": curve(c)}, spec)

    starts = [{"share": 0.85, "start_s": 4e-6, "value_s": v, "slice_s": s} for v in (5e-8, 1e-7) for s in (1e-8, 5e-8)]
    constants = min((search(start, loss, limits=LIMITS, step=0.4) for start in starts), key=loss)
    return curve({key: rounded(value) for key, value in constants.items()})


def _error(cases: Sequence[MeasuredCase], curves: Mapping[str, MemoryCurve], spec: GpuSpec) -> float:
    """Mean |log(predicted / measured)|"""
    return statistics.fmean(abs(math.log(_predicted(case, curves, spec) / case.seconds)) for case in cases)


def _searched(
    cases: Sequence[MeasuredCase],
    base: MemoryCurve,
    name: str,
    curves: Mapping[str, MemoryCurve],
    spec: GpuSpec,
    share_only: bool = False,
) -> dict[str, Any]:
    """Share and start, and seconds per element of classes that have them, of least mean |log(predicted / measured)|;
    the start stays where there are few cases."""

    def loss(constants: Mapping[str, Any]) -> float:
        return _error(cases, {**curves, name: replace(base, **constants)}, spec)

    starts = [{"share": share, "start_s": start_s} for share in (0.3, 0.85) for start_s in (3e-6, 15e-6)]
    if name in PER_ELEMENT:
        starts = [start | {"element_s": 3e-12} for start in starts]
    if share_only:
        starts = [{"share": share} for share in (0.3, 0.85)]
    best = min((search(start, loss, limits=LIMITS, step=0.4) for start in starts), key=loss)
    return {"start_s": base.start_s} | {key: rounded(value) for key, value in best.items()}

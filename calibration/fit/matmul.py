"""The constants of matrix products, from products that were measured on a GPU that is busy for long.

First the tiles, and all constants that products share, are fitted on the type with most cases. With these each
type's power limit and speeds by layout follow, and then the constants of grouped products. Products from published
tables, of which no clock is known, are short runs that the power limit hardly touches, and are fitted as such.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from calibration.fit.cases import Cases, MeasuredCase
from calibration.fit.part import Constants, FittedPoint, ProfilePart, every_second, rounded, search
from calibration.shares import ends
from simulator.arrays import Floats
from simulator.config.section import as_data
from simulator.costs.matmul import MatmulCost, Product, Products
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import MatmulModel, MatmulSize
from simulator.hardware.profile import Profile
from simulator.program import GroupedMatmul, Matmul

#: Types by the names of `calibration.measure.matmul`; its fp32 is without TF32, which no training uses.
DTYPES = {"bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "fp8"}
OUTPUTS = {"mm_fp8": "bf16", "mm_accumulate_fp32": "fp32"}
SHORT_S, SHORT_WEIGHT = 10e-6, 0.3  # shorter products are mostly start-up, and training has few of them
LARGE_FLOPS = 5e10  # larger ones take most of a training step
#: Where the search begins.
START: Constants = {
    "large_tile_preference": 0.08,
    "wave_start_s": 2.5e-6,
    "store_Bps_per_sm": 60e9,
    "load_Bps_per_sm": 60e9,
    "memory_fraction": 0.85,
    "overlap_exponent": 4.5,
    "start_s": 3e-6,
    "min_k_per_split": 600.0,
    "split_start_s": 1.8e-6,
    "split_sum_Bps": 2.6e12,
    "power_exponent": 6.0,
}
SUSTAINED_SHARE = 0.75  # of the peak, to begin with
#: Efficiency of a tile by its area, to begin with: the smaller, the less of it is reused.
EFFICIENCY = ((32768, 0.95), (16384, 0.84), (8192, 0.8), (4096, 0.65), (0, 0.45))
LIMITS = {"memory_fraction": (0.1, 1.0), "overlap_exponent": (1.0, 20.0), "power_exponent": (1.0, 20.0)}
FASTEST = 1.2  # speed of a layout relative to the peak: clocks above the nominal one


@dataclass(frozen=True)
class _Sample:
    """Products and their seconds, as columns. ``lasting``: under the power limit, as all that we have measured."""

    products: Products
    seconds: Floats
    lasting: bool

    @classmethod
    def from_cases(cls, cases: Sequence[MeasuredCase], *, lasting: bool) -> _Sample:
        products = Products.from_kernels([kernel_of(case) for case in cases])
        return cls(products, np.array([case.seconds for case in cases]), lasting)

    def predicted(self, cost: MatmulCost) -> Floats:
        return cost.lasting_seconds(self.products) if self.lasting else cost.burst_seconds(self.products)

    def loss(self, cost: MatmulCost) -> float:
        """Mean |log(predicted / measured)|, short ones weighing less, plus that of the large ones alone."""
        errors = np.abs(np.log(self.predicted(cost) / self.seconds))
        weights = np.where(self.seconds > SHORT_S, 1.0, SHORT_WEIGHT)
        large = self.products.flops > LARGE_FLOPS
        return float((weights * errors).sum() / weights.sum() + (errors[large].mean() if large.any() else 0.0))


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """The section ``kernels.matmul``; nothing where no products were measured of the types that the GPU has."""
    spec, lasting = profile.gpu_spec, bool(cases.environments)
    measured = [case for case in cases.rows_of("matmul") if is_of(case, spec)]
    if not measured:
        return ProfilePart({})
    fitted, held_out = _halves(measured)
    model = _beginning(profile.kernels.matmul, measured, cases.cited)
    by_type = Counter(_dtype(case) for case in fitted)
    main = max(by_type, key=lambda dtype: by_type[dtype])
    single = {dtype: [c for c in fitted if _dtype(c) == dtype and c.op != "grouped"] for dtype in by_type}

    def search_in(model: MatmulModel, start: Constants, some: Sequence[MeasuredCase], step: float) -> MatmulModel:
        sample = _Sample.from_cases(some, lasting=lasting)
        limits = LIMITS | {name: (0.1, 1.0) for name in start if name.startswith(("tile_efficiency", "grouped.speed"))}
        limits |= {name: (0.1, FASTEST) for name in start if name.startswith("layout_speed")}
        constants = search(start, lambda c: sample.loss(MatmulCost(spec, _with(model, c))), limits=limits, step=step)
        return _with(model, {name: rounded(value) for name, value in constants.items()})

    roles = {dtype: sorted({str(case.params["role"]) for case in single[dtype]}) for dtype in by_type}
    start = START | {f"tile_efficiency.{tile}": value for tile, value in model.tile_efficiency.items()}
    start |= {f"layout_speed.{main}.{role}.value": 1.0 for role in roles[main][1:]}
    sustained = {d: SUSTAINED_SHARE * spec.peak_flops_per_s[d].value for d in by_type}  # type: ignore[index]
    if lasting:
        start[f"sustained_flops_per_s.{main}.value"] = sustained[main]
    else:
        del start["power_exponent"]
    if not any(case.op.startswith("mm_accumulate") for case in single[main]):
        del start["load_Bps_per_sm"]
    model = search_in(model, start, single[main], 0.2)
    for dtype in sorted(by_type):
        if dtype != main:
            start = {f"layout_speed.{dtype}.{role}.value": 1.0 for role in roles[dtype]}
            start[f"sustained_flops_per_s.{dtype}.value"] = sustained[dtype]
            model = search_in(model, start, single[dtype], 0.1)
    if grouped := [case for case in fitted if case.op == "grouped"]:
        start = {f"grouped.speed.{role}": 0.9 for role in sorted({str(case.params["role"]) for case in grouped})}
        model = search_in(model, start | {"grouped.start_s": 5e-6, "grouped.group_s": 3e-7}, grouped, 0.2)
    points = [
        point
        for some, apart in ((fitted, False), (held_out, True))
        for point in _points(MatmulCost(spec, model), some, held_out=apart, lasting=lasting)
    ]
    ranges = {
        dtype: _range(case for case in measured if _dtype(case) == dtype and case.op != "grouped") for dtype in by_type
    }
    return ProfilePart({"kernels.matmul": as_data(model) | {"fitted_range": ranges}}, points)


def is_of(case: MeasuredCase, spec: GpuSpec) -> bool:
    """Return True for a case of products in a type that the GPU has; other types are emulated."""
    return DTYPES.get(str(case.params.get("dtype"))) in spec.peak_flops_per_s


def kernel_of(case: MeasuredCase) -> Product:
    """The kernel that a case runs."""
    p, dtype = case.params, _dtype(case)
    m, n, k, role = int(p["m"]), int(p["n"]), int(p["k"]), str(p["role"])
    if case.op == "grouped":
        bounds = [0, *ends(k if role == "wgrad" else m, int(p["batch"]), p.get("skew") is True)]
        tokens = tuple(high - low for low, high in itertools.pairwise(bounds))
        return GroupedMatmul(tokens, m, n, dtype, role) if role == "wgrad" else GroupedMatmul(tokens, n, k, dtype, role)
    accumulate = case.op.startswith("mm_accumulate")
    return Matmul(m, n, k, int(p.get("batch", 1)), dtype, role, OUTPUTS.get(case.op, ""), accumulate)


def _dtype(case: MeasuredCase) -> str:
    return DTYPES[str(case.params["dtype"])]


def _halves(cases: Sequence[MeasuredCase]) -> tuple[list[MeasuredCase], list[MeasuredCase]]:
    """Every second size of each op and type is held out, in all layouts."""
    fitted: list[MeasuredCase] = []
    held_out: list[MeasuredCase] = []
    for _, some in itertools.groupby(sorted(cases, key=_group), key=_group):
        ours, rest = every_second(some, lambda case: kernel_of(case).flops)
        fitted += ours
        held_out += rest
    return fitted, held_out


def _group(case: MeasuredCase) -> str:
    return f"matmul.{_dtype(case)}" + (
        f".{case.op}" if case.op in ("bmm", "grouped") or "accumulate" in case.op else ""
    )


def _points(cost: MatmulCost, cases: Sequence[MeasuredCase], *, held_out: bool, lasting: bool) -> list[FittedPoint]:
    if not cases:
        return []
    sample = _Sample.from_cases(cases, lasting=lasting)
    return [
        FittedPoint(f"{_group(case)}.{case.params['role']}", float(flops), case.seconds, float(predicted), held_out)
        for case, flops, predicted in zip(cases, sample.products.flops, sample.predicted(cost), strict=True)
    ]


def _range(cases: Iterable[MeasuredCase]) -> dict[str, tuple[int, int]]:
    sizes = [case.params for case in cases]
    values = {name: [int(p.get(name, 1)) for p in sizes] for name in get_args(MatmulSize)}
    return {name: (min(sizes_of_name), max(sizes_of_name)) for name, sizes_of_name in values.items()}


def _beginning(model: MatmulModel, measured: Sequence[MeasuredCase], cited: dict[str, Any]) -> MatmulModel:
    """The base profile's tiles with constants that do not depend on an earlier fit."""
    tiles = {}
    for tile in model.tile_efficiency:
        area = math.prod(int(side) for side in tile.split("x"))
        tiles[tile] = next(share for least, share in EFFICIENCY if area >= least)
    changes: dict[str, Any] = {"tile_efficiency": tiles} | cited
    types = {_dtype(case) for case in measured}
    if cited:
        speeds = {
            role: replace(figure, value=1.0, **cited)
            for role, figure in next(iter(model.layout_speed.values())).items()
        }
        changes["layout_speed"] = {**model.layout_speed, **dict.fromkeys(types, speeds)}
        changes["sustained_flops_per_s"] = {
            dtype: replace(figure, **cited) if dtype in types else figure
            for dtype, figure in model.sustained_flops_per_s.items()
        }
        if any(case.op == "grouped" for case in measured):
            changes["grouped"] = replace(model.grouped, **cited)
    return replace(model, **changes)


def _with(model: MatmulModel, constants: Mapping[str, float]) -> MatmulModel:
    """The model with some of its numbers replaced, by dotted key; unchecked, for speed."""
    updates: dict[str, Any] = {}
    for key, value in constants.items():
        head, *path = key.split(".")
        node: Any = updates.get(head, getattr(model, head))
        updates[head] = _put(node, path, value)
    return replace(model, **updates)


def _put(node: Any, path: Sequence[str], value: float) -> Any:
    if not path:
        return value
    if isinstance(node, Mapping):
        return {**node, path[0]: _put(node[path[0]], path[1:], value)}
    return replace(node, **{path[0]: _put(getattr(node, path[0]), path[1:], value)})

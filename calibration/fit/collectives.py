"""Collectives, and sends and receives, inside a node: the constants of its transport for NVLink."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from calibration.fit.cases import MEASURED, Cases, MeasuredCase
from calibration.fit.part import Constants, FittedPoint, ProfilePart, every_second, rounded, search
from simulator.cluster import build_cluster
from simulator.config.catalog import names
from simulator.config.cluster import load_cluster
from simulator.config.section import as_data
from simulator.config.validation import validated
from simulator.errors import InputError
from simulator.hardware.profile import Profile
from simulator.hardware.transport import Transport
from simulator.input_files import with_changes
from simulator.network.collectives import patterns
from simulator.network.pattern import Pattern
from simulator.network.timing import timed

#: Operations that are fitted. Operations that no workload runs are left out. Sends around a ring of more than two are
#: left out too: their time varies by a factor of three with how NCCL spreads them over channels.
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "send_recv")
#: Run after run these overlap, as their sender goes on before the last receiver is done: small ones look too quick.
ONE_WAY = {"broadcast": 2**20, "send": 2**20}
#: Large ones decide the time of a step: they weigh more.
LARGE_BYTES, LARGE_WEIGHT = 16 * 2**20, 2.0
#: What smaller messages show of the line rate is too little to tell it from the filling of the pipeline.
SHOWS_LINE_RATE = 2**30
#: The constants that are fitted, and where the search begins, whatever the profile says. From short ramps and a low
#: efficiency the search ends in another valley than from long ramps and a high one. The second predicts the rows that
#: were held out.
START: Constants = {
    "efficiency": 0.88,
    "copy_Bps": 1e12,
    "p2p_copy_Bps": 1e12,
    "peer_latency_s": 0.1e-6,
    "protocols.ll.base_latency_s": 5e-6,
    "protocols.ll.hop_latency_s": 0.2e-6,
    "protocols.ll.bandwidth_fraction": 0.05,
    "protocols.ll128.base_latency_s": 6.5e-6,
    "protocols.ll128.hop_latency_s": 0.1e-6,
    "protocols.ll128.bandwidth_fraction": 0.5,
    "protocols.ll128.most_bytes": 1.8e6,
    "protocols.simple.base_latency_s": 12e-6,
    "protocols.simple.hop_latency_s": 10e-9,
    "protocols.simple.half_bytes": 3e6,
    "p2p.ll.base_latency_s": 6e-6,
    "p2p.ll.bandwidth_fraction": 0.05,
    "p2p.simple.base_latency_s": 6e-6,
    "p2p.simple.half_bytes": 5e6,
}
LIMITS = {name: (0.0, 1.0) for name in START if name.endswith(("efficiency", "fraction"))}


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """Fit ``transports.nvlink``. Held out: every second size, and all of some numbers of GPUs (`Cases.held_out`).

    Raises `InputError` where that leaves nothing.
    """
    rows = [case for case in cases.rows_of("collective", *OPS) if _is_fitted(case)]
    if not rows:
        return ProfilePart({})
    with_sharp = bool(nvls(cases))
    candidates = strung(rows, profile.gpu, nvls=with_sharp)
    apart = cases.held_out(rows)
    inside = [case for case in rows if len(case.ranks) not in apart]
    if not inside:
        sizes = ", ".join(str(n) for n in sorted({len(case.ranks) for case in rows}))
        raise InputError("no collectives are left to fit", key="--hold-out", found=sizes, allowed="some of these")
    fitted: list[MeasuredCase] = []
    for group in sorted({(case.op, len(case.ranks)) for case in inside}):
        group_cases = [case for case in inside if (case.op, len(case.ranks)) == group]
        fitted += every_second(group_cases, _nbytes)[0]
    start = profile.transports["nvlink"]
    begin = dict(START)
    if max(map(_nbytes, rows)) < SHOWS_LINE_RATE:
        del begin["efficiency"]

    def loss(constants: Constants) -> float:
        pairs = zip(fitted, seconds(changed(start, constants), fitted, candidates), strict=True)
        return statistics.fmean(weight(case) * abs(math.log(s / case.seconds)) for case, s in pairs)

    constants = search(begin, loss, limits=LIMITS, least=0.002, sweeps=100)
    model = changed(start, {name: rounded(value) for name, value in constants.items()})
    ids = {id(case) for case in fitted}
    points = [
        FittedPoint(f"collectives.{case.op}.{len(case.ranks)}", _nbytes(case), case.seconds, s, id(case) not in ids)
        for case, s in zip(rows, seconds(model, rows, candidates), strict=True)
    ]
    ours = bool(cases.environments)
    kept = "".join(
        re.findall(r"; in_switch: .*" if "efficiency" in begin else r"; (?:efficiency|in_switch): .*", start.note)
    )
    origin = {
        "kind": "measured" if ours else "published",
        "source": MEASURED if ours else start.source,
        "note": f"fitted on {', '.join(str(n) for n in sorted({len(case.ranks) for case in fitted}))} GPUs"
        + (", without NVLink SHARP" if ours and not with_sharp else "")
        + kept,
    }
    return ProfilePart({"transports.nvlink": {**as_data(model, nulls=False), **origin}}, points)


@dataclass(frozen=True)
class OneTransport:
    """Costs where every link is of one transport."""

    model: Transport

    def transport(self, kind: str) -> Transport:
        return self.model

    def reachable_Bps(self, kind: str, line_Bps: float) -> float:
        return line_Bps * self.model.efficiency


def strung(
    cases: Iterable[MeasuredCase], gpu: str, *, nvls: bool = False
) -> dict[tuple[str, int], tuple[Pattern, ...]]:
    """Return the patterns of each operation on the links of a shipped cluster with such GPUs.

    The key is operation and number of GPUs. ``nvls``: whether NVLink SHARP was at hand.
    """
    sharp = {} if nvls else {"node": {"nvlink": {"sharp": False}}}
    cluster = build_cluster(load_cluster({"name": _cluster_of(gpu), **sharp}))
    return {(op, n): patterns(op, range(n), cluster) for op, n in {(case.op, len(case.ranks)) for case in cases}}


def seconds(
    model: Transport, cases: Iterable[MeasuredCase], candidates: Mapping[tuple[str, int], Sequence[Pattern]]
) -> list[float]:
    """Return the seconds of each case by the model."""
    costs = OneTransport(model)
    return [
        min(timed(pattern, _nbytes(case), costs)[0] for pattern in candidates[case.op, len(case.ranks)])
        for case in cases
    ]


def changed(model: Transport, constants: Mapping[str, float]) -> Transport:
    """The transport with constants replaced, by dotted name."""
    return validated(Transport, with_changes(as_data(model), constants, {}))


def by_gpus(points: Iterable[FittedPoint]) -> list[str]:
    """A line for each number of GPUs: how far its collectives are off, as a geometric mean, fitted and held out, of
    all sizes and from `LARGE_BYTES` on."""
    groups: dict[tuple[int, bool], list[FittedPoint]] = {}
    for point in points:
        if point.kind == "collectives":
            groups.setdefault((int(point.group.rpartition(".")[2]), point.held_out), []).append(point)
    lines = []
    for (n, held_out), group in sorted(groups.items()):
        line = f"collectives of {n} GPUs, {'held out' if held_out else 'fitted'}: {_off(group)}"
        if large := [point for point in group if point.size >= LARGE_BYTES]:
            line += f"; from {LARGE_BYTES >> 20} MiB on {_off(large)}"
        lines.append(line)
    return lines


def _off(points: Sequence[FittedPoint]) -> str:
    errors = [abs(math.log(point.fitted_s / point.measured_s)) for point in points]
    return f"{len(points)} rows, geometric mean {math.expm1(statistics.fmean(errors)):.1%}"


def weight(case: MeasuredCase) -> float:
    return LARGE_WEIGHT if _nbytes(case) >= LARGE_BYTES else 1.0


def _is_fitted(case: MeasuredCase) -> bool:
    if case.op in ONE_WAY and _nbytes(case) < ONE_WAY[case.op]:
        return False
    return not (case.op == "send_recv" and len(case.ranks) > 2) and case.params.get("dtype", "bf16") == "bf16"


def _nbytes(case: MeasuredCase) -> float:
    return float(case.row["bytes"])


def nvls(cases: Cases) -> bool | None:
    """Return True where several GPUs were measured with NVLink SHARP; None: the environments do not tell."""
    told = [machine.get("nvls") for machine in cases.environments if int(str(machine.get("ranks", 1))) > 1]
    return any(told) if {*told} - {None} else None


def _cluster_of(gpu: str) -> str:
    """A shipped cluster of such GPUs, for the links of its nodes."""
    for name in names("cluster"):
        if load_cluster(name).gpu_types == (gpu,):
            return name
    raise InputError("no shipped cluster has such GPUs", key="gpu", found=gpu)

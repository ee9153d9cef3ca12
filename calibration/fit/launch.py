"""Seconds of the host to issue ops: ``host.launch_s``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

from calibration.fit import hosts
from calibration.fit.cases import MEASURED, Cases
from calibration.fit.part import FittedPoint, ProfilePart, rounded
from simulator.config.section import as_data
from simulator.hardware.profile import Profile

#: A layer of GPT as `calibration.measure.launch.NarrowLayer` writes it, as the ops that were measured alone.
GPT_FORWARD = Counter(linear_bias_grad=4, layer_norm_grad=2, attention_grad=1, gelu_grad=1, add_grad=2)
GPT_BACKWARD = Counter(linear_bias_bwd=4, layer_norm_bwd=2, attention_bwd=1, gelu_bwd=1)
#: One of Llama; a rotation of queries and keys is two products, a negation, a concatenation and a sum of each.
LLAMA_FORWARD = Counter(linear_grad=5, rms_norm_grad=2, attention_grad=1, silu_mul=1, add_grad=2 + 2 * 5)
LLAMA_BACKWARD = Counter(linear_bwd=5, rms_norm_bwd=2, attention_bwd=1, gelu_bwd=2 + 2 * 4)
#: Tensors of the optimizer step that is one op of a workload.
OPTIMIZER_TENSORS = 100
NEEDED = {*GPT_FORWARD, *GPT_BACKWARD, *LLAMA_FORWARD, *LLAMA_BACKWARD, "empty_kernel", "linear_bwd"}


def fit(cases: Cases, profile: Profile) -> ProfilePart:
    """Fit the seconds of one op among other ops, from ops measured alone and from whole layers.

    Forward, a layer takes longer than its ops do alone, by what modules and views add: spread over them in proportion.
    Backward, each op measured alone includes the start of autograd's engine, of which a layer needs one. Both are
    worked out on a layer of GPT; one of Llama is held out. Where layers were measured as training runs them, these
    decide instead (`calibration.fit.hosts`).
    """
    if cases.rows_of("layers"):
        return _fit_layers(cases, profile)
    alone = {case.op: case.seconds for case in cases.rows_of("launch") if not case.params}
    layers = {
        (case.op, case.params["model"]): case.seconds for case in cases.rows_of("launch", "block_fwd", "block_bwd")
    }
    steps = {case.params["tensors"]: case.seconds for case in cases.rows_of("launch", "optimizer_fused")}
    if not alone.keys() >= NEEDED or ("block_fwd", "gpt") not in layers or OPTIMIZER_TENSORS not in steps:
        return ProfilePart({})
    modules = layers["block_fwd", "gpt"] / _sum(GPT_FORWARD, alone)
    engine_s = (_sum(GPT_BACKWARD, alone) - layers["block_bwd", "gpt"]) / (GPT_BACKWARD.total() - 1)
    forward = {
        "matmul": modules * alone["linear_grad"],
        "attention": modules * alone["attention_grad"],
        "norm": modules * alone["layer_norm_grad"],
        "other": modules * alone["gelu_grad"],
    }
    backward = {
        "matmul": (alone["linear_bwd"] - engine_s) / 2,
        "attention": alone["attention_bwd"] - engine_s,
        "norm": alone["layer_norm_bwd"] - engine_s,
        "other": alone["gelu_bwd"] - engine_s,
    }
    calls = [float(case.row["host_s"]) for case in cases.rows_of("collective") if case.op not in ("send", "send_recv")]
    sends = [float(case.row["host_s"]) for case in cases.rows_of("collective", "send")]
    if not calls or not sends:
        return ProfilePart({})
    rest = {
        "optimizer_s": rounded(steps[OPTIMIZER_TENSORS]),
        "collective_s": rounded(statistics.median(calls)),
        "p2p_s": rounded(statistics.median(sends)),
    }
    eager = {
        "forward_s": {name: rounded(seconds) for name, seconds in forward.items()},
        "backward_s": {name: rounded(seconds) for name, seconds in backward.items()},
        **rest,
        "kind": "measured",
        "source": MEASURED,
    }
    base = profile.host.launch_s["eager"]
    around = {"around_s": base.around_s, "note": base.note} if base.around_s else {}
    note = f"an optimizer step of {OPTIMIZER_TENSORS} tensors, fused"
    figures = {"host.launch_s.eager": {**eager, "note": note, **around}}
    return ProfilePart(figures, list(_points(alone, layers, modules, engine_s)))


def _fit_layers(cases: Cases, profile: Profile) -> ProfilePart:
    """Eager PyTorch alone: what other software issues was not measured so."""
    figures, points = hosts.fitted(cases)
    steps = [case for case in cases.rows_of("launch", "optimizer_fused") if case.params["tensors"] == OPTIMIZER_TENSORS]
    if steps:
        figures["optimizer_s"] = rounded(steps[0].seconds)
    eager = as_data(profile.host.launch_s["eager"], nulls=False) | figures
    note = f"an optimizer step of {OPTIMIZER_TENSORS} tensors, fused"
    return ProfilePart({"host.launch_s.eager": {**eager, "kind": "measured", "source": MEASURED, "note": note}}, points)


def _points(
    alone: Mapping[str, float], layers: Mapping[tuple[str, str], float], modules: float, engine_s: float
) -> list[FittedPoint]:
    """Whole layers beside the sum of their ops."""
    points = []
    for model, forward, backward in (
        ("gpt", GPT_FORWARD, GPT_BACKWARD),
        ("llama", LLAMA_FORWARD, LLAMA_BACKWARD),
    ):
        sums = {
            "block_fwd": modules * _sum(forward, alone),
            "block_bwd": _sum(backward, alone) - (backward.total() - 1) * engine_s,
        }
        points += [
            FittedPoint(f"launch.{op}", seconds, layers[op, model], seconds, model != "gpt")
            for op, seconds in sums.items()
            if (op, model) in layers
        ]
    return points


def _sum(ops: Mapping[str, int], alone: Mapping[str, float]) -> float:
    return sum(count * alone[op] for op, count in ops.items())

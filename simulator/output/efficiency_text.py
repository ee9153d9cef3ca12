"""Words for MFU and the bubble: shares of which peak or time, and what counts."""

from __future__ import annotations

from simulator.output.tables import JsonReport, percent
from simulator.units import TFLOP

#: Of a pipeline, the time that the bubble is a share of (`simulator.analysis.training.bubble`).
BUBBLE_WINDOW = "from first op to last pass"


def mfu_lines(report: JsonReport) -> list[str]:
    """Return what stands behind MFU: the peak by its precision, and other ways to count, where they differ.

    Half of attention makes none in a model without it. Only a job with products in 8 or 4 bits has a share of their
    peak.
    """
    mfu, peak = report["mfu"], report["peak_flops_per_s_per_gpu"]
    first, shares = f"of the dense {report['peak_precision']} peak of {tflops(peak)}", []
    if (half := percent(report["mfu_causal"])) != percent(mfu):
        first += "; counts the whole square of attention"
        shares.append(f"{half} counting half of it")
    for dtype in ("fp8", "fp4"):
        if other := report[f"{dtype}_peak_flops_per_s_per_gpu"]:
            shares.append(f"{percent(mfu * peak / other)} of the dense {dtype} peak of {tflops(other)}")
    if mfu > 1:
        first += ", which products in fewer bits pass"
    return [first, *(["; ".join(shares)] if shares else [])]


def bubble_text(report: JsonReport) -> str:
    """Return the bubble of a job with stages: the share of which time, over the busy time, and what counts as idle."""
    idle = f"idle {percent(report['bubble_fraction'])} {BUBBLE_WINDOW}"
    return f"{idle}, idle / busy {report['bubble_ratio']:.3f}; pp and dp count as idle"


def tflops(rate: float) -> str:
    return f"{rate / TFLOP:.1f} TFLOP/s"

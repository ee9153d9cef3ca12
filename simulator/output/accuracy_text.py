"""Words for the accuracy of a step: the interval beside its time, what that rests on, or that nothing is comparable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simulator.output.tables import JsonReport, percent
from simulator.units import counted, format_time

#: Sources that are named.
_MOST_SOURCES = 4
NOTHING = "nothing comparable"


def interval_text(ends_s: Sequence[float]) -> str:
    """Write the ends of an interval, the unit once where both have it.

    >>> interval_text([18.9, 21.8]), interval_text([0.0123, 0.0456]), interval_text([0.9, 1.1])
    ('18.90 to 21.80 s', '12.30 to 45.60 ms', '900.00 ms to 1.10 s')
    """
    (low, unit), (high, last) = (format_time(end).split() for end in ends_s)
    return f"{low}{'' if unit == last else f' {unit}'} to {high} {last}"


def interval_of(report: JsonReport) -> str:
    """Return the interval of a report in short, and how far off the step is where it lies outside."""
    accuracy = report.get("accuracy")
    if not accuracy:
        return NOTHING
    outside = f" (step likely {_off(accuracy['bias'])})" if _is_outside(report) else ""
    return interval_text(accuracy["interval_s"]) + outside


def card_of_interval(report: JsonReport) -> str:
    """Return what stands below the step time on a card."""
    accuracy = report.get("accuracy")
    if not accuracy:
        return f"{NOTHING} was measured"
    interval = interval_text(accuracy["interval_s"])
    thin = ", thin evidence: 1 source" if len(accuracy["sources"]) == 1 else ""
    if _is_outside(report):
        return f"likely {_off(accuracy['bias'])}, so expect {interval}{thin}"
    return f"{round(100 * accuracy['level'])} % interval {interval}{thin}"


def _is_outside(report: JsonReport) -> bool:
    """Tell whether the simulated time lies outside of its own interval."""
    low, high = report["accuracy"]["interval_s"]
    return not low <= report["step_time_s"] <= high


def beside_step_time(report: JsonReport) -> str:
    """Return what stands beside the step time: in brackets, the interval and how many steps it rests on.

    Where the simulated time lies outside, it is said how far off it is likely to be.
    """
    if "accuracy" not in report:
        return ""
    accuracy = report["accuracy"]
    if accuracy is None:
        return " (nothing comparable was measured)"
    steps = counted(accuracy["n_rows"], "comparable step")
    sources = counted(len(accuracy["sources"]), "source")
    verb = "was" if accuracy["n_rows"] == 1 else "were"
    thin = ", thin evidence" if len(accuracy["sources"]) == 1 else ""
    interval = interval_text(accuracy["interval_s"])
    if _is_outside(report):
        return f" (by {steps} of {sources}{thin}, likely {_off(accuracy['bias'])}, so expect {interval})"
    return f" ({interval}: as far off as {steps} of {sources} {verb}{thin})"


def nothing_comparable_lines(report: JsonReport) -> list[str]:
    """Return the lines that stand first where nothing is comparable, else none."""
    reasons = report.get("nothing_comparable")
    if not reasons:
        return []
    first = "NO MEASURED STEP IS COMPARABLE: nothing says how far off these times are."
    return [first, *(f"  {reason}" for reason in reasons)]


def interval_lines(accuracy: Mapping[str, Any]) -> list[str]:
    """Return what an interval rests on: whose steps, how far off each was, and in what the job differs."""
    first, rest = accuracy["sources"][:_MOST_SOURCES], accuracy["sources"][_MOST_SOURCES:]
    level, every = round(100 * accuracy["level"]), accuracy["all_sources"]
    lines = [
        f"The step time's interval is one of {level} %. It rests on measured steps like this job's:",
        *(f"  {one['source']}: {counted(one['n_rows'], 'step')}, simulated {_off(one['error'])}" for one in first),
    ]
    if rest:
        steps = counted(sum(one["n_rows"] for one in rest), "step")
        lines.append(f"  {counted(len(rest), 'source')} less alike: {steps}")
    lines += [
        f"  all {every['n_sources']} sources, which count as one more: simulated {_off(every['error'])}",
        f"So this job is likely to be simulated {_off(accuracy['bias'])}, which the step time does not correct.",
    ]
    if accuracy["unlike"]:
        lines += ["Most of them differ from it:", *(f"  {one}" for one in accuracy["unlike"])]
    return lines


def _off(error: float) -> str:
    """Write an error of a simulated time.

    >>> _off(-0.041), _off(0.02), _off(0.0001)
    ('4.1 % too fast', '2.0 % too slow', 'as measured')
    """
    if abs(error) < 5e-4:
        return "as measured"
    return f"{percent(abs(error))} too {'fast' if error < 0 else 'slow'}"

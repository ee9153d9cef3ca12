"""The whole page: one run, or two side by side, as a single HTML file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from simulator.analysis.training.memory import RankMemory
from simulator.errors import InputError, install_extra
from simulator.output.files import writing
from simulator.output.gantt_panel import IDLE_COLOUR, PHASE_COLOUR, SHARE_COLOUR, lighter
from simulator.output.page.sections import section_context
from simulator.output.page.timeline_data import PASS_NAME
from simulator.output.summary import compared_rows
from simulator.output.tables import JsonReport
from simulator.timeline import CATEGORIES, Timeline

_SHARE_NAME = {"recompute": "recompute", "pp": "pp hand-over", "offload": "copies to and from the host"}


@dataclass(frozen=True)
class PageJob:
    """One job of a page: its results with ``what_to_change``, its step, all that was played, and its GPUs' memory."""

    report: JsonReport
    timeline: Timeline
    played: Timeline
    memories: Sequence[RankMemory]


def check_page() -> None:
    """Raise `InputError` where pages cannot be made."""
    try:
        import bokeh  # noqa: F401
    except ImportError:
        fix = install_extra("report")
        raise InputError("needs bokeh, which is not installed", file="--report", fix=fix) from None


def save_page(jobs: Sequence[PageJob], path: str | Path, *, changed: str = "") -> None:
    """Write one page on one job, or on two; equal results give equal bytes.

    ``changed``: options that the jobs were changed by. Raises `InputError` where it cannot be written.
    """
    text = page(jobs, changed=changed)
    with writing(path) as file:
        file.write(text.encode())


def page(jobs: Sequence[PageJob], *, changed: str = "") -> str:
    """Return the text of a page."""
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment, PackageLoader

    charts, left_out = _charts(jobs)
    script, places = components(charts)
    sections = [
        dict(section_context(job.report))
        | {"number": n + 1}
        | {"timeline": places[f"timeline{n}"], "memory": places[f"memory{n}"], "left_out": left_out[n]}
        for n, job in enumerate(jobs)
    ]
    both = [job.report for job in jobs]
    environment = Environment(loader=PackageLoader("simulator.output.page", ""), autoescape=True)
    text = environment.get_template("page.html").render(
        jobs=sections,
        title=" and ".join(str(report["name"]) for report in both),
        changed=changed,
        compared=compared_rows(*both) if len(both) == 2 else [],
        legend=_legend(jobs),
        style=files("simulator.output.page").joinpath("page.css").read_text(encoding="utf-8"),
        library=Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render(),
        script=script,
    )
    return _with_steady_names(text)


def _charts(jobs: Sequence[PageJob]) -> tuple[dict[str, Any], list[str]]:
    """Return the pictures by name, and per job what its timeline leaves out."""
    from simulator.output.page.memory_chart import memory_chart
    from simulator.output.page.timeline_chart import timeline_chart

    charts: dict[str, Any] = {}
    left_out = []
    for number, job in enumerate(jobs):
        charts[f"timeline{number}"], sentence = timeline_chart(job.timeline, f"job{number}")
        charts[f"memory{number}"] = memory_chart(job.played, job.memories, f"job{number}")
        left_out.append(sentence)
    return charts, left_out


def _legend(jobs: Sequence[PageJob]) -> list[tuple[str, str]]:
    """Return colour and name of what the timelines show."""
    phases = {str(phase) for job in jobs for phase in set(job.timeline.phase.tolist())}
    names = {"B": "backward, or its input gradient"} if {"B", "I"} <= phases else {}
    entries = [
        (PHASE_COLOUR[phase], names.get(phase, name))
        for phase, name in PASS_NAME.items()
        if phase in phases and not (phase == "I" and names)
    ]
    kinds = {CATEGORIES[code] for job in jobs for template in job.timeline.templates for code in template.category}
    entries += [
        (colour, _SHARE_NAME.get(kind, f"{kind} communication"))
        for kind, colour in SHARE_COLOUR.items()
        if kind in kinds
    ]
    if any(job.timeline.chunk.max(initial=0) > 0 for job in jobs):
        entries.append((lighter(PHASE_COLOUR["F"], 0.6), "lighter: the rank's other chunks"))
    return [*entries, (IDLE_COLOUR, "idle")]


def _with_steady_names(text: str) -> str:
    """Return a page whose names of elements follow from their order, so that the same results give the same page."""
    numbers: dict[str, str] = {}

    def steady(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"id-{len(numbers)}")

    start = text.index("<main")
    head, rest = text[:start], text[start:]
    rest = re.sub(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", steady, rest)
    return head + re.sub(r'(?<=")p\d{4,}(?=")', steady, rest)

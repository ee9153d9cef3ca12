"""Views of results in a notebook, in HTML without scripts."""

from __future__ import annotations

from html import escape

from simulator.output.page.sections import alarms, cards, headline, time_bars
from simulator.output.tables import JsonReport

_CARD = "border:1px solid #d5dae0;border-radius:6px;padding:6px 12px;min-width:130px"
_NOTE = "color:#52606d;font-size:12px"
_CELL = "text-align:left;padding:1px 12px 1px 0"


def step_view(report: JsonReport) -> str:
    """Return a step's key figures as cards, what to know before, and where a GPU's time goes."""
    parts = [f"<b>{escape(str(report['name']))}</b><br><span style='{_NOTE}'>{escape(headline(report))}</span>"]
    parts += [f"<div style='color:#b42318;white-space:pre-line'>{escape(line)}</div>" for line in alarms(report)]
    figures = "".join(
        f"<div style='{_CARD}'><span style='{_NOTE}'>{escape(card.label)}</span><br><b>{escape(card.figure)}</b><br>"
        f"<span style='{_NOTE}'>{escape(card.beside)}</span></div>"
        for card in cards(report)
    )
    parts.append(f"<div style='display:flex;flex-wrap:wrap;gap:8px;margin:6px 0'>{figures}</div>")
    rows = "".join(
        f"<tr><td style='{_CELL}'>{escape(bar.name)}</td><td style='{_CELL}'>{bar.figure}</td>"
        f"<td style='{_CELL}'>{bar.share}</td><td style='{_CELL}'><div style='width:{1.6 * bar.width:.0f}px;"
        f"height:10px;background:{bar.colour};outline:1px solid #1f293320'></div></td></tr>"
        for bar in time_bars(report)
    )
    parts.append(f"<table style='margin:0'>{rows}</table>")
    return "<div>" + "".join(parts) + "</div>"

"""Links of a Timeline: use, users and contention."""

from __future__ import annotations

import re
from typing import Any

from simulator.arrays import without_rounding
from simulator.timeline import Contention, Timeline

#: Links of a kind whose bytes, or losses, differ by less are one row.
_ALIKE = 0.05
#: Losses, and times together, below this share of a step are left out: tables would show nothing.
_LEAST = 1e-6


def busiest_links(timeline: Timeline, limit: int = 8) -> list[dict[str, Any]]:
    """Return the links of highest utilisation, a row for all of one kind that are alike within 5 %.

    ``name``, ``bytes`` and ``utilisation`` are the busiest link's; ``count`` says how many are alike. Utilisation is
    the share of the step that the bytes would take at full capacity. Of equally busy links the cluster's first comes
    first, however many links stand for each other.
    """
    step = timeline.step_time_s
    used = [(link.nbytes / (link.capacity_Bps * step), link) for link in timeline.links if link.nbytes and step]
    rows: list[dict[str, Any]] = []
    for utilisation, link in sorted(used, key=lambda pair: (-without_rounding(pair[0]), pair[1].index)):
        like = next(
            (r for r in rows if r["kind"] == link.kind and utilisation >= (1 - _ALIKE) * r["utilisation"]), None
        )
        if like is not None:
            like["count"] += link.count
        else:
            rows.append(
                {
                    "name": link.name,
                    "kind": link.kind,
                    "count": link.count,
                    "bytes": link.nbytes,
                    "utilisation": utilisation,
                }
            )
    return rows[:limit]


def links_of_purpose(timeline: Timeline, purpose: str) -> list[dict[str, Any]]:
    """Return the links that a kind of communication crosses, those it keeps busy longest first.

    Links whose names differ in numbers alone (``node*.nic*``) share a row: their number, the bytes through the busiest
    and the seconds that these take at full capacity. Of equally busy kinds of links the order is that of their names.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for link in timeline.links:
        nbytes = link.by_purpose.get(purpose, 0.0)
        if not nbytes:
            continue
        name = re.sub(r"\d+", "*", link.name.partition(":")[0])
        row = rows.setdefault(
            (name, link.kind), {"links": name, "kind": link.kind, "count": 0, "bytes": 0.0, "busy_s": 0.0}
        )
        row["count"] += link.count
        busiest = without_rounding(row["busy_s"]), row["bytes"]
        if (without_rounding(nbytes / link.capacity_Bps), nbytes) > busiest:
            row |= {"bytes": nbytes, "busy_s": nbytes / link.capacity_Bps}
    return sorted(rows.values(), key=lambda row: (-without_rounding(float(row["busy_s"])), row["links"]))


def contention(timeline: Timeline, limit: int = 8) -> list[dict[str, Any]]:
    """Return the links on which transfers slowed each other, the largest loss first (see `Contention`).

    Rows of equal losses are ordered by all else that they tell, then by their links in the cluster. So neither rounding
    nor the links that stand for others decide.
    Links of a kind that are alike share a row, under the name of the link with the largest loss. ``flows``: job (None
    for background traffic), axis, operation, number at once, seconds together and seconds lost of each contender.
    """
    rows: list[dict[str, Any]] = []
    for contention in sorted(timeline.contention, key=_worst_first):
        if _largest_loss(contention) <= _LEAST * timeline.step_time_s:
            continue
        flows = [
            {
                "job": flow.job or None,
                "axis": flow.axis,
                "op": flow.op,
                "at_once": round(flow.at_once),
                "seconds_together": flow.seconds,
                "lost_s": flow.lost_s,
            }
            for flow in contention.flows
            if max(flow.seconds, flow.lost_s) > _LEAST * timeline.step_time_s
        ]
        like = next((row for row in rows if row["kind"] == contention.kind and _alike(row["flows"], flows)), None)
        if like is not None:
            like["count"] += contention.count
        else:
            row = {"link": contention.link, "kind": contention.kind, "count": contention.count, "flows": flows}
            rows.append(row)
    return rows[:limit]


def _worst_first(contention: Contention) -> tuple[float, str, list[tuple[object, ...]], int]:
    """Return what rows of contention are ordered by: the largest loss, the kind of link, who met there, the link."""
    flows: list[tuple[object, ...]] = [
        (
            flow.job,
            _axis(flow.job, flow.axis),
            flow.op,
            -flow.at_once,
            -without_rounding(flow.lost_s),
            -without_rounding(flow.seconds),
        )
        for flow in contention.flows
    ]
    return -without_rounding(_largest_loss(contention)), contention.kind, flows, contention.index


def _axis(job: str | None, axis: str) -> str:
    """Return the axis of a flow; background traffic has none, but the name of its link, and is alike on others."""
    return axis if job else ""


def _largest_loss(contention: Contention) -> float:
    return max(flow.lost_s for flow in contention.flows)


def _alike(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Tell whether the same flows contend in both lists, for as long and at the same loss."""
    keys = [
        [(flow["job"], _axis(flow["job"], flow["axis"]), flow["op"], flow["at_once"]) for flow in flows]
        for flows in (first, second)
    ]
    return keys[0] == keys[1] and all(
        abs(a[key] - b[key]) <= _ALIKE * max(a[key], b[key])
        for a, b in zip(first, second, strict=True)
        for key in ("seconds_together", "lost_s")
    )

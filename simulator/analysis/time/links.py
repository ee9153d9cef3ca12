"""Links: how busy they are, who uses which, and who met on them. Functions of a Timeline."""

from __future__ import annotations

import re
from typing import Any

from simulator.timeline import Contention, Timeline

#: Links of a kind whose bytes, or losses, differ by less are told as one.
_ALIKE = 0.05
#: Less of a step than this is rounding.
_LEAST = 1e-9


def busiest_links(timeline: Timeline, limit: int = 8) -> list[dict[str, Any]]:
    """The links of highest utilisation: name (of the busiest of its like), kind, how many are alike, bytes through
    each, and the share of the step that these would take at full capacity. Alike are links of one kind, 5 % apart at
    most."""
    step = timeline.step_time_s
    used = [(link.nbytes / (link.capacity_Bps * step), link) for link in timeline.links if link.nbytes and step]
    rows: list[dict[str, Any]] = []
    for utilisation, link in sorted(used, key=lambda pair: -pair[0]):
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
    """The links that a kind of communication crosses, the ones that it keeps busy longest first: one row for all that
    are called alike (``node*.nic*``), how many there are, the bytes through the busiest and the seconds that they take
    at its full capacity."""
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
        if nbytes / link.capacity_Bps > row["busy_s"]:
            row |= {"bytes": nbytes, "busy_s": nbytes / link.capacity_Bps}
    return sorted(rows.values(), key=lambda row: -float(row["busy_s"]))


def contention(timeline: Timeline, limit: int = 8) -> list[dict[str, Any]]:
    """The links on which transfers held each other up, those with the largest loss first (see `Contention`): link (of
    those alike the one of the largest loss), kind, how many are alike, and the flows that met there: whose (``job``;
    None: background traffic), on which axis, what operation, how many at once, for how long, and what each lost."""
    rows: list[dict[str, Any]] = []
    for met in sorted(timeline.contention, key=lambda met: -_largest(met)):
        if _largest(met) <= _LEAST * timeline.step_time_s:
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
            for flow in met.flows
        ]
        like = next((row for row in rows if row["kind"] == met.kind and _alike(row["flows"], flows)), None)
        if like is not None:
            like["count"] += met.count
        else:
            rows.append({"link": met.link, "kind": met.kind, "count": met.count, "flows": flows})
    return rows[:limit]


def _largest(met: Contention) -> float:
    return max(flow.lost_s for flow in met.flows)


def _alike(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether the same flows met, for as long and at the same loss."""
    who = [[(flow["job"], flow["axis"], flow["op"], flow["at_once"]) for flow in flows] for flows in (some, others)]
    return who[0] == who[1] and all(
        abs(a[key] - b[key]) <= _ALIKE * max(a[key], b[key])
        for a, b in zip(some, others, strict=True)
        for key in ("seconds_together", "lost_s")
    )

"""Checks of trace files that readers rely on."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

#: Process and thread.
Track = tuple[int, int]
#: Track -> (start, end, name) of its slices, ns.
Slices = dict[Track, list[tuple[int, int, str]]]
#: Flow -> its end ("s" or "f") -> track and time, ns.
Flows = dict[int, dict[str, tuple[Track, int]]]


def trace_problems(path: str | Path) -> list[str]:
    """Return the violations of the format in a trace file.

    Fields have their types. Processes and threads have names. Slices of a track do not overlap. Each flow has one start
    and one end, not before it, and both lie on a slice of their track. It leads from a send to a receive of another
    process, a neighbour in the pipeline, and no end is that of two flows.
    """
    source = Path(path)
    content = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    problems: list[str] = []
    slices: Slices = defaultdict(list)
    flows: Flows = defaultdict(dict)
    named: set[tuple[str, int, int]] = set()
    stages: dict[int, int] = {}
    for index, event in enumerate(json.loads(content)["traceEvents"]):
        found = list(_event_problems(event, flows))
        problems += [f"event {index}: {problem}" for problem in found]
        if any("missing" in problem for problem in found):
            continue
        track, start = (event["pid"], event["tid"]), round(event["ts"] * 1000)
        if event["ph"] == "X":
            slices[track].append((start, start + round(event["dur"] * 1000), event["name"]))
        elif event["ph"] in "sf":
            flows[event["id"]][event["ph"]] = (track, start)
        elif event["ph"] == "M":
            named.add((event["name"], *track))
            if match := re.search(r"· stage (\d+)", event["args"].get("name", "")):
                stages[event["pid"]] = int(match[1])
    return [*problems, *_track_problems(slices, named), *_flow_problems(flows, slices, stages)]


def _event_problems(event: Mapping[str, Any], flows: Flows) -> Iterator[str]:
    types: dict[str, Any] = {"ph": str, "name": str, "pid": int, "tid": int, "ts": (int, float)}
    if event.get("ph") == "X":
        types |= {"dur": (int, float), "cat": str, "args": dict}
    wrong = [key for key, kind in types.items() if not isinstance(event.get(key), kind)]
    if wrong:
        yield f"{', '.join(wrong)} missing or of the wrong type"
        return
    if event["ph"] == "X":
        if event["dur"] < 0 or event["ts"] < 0:
            yield "negative time"
        if event["args"].get("stream") != event["tid"]:
            yield "args.stream is not the thread"
    elif event["ph"] in ("s", "f"):
        if event["ph"] in flows[event["id"]]:
            yield f"flow {event['id']} has two {event['ph']!r}"
    elif event["ph"] not in ("M", "C"):
        yield f"phase {event['ph']!r} is none of X, s, f, M, C"


def _track_problems(slices: Slices, named: set[tuple[str, int, int]]) -> Iterator[str]:
    """Check names and overlaps; sorts the slices of each track."""
    for (pid, tid), track in slices.items():
        if ("thread_name", pid, tid) not in named or ("process_name", pid, 0) not in named:
            yield f"track {pid}/{tid} has no name"
        track.sort()
        for before, after in pairwise(track):
            if after[0] < before[1]:
                yield f"track {pid}/{tid}: {after[2]!r} starts before {before[2]!r} has ended"


def _flow_problems(flows: Flows, slices: Slices, stages: Mapping[int, int]) -> Iterator[str]:
    """Check the ends of flows, given sorted slices and the pipeline rank of each process."""
    met: set[tuple[Track, int]] = set()
    around = max(stages.values(), default=0)
    for number, ends in flows.items():
        if set(ends) != {"s", "f"}:
            yield f"flow {number} lacks an end"
            continue
        if ends["f"][1] < ends["s"][1]:
            yield f"flow {number} ends before it starts"
        sender, receiver = (ends[end][0][0] for end in "sf")
        if sender == receiver:
            yield f"flow {number} leads from a rank to itself"
        if abs(stages.get(sender, 0) - stages.get(receiver, 0)) not in (1, around):
            yield f"flow {number} joins pipeline ranks that are no neighbours"
        for end, (track, at) in ends.items():
            if (track, at) in met:
                yield f"flow {number} shares an end with another one"
            met.add((track, at))
            # Slices are sorted and do not overlap: the last that starts by then is the one.
            last = bisect_right(slices[track], at, key=lambda piece: piece[0]) - 1
            if last >= 0 and ("Send" if end == "s" else "Recv") not in slices[track][last][2]:
                yield f"flow {number} does not lead from a send to a receive"
            if last < 0 or at > slices[track][last][1]:
                yield f"flow {number} touches no slice of track {track[0]}/{track[1]}"

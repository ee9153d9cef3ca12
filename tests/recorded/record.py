"""Record what the simulator says of every job: ``python tests/recorded/record.py``."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jobs import JOBS, ROOT, RecordedJob

VALUES = Path(__file__).with_name("values.json.gz")
#: Keys of the results, in the order of the JSON output.
PLAIN = (
    *("step_time_s", "mfu", "mfu_causal", "hfu", "model_flops_per_step", "model_flops_per_step_causal"),
    *(
        "hardware_flops_per_step",
        "time_breakdown_s",
        "params_total",
        "params_active",
    ),
    *("host_bound_fraction", "n_gpus", "n_microbatches", "tokens_per_s", "steady_period"),
)
MEMORY_PEAKS = ("peak_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "fits")
MEMORY_KINDS = (
    "stage",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "workspace",
    "peak",
    "in_flight",
)
#: What a job's record says beside, and nobody compares.
REMARKS = "not_compared"
#: Numbers differ when they are further apart, as a share of the larger.
RELATIVE = 1e-9
#: Seconds or shares that are differences of far larger numbers, and so zero to a rounding.
ABSOLUTE = 1e-12


def record(job: RecordedJob) -> dict[str, Any]:
    """Simulate ``job`` and return what is recorded of it."""
    from simulator import run

    result = run(job.workload, set=job.changes)
    report = result.to_dict()
    idle = report["idle_in_passes_fraction"]
    return {
        "bubble_fraction": idle,  # of jobs without stages too
        "bubble_ratio": idle / (1 - idle),
        **{key: report[key] for key in PLAIN},
        "communication": {
            purpose: {
                **{key: value for key, value in figures.items() if key != "links"},
                "links": _links(figures["links"]),
            }
            for purpose, figures in report["communication"].items()
        },
        "bytes_by_class_of_link": _bytes_by_class(result.spans.links),
        "memory": {
            **{key: report["memory"][key] for key in MEMORY_PEAKS},
            "per_stage": [{key: stage[key] for key in MEMORY_KINDS} for stage in report["memory"]["per_stage"]],
        },
        "rows": len(result.timeline),
        "lanes": _lanes(result.timeline),
        "ranks_simulated": report["simulation"]["ranks_simulated"],
        REMARKS: {"events": report["simulation"]["events"]},
    }


def _links(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Class of link -> how many carry something, and the bytes and seconds of the busiest."""
    return {f"{row['links']} {row['kind']}": {key: row[key] for key in ("count", "bytes", "busy_s")} for row in rows}


def _bytes_by_class(links: Any) -> dict[str, float]:
    """Class of link (name without numbers and direction, and kind) -> bytes that all links of the class carry together.

    Results tell those of the busiest link only, so that this one is read from the result's timeline.
    """
    carried: dict[str, list[float]] = {}
    for link in links:
        name = re.sub("[0-9]+", "*", link.name.partition(":")[0])
        carried.setdefault(f"{name} {link.kind}", []).append(link.nbytes * link.count)
    return {name: math.fsum(numbers) for name, numbers in sorted(carried.items())}


def _lanes(timeline: Any) -> dict[str, dict[str, Any]]:
    """Simulated rank and lane -> digests of what ran there in this order, and sums over its rows."""
    lanes = {}
    for (rank, lane), rows in timeline.groupby(["rank", "lane"], sort=True):
        steps = (rows[column].tolist() for column in ("phase", "stage", "chunk", "microbatch", "category"))
        names = (rows[column].tolist() for column in ("name", "kind"))
        lanes[f"{rank} {lane}"] = {
            "rows": len(rows),
            "order_of_steps": _digest(*steps),
            "order_of_names": _digest(*names),
            **{f"sum_of_{name}": math.fsum(rows[name]) for name in ("start_s", "end_s", "posted_s", "nbytes", "flops")},
        }
    return lanes


def _digest(*columns: list[Any]) -> str:
    text = "\n".join("|".join(map(str, row)) for row in zip(*columns, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe every value of a job's record that is no longer the same."""
    old, new = dict(_flat(before)), dict(_flat(after))
    lines = []
    for key in dict.fromkeys([*old, *new]):
        if key.startswith(f".{REMARKS}"):
            continue
        if key not in old or key not in new:
            lines.append(f"{key}: {'is new' if key in new else 'is gone'}")
        elif not _same(old[key], new[key]):
            lines.append(f"{key}: was {old[key]!r}, is {new[key]!r}")
    return lines


def _flat(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield f"{key} entries", len(value)
        for name, inner in items:
            yield from _flat(inner, f"{key}.{name}")
    else:
        yield key, value


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, int | float) and isinstance(new, int | float):
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return bool(old == new)


def read() -> dict[str, dict[str, Any]]:
    """Return the record of every job, by id."""
    values: dict[str, dict[str, Any]] = json.loads(gzip.decompress(VALUES.read_bytes()))
    return values


def write(values: Mapping[str, Any]) -> None:
    """Write ``values`` so that equal ones make equal files."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(values[name], sort_keys=True)}" for name in sorted(values))
    VALUES.write_bytes(gzip.compress(f"{{\n{lines}\n}}\n".encode(), mtime=0))


def main(names: list[str]) -> None:
    """Record the jobs that ``names`` lists, and keep the others' records; without names all of them."""
    unknown = sorted(set(names) - JOBS.keys())
    if unknown:
        raise SystemExit(f"no such job: {', '.join(unknown)}")
    kept = {name: value for name, value in read().items() if name in JOBS and name not in names} if names else {}
    write(kept | {name: record(JOBS[name]) for name in names or JOBS})


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # what is recorded is the simulator of this checkout, not an installed one
    main(sys.argv[1:])

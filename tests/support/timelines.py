"""Hand-made Timelines for tests: spans as tuples, and ideal pipelines played by the rule of what each op needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.timeline import CATEGORIES, LinkUse, SpanLabels, Template, Timeline


def template(*ops: tuple[str, str, str, float] | tuple[str, str, str, float, float], phase: str = "F") -> Template:
    """Ops as (name, kind, category, seconds[, bytes]); communication rows get the lane of their category."""
    categories = [op[2] for op in ops]
    n = len(ops)
    return Template(
        names=tuple(op[0] for op in ops),
        kinds=tuple(op[1] for op in ops),
        phases=(phase,) * n,
        lanes=tuple("compute" if c in ("compute", "recompute", "optimizer") else c for c in categories),
        category=np.array([CATEGORIES.index(c) for c in categories], dtype=np.int64),
        work_s=np.array([op[3] for op in ops], dtype=np.float64),
        launched_s=np.zeros(n),
        nbytes=np.array([op[4] if len(op) > 4 else 0.0 for op in ops], dtype=np.float64),
        flops=np.zeros(n),
    )


@dataclass
class Span:
    """One span of a hand-made Timeline; the end follows from the template where it is not given. What is posted before
    it starts waits on the compute lane for the host, elsewhere for others."""

    rank: int
    lane: str
    template: Template
    start: float
    end: float | None = None
    phase: str = "F"
    microbatch: int = -1
    stage: int = -1
    chunk: int = 0
    posted: float | None = None
    launched: float | None = None
    alloc: float = 0.0
    free: float = 0.0
    workspace: float = 0.0
    label: str = ""
    part: str = ""
    rows: tuple[Sequence[float], Sequence[float]] | None = field(default=None)


def timeline(
    spans: Iterable[Span],
    ranks_like: dict[int, int] | None = None,
    links: Sequence[LinkUse] = (),
    algorithms: dict[str, str] | None = None,
) -> Timeline:
    """Order the spans as the engine does and lay them out in columns."""
    listed = list(spans)
    templates = list({id(s.template): s.template for s in listed}.values())
    code = {id(t): i for i, t in enumerate(templates)}
    lanes = list(dict.fromkeys([*(s.lane for s in listed), *(lane for t in templates for lane in t.lanes)]))
    listed.sort(key=lambda s: (s.rank, lanes.index(s.lane), s.start))
    like = ranks_like or dict.fromkeys(sorted({s.rank for s in listed}), 1)
    ends = [s.start + float(s.template.end_s[-1]) if s.end is None else s.end for s in listed]

    def ints(values: Iterable[int]) -> np.ndarray:
        return np.array(list(values), dtype=np.int64)

    def floats(values: Iterable[float]) -> np.ndarray:
        return np.array(list(values), dtype=np.float64)

    posted = [s.start if s.posted is None else s.posted for s in listed]
    launched = [
        s.launched if s.launched is not None else s.start if s.lane == "compute" else at
        for s, at in zip(listed, posted, strict=True)
    ]
    return Timeline(
        n_ranks=sum(like.values()),
        ranks_like=like,
        lane_names=tuple(lanes),
        templates=tuple(templates),
        rank=ints(s.rank for s in listed),
        lane=ints(lanes.index(s.lane) for s in listed),
        step=ints(range(len(listed))),
        template=ints(code[id(s.template)] for s in listed),
        microbatch=ints(s.microbatch for s in listed),
        stage=ints(s.stage for s in listed),
        chunk=ints(s.chunk for s in listed),
        phase=np.array([s.phase for s in listed], dtype="U1"),
        posted_s=floats(posted),
        launched_s=floats(launched),
        start_s=floats(s.start for s in listed),
        end_s=floats(ends),
        labels=SpanLabels.written([s.label for s in listed]),
        parts=tuple(s.part for s in listed),
        alloc_bytes=floats(s.alloc for s in listed),
        free_bytes=floats(s.free for s in listed),
        workspace_bytes=floats(s.workspace for s in listed),
        stretched={
            i: (np.array(s.rows[0], dtype=np.float64), np.array(s.rows[1], dtype=np.float64))
            for i, s in enumerate(listed)
            if s.rows is not None
        },
        links=tuple(links),
        algorithms=algorithms or {},
    )


def orders(schedule: str, p: int, m: int, v: int = 1) -> list[list[tuple[str, int, int]]]:
    """(phase, chunk, micro-batch) per pipeline rank: gpipe, 1f1b, or interleaved (arXiv 2104.04473, section 2.2)."""
    if schedule == "gpipe":
        return [[("F", 0, i) for i in range(m)] + [("B", 0, i) for i in range(m)] for _ in range(p)]
    result = []
    for rank in range(p):
        total = m * v
        warm = min(total, p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p)

        def unit(phase: str, k: int) -> tuple[str, int, int]:
            chunk = (k // p) % v
            return (phase, chunk if phase == "F" else v - 1 - chunk, k // (p * v) * p + k % p if v > 1 else k)

        order = [unit("F", k) for k in range(warm)]
        for k in range(total - warm):
            order += [unit("F", warm + k), unit("B", k)]
        order += [unit("B", k) for k in range(total - warm, total)]
        result.append(order)
    return result


def pipeline(
    schedule: str,
    p: int,
    m: int,
    v: int = 1,
    *,
    f: float = 1.0,
    b: float = 2.0,
    comm: float | None = None,
    forward: Template | None = None,
    backward: Template | None = None,
    tail: Template | None = None,
    activation: float = 1.0,
) -> Timeline:
    """An ideal pipeline: each op starts when its rank is free and what it needs has arrived.

    With ``comm`` given every hand-over is a send and a receive of that length on lanes pp_send_fwd and so on.
    """
    forward = forward or template(("mlp", "matmul", "compute", f))
    backward = backward or template(("mlp.grad", "matmul", "compute", b), phase="B")
    send = template(("send", "send", "pp", comm or 0.0, 1e6), phase="C")
    recv = template(("recv", "recv", "pp", comm or 0.0, 0.0), phase="C")
    todo = orders(schedule, p, m, v)
    clock, at = [0.0] * p, [0] * p
    done: dict[tuple[str, int, int], float] = {}
    spans: list[Span] = []
    while any(at[r] < len(todo[r]) for r in range(p)):
        for rank in range(p):
            while at[rank] < len(todo[rank]):
                phase, chunk, mb = todo[rank][at[rank]]
                stage = chunk * p + rank
                step = 1 if phase == "B" else -1
                source = stage + step
                ready = 0.0
                if 0 <= source < p * v:
                    if (phase, source, mb) not in done:
                        break
                    ready = done[phase, source, mb]
                    if comm is not None:
                        way = "fwd" if phase == "F" else "bwd"
                        shared = {"start": ready, "phase": "C", "microbatch": mb}
                        spans.append(Span(source % p, f"pp_send_{way}", send, stage=source, **shared))
                        spans.append(Span(rank, f"pp_recv_{way}", recv, stage=source, posted=0.0, **shared))
                        ready += comm
                elif phase == "B" and ("F", stage, mb) not in done:
                    break
                ops = forward if phase == "F" else backward
                start = max(clock[rank], ready)
                held = {"alloc": activation} if phase == "F" else {"free": activation}
                spans.append(
                    Span(
                        rank,
                        "compute",
                        ops,
                        start,
                        phase=phase,
                        microbatch=mb,
                        stage=stage,
                        chunk=chunk,
                        label=f"{stage}{phase}{mb}",
                        **held,
                    )
                )
                clock[rank] = start + float(ops.end_s[-1])
                done[phase, stage, mb] = clock[rank]
                at[rank] += 1
    if tail is not None:
        end = max(clock)
        spans += [Span(rank, "compute", tail, end, phase="O", stage=rank) for rank in range(p)]
    return timeline(spans)

"""Kernels of every GPU, simulated or measured, in one form; and the figures that are read from them.

Both sides go through the same functions, so that a difference between them is one of the runs. A communication begins
when its stream has come to it and its host has launched it. So a profiler sees NCCL's kernels, which spin until the
other ranks are there. Waiting, and the transfer that follows it, are told apart where they can be.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from calibration.compare.meetings import Meetings, moving_s
from calibration.exposed import exposed_s
from calibration.text import read_packed
from calibration.train.record import COLUMNS
from simulator.arrays import Floats, Ints
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.program import PointToPoint, PointToPointKind, comms_of
from simulator.step_result import StepResult
from simulator.timeline import Timeline, covered_s
from simulator.timeline.rows import TimelineRows
from simulator.traces.classes import CLASSES, with_hand_over
from simulator.traces.simulated import categories, class_codes

#: What the seconds of communication consist of: class -> its transfers, what it waits for them.
PARTS = {"communication": ("transfer", "waiting"), "hand-over": ("hand-over transfer", "hand-over waiting")}
_COMMUNICATION = [CLASSES.index("communication"), CLASSES.index("hand-over")]
#: Share of a run's communication that may stay untold: a kernel or two whose group is not the one of their kind.
UNTOLD = 0.01
_OPTIMIZER = CLASSES.index("optimizer")


@dataclass(frozen=True)
class KernelColumns:
    """Columns, one entry per kernel: ``rank``; ``code``, which indexes `CLASSES`; ``kind`` of communication (tp, cp,
    ep, pp, dp), else empty; ``start_s``, ``end_s``, from the first start of any rank; ``moves_s``, ``done_s``, from
    when to when bytes of a communication move between all of its ranks, nan where that is not known. ``posts_late``:
    receives stand for ones that are posted as their bytes come, so that what they wait means nothing."""

    rank: Ints
    code: Ints
    kind: NDArray[np.object_]
    start_s: Floats
    end_s: Floats
    moves_s: Floats
    done_s: Floats
    posts_late: bool = False

    def seconds(self, n_ranks: int) -> dict[str, tuple[float, ...]]:
        """Return by class the seconds of all its kernels, of each rank."""
        length = self.end_s - self.start_s
        return {name: self._by_rank(length, self.code == code, n_ranks) for code, name in enumerate(CLASSES)}

    def parts(self, n_ranks: int) -> dict[str, tuple[float, ...] | None]:
        """Seconds of transfers and of waiting (`PARTS`), of each rank; None where more than `UNTOLD` of the seconds of
        all cannot be told apart."""
        seconds: dict[str, tuple[float, ...] | None] = {}
        for name, (transfer, waiting) in PARTS.items():
            mine = self.code == CLASSES.index(name)
            told, length = mine & ~np.isnan(self.moves_s), self.end_s - self.start_s
            whole = length[mine & ~told].sum() <= UNTOLD * length[mine].sum()
            seconds[transfer] = self._by_rank(self.done_s - self.moves_s, told, n_ranks) if whole else None
            late = self.posts_late and name == "hand-over"
            seconds[waiting] = self._by_rank(self.moves_s - self.start_s, told, n_ranks) if whole and not late else None
        return seconds

    def _by_rank(self, seconds: Floats, chosen: NDArray[np.bool_], n_ranks: int) -> tuple[float, ...]:
        return tuple(np.bincount(self.rank[chosen], weights=seconds[chosen], minlength=n_ranks).tolist())

    def exposed_s(self, n_ranks: int) -> float:
        """Seconds in which communication runs and no other kernel does, mean over ranks; hand-overs and what they wait
        for included."""
        communicates, ranks = np.isin(self.code, _COMMUNICATION), [self.rank == rank for rank in range(n_ranks)]
        return sum(exposed_s(self.start_s[mine], self.end_s[mine], communicates[mine]) for mine in ranks) / n_ranks

    def bubble(self, pipelines: Sequence[Sequence[int]]) -> float | None:
        """Return the idle share of ranks x window; None without pipelines.

        Work is kernels that are neither optimizer nor communication nor copy. A pipeline's window is from the first
        to the last work of any of its ranks. Busy are work, and communication of tp, cp and ep.
        """
        idle = total = 0.0
        work = ~np.isin(self.code, [*_COMMUNICATION, _OPTIMIZER, CLASSES.index("copy")])
        busy = work | np.isin(self.kind, ("tp", "cp", "ep"))
        for pipeline in pipelines:
            working = work & np.isin(self.rank, pipeline)
            if len(pipeline) < 2 or not working.any():
                continue
            opens, closes = self.start_s[working].min(), self.end_s[working].max()
            for rank in pipeline:
                mine = busy & (self.rank == rank)
                start, end = np.clip(self.start_s[mine], opens, closes), np.clip(self.end_s[mine], opens, closes)
                idle += (closes - opens) - covered_s(start, end)
                total += closes - opens
        return idle / total if total else None


def _resident_s(timeline: Timeline, rows: TimelineRows) -> Floats:
    """Return when the kernel of each row would have begun, were it one of communication.

    A communication is on the GPU since its stream came to it and its host had launched it. Communication in line with
    kernels is there from its start, as sends are, whose kernels do not wait for the other rank (`Comm.spins`).
    """
    start = rows["start_s"].astype(np.float64)
    launched = timeline.launched_s[rows["span"].astype(np.int64)]
    resident = np.maximum(rows["posted_s"].astype(np.float64), np.minimum(launched, start))
    return np.where(rows["kind"] == PointToPointKind.SEND, start, resident)


def simulated_kernels(result: StepResult) -> KernelColumns:
    """Return the kernels of every rank of the job, also of ranks that another one is simulated for."""
    spans = result.spans.select_ranks(range(result.spans.n_ranks))
    rows = spans.rows()
    code = class_codes(rows)
    moves = np.isin(code, _COMMUNICATION)
    start, rank = rows["start_s"].astype(np.float64), rows["rank"].astype(np.int64)
    resident = _resident_s(spans, rows)
    end, gap = rows["end_s"].astype(np.float64), np.array([_gap_s(gpu, result) for gpu in result.gpus])[rank]
    return KernelColumns(
        rank=rank,
        code=code,
        kind=np.where(moves, categories(rows), ""),
        start_s=np.where(moves, resident, start),
        end_s=np.where(code < CLASSES.index("communication"), np.maximum(end - gap, start), end),
        moves_s=np.where(moves, start, np.nan),
        done_s=np.where(moves, end, np.nan),
        posts_late=any(
            isinstance(comm, PointToPoint) and comm.as_it_comes
            for role in result.program.roles
            for _, _, step in role.steps()
            for comm in comms_of(step.op)
        ),
    )


def _gap_s(gpu: str, result: StepResult) -> float:
    """Return the seconds of a kernel's price that a profiler sees as the gap until the next kernel."""
    gap = result.profiles[gpu].kernels.gap_s
    return gap.value if gap else 0.0


def measured_kernels(path: Path, meeting: Meetings) -> KernelColumns:
    """Return the kernels of a ``timeline.csv.gz`` that `python -m calibration train` wrote.

    ``meeting``: which ranks meet in it. Raises `InputError`.
    """
    try:
        frame = pd.read_csv(io.StringIO(read_packed(path)), keep_default_na=False)
    except ValueError as problem:
        raise InputError(f"is no table: {problem}", file=path) from None
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise InputError("lacks columns", file=path, found=", ".join(frame.columns), allowed=", ".join(COLUMNS))
    numbers = {name: pd.to_numeric(frame[name], errors="coerce") for name in ("rank", "start_s", "end_s")}
    known_class = [name for name in CLASSES if name != "hand-over"]
    rank, start, end = numbers.values()
    wrong = {
        "rank": ~((rank >= 0) & (rank % 1 == 0)),
        "class": ~frame["class"].isin(known_class),
        "start_s": ~(np.isfinite(start) & (start >= 0)),
        "end_s": ~(np.isfinite(end) & (end >= start)),
    }
    allowed = {"rank": "0, 1, ..", "class": ", ".join(known_class), "start_s": ">= 0", "end_s": ">= start_s"}
    for column, bad in wrong.items():
        if bad.any():
            line = int(bad.to_numpy().argmax())
            value = brief(str(frame[column].iloc[line]))
            raise InputError(f"line {line + 2}", file=path, key=column, found=value, allowed=allowed[column])
    frame = frame.assign(rank=rank.astype(np.int64), start_s=start, end_s=end)
    kind, name = frame["kind"].to_numpy(object), frame["class"].to_numpy(object)
    moves, done = moving_s(frame, meeting)
    return KernelColumns(
        rank=frame["rank"].to_numpy(np.int64),
        code=np.array([CLASSES.index(with_hand_over(*pair)) for pair in zip(name, kind, strict=True)], dtype=np.int64),
        kind=kind,
        start_s=frame["start_s"].to_numpy(np.float64),
        end_s=frame["end_s"].to_numpy(np.float64),
        moves_s=moves,
        done_s=done,
    )


def binned(kernels: KernelColumns, rank: int, codes: Any, edges: Floats) -> Floats:
    """Share of every bin between neighbouring ``edges`` in which a kernel of each of ``codes`` runs: codes x bins."""
    shares = np.zeros((len(codes), len(edges) - 1))
    for row, code in enumerate(codes):
        mine = (kernels.rank == rank) & (kernels.code == code)
        at = np.clip(np.stack((kernels.start_s[mine], kernels.end_s[mine])), edges[0], edges[-1])
        # The running integral of "how many run", at the edges: its differences are seconds in each bin.
        until = [np.sort(side) for side in at]
        total = [np.concatenate(([0.0], np.cumsum(side))) for side in until]
        count = [np.searchsorted(side, edges) for side in until]
        ran = [edges * n - sums[n] for n, sums in zip(count, total, strict=True)]
        shares[row] = np.diff(ran[0] - ran[1]) / np.diff(edges)
    return np.clip(shares, 0.0, 1.0)

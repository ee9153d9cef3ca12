"""Traces of jobs by whole passes and collectives, as ByteDance has released them, of all ranks and many steps.

Format: ``readme.md`` of ByteDance-Seed/StragglerAnalysis, the artifact of "Understanding Stragglers in Large Model
Training Using What-if Analysis" (Lin et al., OSDI 2025; arXiv 2505.05713). A row of its Parquet files is an operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from simulator.arrays import Floats
from simulator.errors import InputError, install_extra
from simulator.hardware.kernels import Direction
from simulator.input_files import as_path, files_read

if TYPE_CHECKING:
    import pandas as pd

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, SCATTER, CLIP, EMBEDDING = (
    "params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad", "embedding-grads-all-reduce",
)  # fmt: skip
#: Ends of hand-overs: kind -> its direction, and whether it sends.
HAND_OVERS: dict[str, tuple[Direction, bool]] = {
    "forward-send": ("forward", True),
    "backward-send": ("backward", True),
    "forward-recv": ("forward", False),
    "backward-recv": ("backward", False),
}
#: Operations behind the last backward pass, in their order; ``gc`` is Python's search for garbage.
_ENDING = ("gc", "layernorm-grads-all-reduce", EMBEDDING, SCATTER, CLIP, "optimizer")
KINDS = (FORWARD, BACKWARD, *HAND_OVERS, GATHER, *_ENDING)
#: Kinds that are communication, whatever they wait for.
COMMUNICATION = (*HAND_OVERS, GATHER, SCATTER, EMBEDDING, CLIP, "layernorm-grads-all-reduce")
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "seq_id", "mc")
#: Columns that tables of simulated steps have.
_OF_TIMELINES = frozenset(("rank", "lane", "posted_s", "start_s", "end_s"))

#: Ranks that meet in an operation: two ends of a hand-over, all replicas of a stage, the first and the last stage of a
#: replica, or all ranks.
MeetingRanks = Literal["pair", "stage", "ends", "all"]


@dataclass(frozen=True, slots=True)
class JobMeeting:
    """An operation of several ranks: the ``number``-th of a ``name``, which is a direction of hand-overs or a kind.

    ``first_stage``: the lower stage of a pair, or the stage whose replicas meet; 0 for other ranks.
    """

    ranks: MeetingRanks
    name: str
    number: int
    first_stage: int = 0


@dataclass(frozen=True, slots=True)
class JobOp:
    """An operation of a stage, the same in every step and replica.

    ``lane`` is its stream; ``after`` are the indices of ops of the stage that it follows, that of its lane before it
    among them. ``meeting``: the operation of several ranks to which it belongs; None where a rank meets nobody.
    """

    stage: int
    kind: str
    number: int
    lane: str
    after: tuple[int, ...]
    meeting: JobMeeting | None


@dataclass(frozen=True, eq=False)
class JobTrace:
    """A job of pipelines side by side. ``start_s`` and ``end_s`` are indexed by step, replica and op.

    ``steps`` are the numbers of the recorded steps. ``first_s`` is when each begins.
    """

    file: str
    stages: int
    replicas: int
    steps: tuple[int, ...]
    ops: tuple[JobOp, ...]
    start_s: Floats
    end_s: Floats

    @property
    def first_s(self) -> Floats:
        """The start of each step."""
        return np.asarray(self.start_s.min(axis=(1, 2)))

    @property
    def step_s(self) -> Floats:
        """The length of each step: from its first start to its last end."""
        return np.asarray(self.end_s.max(axis=(1, 2)) - self.first_s)


def read_job_trace(text: str) -> JobTrace:
    """Return the trace in a Parquet file. Raises `InputError` where it is none, or of an unknown kind of job."""
    path = as_path(text)
    rows = _rows(path)
    if rows["mc"].max() > 0 or not set(rows["optype"]) <= set(KINDS):
        strange = sorted({*rows["optype"]} - {*KINDS})
        raise InputError(
            "has operations that are not known: several chunks per rank, or reductions beside backward passes",
            file=path,
            found=", ".join(strange) or "chunks",
            allowed=", ".join(KINDS),
        )
    stages, replicas = int(rows["stage"].max()) + 1, int(rows["dp_rank"].max()) + 1
    steps = tuple(sorted({int(step) for step in rows["step"]}))
    first = rows[(rows["dp_rank"] == 0) & (rows["step"] == steps[0])]
    ops = tuple(op for stage in range(stages) for op in _stage_ops(path, first, stage, stages))
    shape = len(steps), replicas, len(ops)
    if len(rows) != np.prod(shape):
        raise InputError("has steps or ranks that lack operations", file=path, found=f"{len(rows):,} operations")
    place = {(op.stage, op.kind, op.number): at for at, op in enumerate(ops)}
    step_at = {step: at for at, step in enumerate(steps)}
    keys = zip(rows["stage"].tolist(), rows["optype"].tolist(), rows["seq_id"].tolist(), strict=True)
    op = np.array([place.get((int(stage), kind, int(number)), -1) for stage, kind, number in keys])
    start, end = np.full(shape, np.nan), np.full(shape, np.nan)
    at = np.array([step_at[int(step)] for step in rows["step"]]), rows["dp_rank"].to_numpy(np.int64), op
    start[at] = rows["start_ts"].to_numpy(np.float64)
    end[at] = start[at] + rows["duration"].to_numpy(np.float64)
    if (op < 0).any() or np.isnan(start).any():
        raise InputError("has steps or ranks with other operations than the first ones", file=path)
    return JobTrace(str(path), stages, replicas, steps, ops, start, end)


def _rows(path: Path) -> pd.DataFrame:
    """Return the rows of the file, with their times and numbers checked. Raises `InputError`."""
    import pandas as pd

    try:
        rows = pd.read_parquet(path)
    except ImportError:
        raise InputError(
            "needs pyarrow to be read",
            file=path,
            fix=install_extra("parquet"),
        ) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or 'it is no Parquet file'}", file=path) from None
    except ValueError:  # pyarrow.ArrowInvalid
        raise InputError("cannot be read: it is no Parquet file", file=path) from None
    files_read.add(path.resolve())
    if {*rows.columns} >= _OF_TIMELINES:
        message = "is the timeline of one step, as run --timeline writes it, and no job of many steps"
        raise InputError(message, file=path, fix="llmsim run WORKLOAD --trace-dir DIR, then llmsim trace show DIR")
    if missing := [name for name in COLUMNS if name not in rows]:
        raise InputError(
            f"lacks columns: {', '.join(missing)}",
            file=path,
            found=", ".join(map(str, rows.columns)),
            allowed=f"a table with {', '.join(COLUMNS)}",
        )
    if rows.empty:
        raise InputError("is empty", file=path)
    for name in COLUMNS:
        if name != "optype":
            rows[name] = pd.to_numeric(rows[name], errors="coerce")
            usable = np.isfinite(rows[name].to_numpy(np.float64))
            if not usable.all():
                raise InputError(f"row {int(usable.argmin())}: no number", file=path, key=name)
    if (rows[["dp_rank", "stage", "seq_id", "duration"]] < 0).any(axis=None) or rows["start_ts"].abs().max() > 1e12:
        raise InputError("has negative numbers, or times that no clock shows", file=path)
    return rows.assign(optype=rows["optype"].astype(str))


def _stage_ops(path: Path, first: pd.DataFrame, stage: int, stages: int) -> Iterator[JobOp]:
    """Yield the ops of a stage with what they follow; indices in ``after`` count from the stage's first op."""
    mine = first[first["stage"] == stage].sort_values(["start_ts", "seq_id", "optype"])
    kinds, numbers = mine["optype"].tolist(), [int(number) for number in mine["seq_id"]]
    order = list(zip(kinds, numbers, strict=True))
    compute = [op for op in order if op[0] in (FORWARD, BACKWARD)]
    if not compute:
        raise InputError("has a stage without passes", file=path, found=f"stage {stage}")
    after: dict[tuple[str, int], list[tuple[str, int]]] = {op: [] for op in order}
    ending = [op for kind in _ENDING for op in order if op[0] == kind]
    lanes = {"compute": compute, "end": ending, GATHER: [op for op in order if op[0] == GATHER]}
    lanes |= {kind: sorted(op for op in order if op[0] == kind) for kind in HAND_OVERS}
    for lane in lanes.values():
        for before, op in pairwise(lane):
            after[op].append(before)
    if ending:
        after[ending[0]].append(compute[-1])
    if lanes[GATHER]:
        after[next(op for op in compute if op[0] == FORWARD)].append(lanes[GATHER][-1])
    _add_hand_overs(after, compute)
    lane_of = {op: lane for lane, ops in lanes.items() for op in ops}
    index = {op: at for at, op in enumerate(order)}
    for op in order:
        yield JobOp(stage, *op, lane_of[op], tuple(index[other] for other in after[op]), _meeting(*op, stage))


def _add_hand_overs(after: dict[tuple[str, int], list[tuple[str, int]]], compute: Sequence[tuple[str, int]]) -> None:
    """Add what hand-overs follow, and what follows them.

    A receive is posted when the pass before the one that needs it has ended, and a send when its pass has. The first
    transfers of gradients are posted behind the last forward pass but one of the warm-up.
    """
    for direction, kind in (("forward", FORWARD), ("backward", BACKWARD)):
        for number in [number for name, number in compute if name == kind]:
            send, receive = (f"{direction}-send", number), (f"{direction}-recv", number)
            if send in after:
                after[send].append((kind, number))
            if receive in after:
                after[(kind, number)].append(receive)
                if number:
                    after[receive].append((kind, number - 1))
    first = next((at for at, (kind, _) in enumerate(compute) if kind == BACKWARD), 0)
    if first >= 2:
        for transfer in (("backward-recv", 0), ("backward-send", 0)):
            if transfer in after:
                after[transfer].append(compute[first - 2])


def _meeting(kind: str, number: int, stage: int) -> JobMeeting | None:
    """Return the meeting to which an op belongs; None where a rank meets nobody."""
    if kind in HAND_OVERS:
        direction, sends = HAND_OVERS[kind]
        # Activations go to the next stage, gradients to the one before.
        lower = stage if (direction == "forward") == sends else stage - 1
        return JobMeeting("pair", direction, number, lower)
    if kind in (GATHER, SCATTER):
        return JobMeeting("stage", kind, number, stage)
    ranks: dict[str, MeetingRanks] = {EMBEDDING: "ends", CLIP: "all"}
    return JobMeeting(ranks[kind], kind, number) if kind in ranks else None

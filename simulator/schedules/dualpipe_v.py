"""DualPipeV: DualPipe folded in half. Two chunks per rank in a V; forward and backward passes overlap in pairs."""

from simulator.schedules.actions import Action, Order, Schedule, Slot, in_a_v, two_chunks


def order(p: int, m: int, v: int = 2) -> Order:
    """Per rank the eight phases of DeepSeek's and torch's ScheduleDualPipeV."""
    return [
        [
            tuple(Action(rank if chunk == 0 else 2 * p - 1 - rank, kind, mb) for chunk, kind, mb in slot)
            for slot in slots
        ]
        for rank, slots in enumerate(phases(rank, p, m) for rank in range(p))
    ]


def phases(rank: int, p: int, m: int) -> list[Slot]:
    """A rank's slots with chunk 0 or 1 in place of the stage; two in a slot are a forward and a backward overlapped."""
    left = p - rank - 1
    # From the middle of the drain on backwards are split, on odd ranks both chunks at once, on even ones chunk 0 first.
    middle = (rank + 1) // 2
    drain = ["1B" if n < middle + (rank % 2 == 0) else "1I" for n in range(rank + 1)]
    last = ["0B" if n < middle else "0I" for n in range(rank + 1)]
    text = ["0F"] * (2 * left)
    text += ["0F", "1F"] * (rank + 1)
    text += ["1I", "W", "1F"] * left
    text += (["0F", "1B"] if left == 0 else ["0F1B"]) + ["1F0B"]
    text += ["0F1B", "1F0B"] * (m - 2 * p + rank)
    text += ["1B", "1F0B"] * left
    text += [step for pair in zip(drain, last, strict=True) for step in pair]
    text += ["W", "0I"] * left
    text += ["W"] * (rank + 1)
    return _numbered(text)


def _numbered(text: list[str]) -> list[Slot]:
    """Micro-batches count up per chunk and direction; W takes the oldest input gradient that has none."""
    counts: dict[tuple[int, bool], int] = {}
    pending: list[tuple[int, int]] = []
    slots: list[Slot] = []
    for step in text:
        if step == "W":
            if pending:
                chunk, microbatch = pending.pop(0)
                slots.append((Action(chunk, "W", microbatch),))
            continue
        slot = []
        for chunk, kind in ((int(a), b) for a, b in zip(step[::2], step[1::2], strict=True)):
            key = (chunk, kind == "F")
            microbatch = counts[key] = counts.get(key, -1) + 1
            slot.append(Action(chunk, kind, microbatch))
            if kind == "I":
                pending.append((chunk, microbatch))
        slots.append(tuple(slot))
    return slots


def idle(n_stages: int, f: float, i: float, w: float) -> float:
    """(PP/2 - 1)(F&B + B - 3W) of DeepSeek's table with F&B = F + B, PP stages."""
    return (n_stages / 2 - 1) * max(f + 2 * (i + w) - 3 * w, 0.0)


def check(p: int, m: int, v: int) -> str | None:
    """Two chunks, and an even number of micro-batches, as many as stages at least."""
    if m < 2 * p or m % 2:
        return f"needs an even number of at least {2 * p} micro-batches (2 pp), got {m}"
    return two_chunks(p, m, v)


SCHEDULE = Schedule(
    name="dualpipe_v",
    paper="DeepSeek-AI, github.com/deepseek-ai/DualPipe; torch.distributed.pipelining ScheduleDualPipeV",
    order=order,
    bubble=lambda p, m, v, f, i, w: idle(2 * p, f, i, w) / (2 * m * (f + i + w)),
    peak=lambda p, m, v, rank: 2 * p + 1,
    check=check,
    rank_of=in_a_v,
    posts_ahead=True,
    chunks=2,
    splits=True,
    joined=True,
)

"""ZB-H1: 1F1B whose weight gradients fill the drain of the pipeline; no more memory than 1F1B."""

from simulator.schedules.actions import Action, Order, Schedule, one_chunk


def order(p: int, m: int, v: int = 1) -> Order:
    """As 1F1B with I for B; W follows r micro-batches behind on rank r, so that no rank holds more than p."""
    return [split_order([Action(rank, "F", mb) for mb in range(m)],
                        [Action(rank, "I", mb) for mb in range(m)],
                        warmup=min(p - rank - 1, m), lag=rank) for rank in range(p)]  # fmt: skip


def split_order(
    forwards: list[Action], backwards: list[Action], *, warmup: int, lag: int
) -> list[tuple[Action, ...]]:
    """``warmup`` forwards, then F and I in turn, then the I left; each I but the first ``lag`` is followed by the
    oldest W, and what W are left come last."""
    actions = forwards[:warmup]
    weights = [Action(stage, "W", microbatch) for stage, _, microbatch in backwards]
    for index, backward in enumerate(backwards):
        actions += [*forwards[warmup + index : warmup + index + 1], backward]
        if index >= lag:
            actions.append(weights[index - lag])
    actions += weights[max(len(backwards) - lag, 0) :]
    return [(action,) for action in actions]


def bubble(p: int, m: int, v: int, f: float, i: float, w: float) -> float | None:
    """(p - 1)(F + I - W) of table 1; (p - 1) / 3m where F = I = W."""
    return (p - 1) * (f + i - w) / (m * (f + i + w)) if m >= p and f == i == w else None


SCHEDULE = Schedule(
    name="zb_h1",
    paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1",
    order=order,
    bubble=bubble,
    peak=lambda p, m, v, rank: min(m, p),
    check=one_chunk,
    splits=True,
)

"""ZB-H1: 1F1B whose weight gradients fill the drain of the pipeline; no more memory than 1F1B."""

from simulator.schedules.actions import Action, Order, Schedule, Slot, one_chunk


def order(p: int, m: int, v: int = 1) -> Order:
    """Run 1F1B with I for B; W follows r micro-batches behind on rank r, so that no rank holds more than p."""
    return [
        split_order(
            [Action(rank, "F", mb) for mb in range(m)],
            [Action(rank, "I", mb) for mb in range(m)],
            warmup=min(p - rank - 1, m),
            lag=rank,
        )
        for rank in range(p)
    ]


def split_order(forwards: list[Action], backwards: list[Action], *, warmup: int, lag: int) -> list[Slot]:
    """Return ``warmup`` forwards, then F and I in turn, then the I left.

    Each I but the first ``lag`` is followed by the oldest W. The W left come last."""
    actions = forwards[:warmup]
    weights = [backward._replace(kind="W") for backward in backwards]
    for index, backward in enumerate(backwards):
        actions += [*forwards[warmup + index : warmup + index + 1], backward]
        if index >= lag:
            actions.append(weights[index - lag])
    actions += weights[max(len(backwards) - lag, 0) :]
    return [(action,) for action in actions]


def bubble(p: int, m: int, v: int, f: float, i: float, w: float) -> float | None:
    """Idle (p - 1)(F + I - W), chunks of 1/v each; (p - 1) / 3 v m where F = I = W."""
    return (p - 1) * max(f + i - w, 0.0) / (v * m * (f + i + w)) if m >= p else None


SCHEDULE = Schedule(
    name="zb_h1",
    paper="Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.1",
    order=order,
    bubble=bubble,
    peak=lambda p, m, v, rank: min(m, p),
    check=one_chunk,
    splits=True,
)

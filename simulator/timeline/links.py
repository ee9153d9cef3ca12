"""What links carried, and who met on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class LinkUse:
    """One (class of) link: ``count`` equal links, each of which carried ``nbytes`` through ``capacity_Bps``.

    ``leaves_gpu``: it is the first hop of what a GPU sends. ``by_purpose``: its bytes, by what they were for.
    """

    name: str
    kind: str
    count: int
    nbytes: float
    capacity_Bps: float
    leaves_gpu: bool = False
    by_purpose: Mapping[str, float] = field(default_factory=dict)

    def per(self, steps: int) -> LinkUse:
        """What it carried in each of ``steps`` equal steps."""
        by_purpose = {purpose: nbytes / steps for purpose, nbytes in self.by_purpose.items()}
        return replace(self, nbytes=self.nbytes / steps, by_purpose=by_purpose)


@dataclass(frozen=True)
class Meeting:
    """Transfers of one kind on a link while it was full and held somebody up.

    Whose they are: ``job`` (empty: nobody's, background traffic), the ``axis`` of their groups, what they do.
    ``at_once``: the most of them that crossed it together. ``seconds``: for how long any of them met others, or each
    other, there. ``lost_s``: how much longer one of them took in that time than without others, where this link was
    what held it up; the mean of those that were there at once.
    """

    job: str
    axis: str
    op: str
    at_once: float
    seconds: float
    lost_s: float


@dataclass(frozen=True)
class Contention:
    """Who met on one (class of) link, ``count`` equal ones. A transfer that several links held up alike lost the same
    time on each of them."""

    link: str
    kind: str
    count: int
    flows: tuple[Meeting, ...]

    def per(self, steps: int) -> Contention:
        """What was lost in each of ``steps`` equal steps."""
        return replace(
            self,
            flows=tuple(replace(flow, seconds=flow.seconds / steps, lost_s=flow.lost_s / steps) for flow in self.flows),
        )

"""Use of links, and contention on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class LinkUse:
    """Bytes that one link, or each of ``count`` equal ones, carried.

    ``nbytes``: bytes through each of them. ``capacity_Bps``: bytes/s of each. ``leaves_gpu``: the link is the first hop
    from a GPU. ``by_purpose``: purpose of communication -> bytes. ``index``: number in the cluster of the first of the
    ``count``, which decides where links tie.
    """

    name: str
    kind: str
    count: int
    nbytes: float
    capacity_Bps: float
    leaves_gpu: bool = False
    by_purpose: Mapping[str, float] = field(default_factory=dict)
    index: int = 0

    def per_step(self, steps: int) -> LinkUse:
        """Return the use of the link in each of ``steps`` equal steps."""
        by_purpose = {purpose: nbytes / steps for purpose, nbytes in self.by_purpose.items()}
        return replace(self, nbytes=self.nbytes / steps, by_purpose=by_purpose)


@dataclass(frozen=True)
class Contender:
    """Transfers of one kind that shared a full link with others.

    ``job``: name of their job; empty for background traffic. ``axis``: axis of their groups. ``op``: their operation.
    ``at_once``: the most of them on the link at one time. ``seconds``: time in which any of them shared the link.
    ``lost_s``: extra time of one transfer where this link was its bottleneck, mean over those on the link at once.
    """

    job: str
    axis: str
    op: str
    at_once: float
    seconds: float
    lost_s: float


@dataclass(frozen=True)
class Contention:
    """Contenders for one link, or for each of ``count`` equal ones.

    A transfer with several equal bottlenecks lost the same time on each of them. ``index``: see `LinkUse`.
    """

    link: str
    kind: str
    count: int
    flows: tuple[Contender, ...]
    index: int = 0

    def per_step(self, steps: int) -> Contention:
        """Return the contention in each of ``steps`` equal steps."""
        return replace(
            self,
            flows=tuple(replace(flow, seconds=flow.seconds / steps, lost_s=flow.lost_s / steps) for flow in self.flows),
        )

"""The section ``background`` of a cluster file: traffic of others that takes its share of links all the time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Le

from simulator.bounds import Fraction, Text


@dataclass(frozen=True, kw_only=True)
class TrafficBetween:
    """A flow from one end of the cluster to another."""

    from_: Text
    """where it comes from: a network card or GPU, such as node0.nic0"""
    to: Text
    """where it goes to: another of the same kind, on another node"""
    bandwidth_Bps: Annotated[float, Gt(0), Le(1e18)]
    """bytes/s that it would move on an idle network; less where its fair share is less"""


@dataclass(frozen=True, kw_only=True)
class TrafficOnLink:
    """A flow that crosses one link."""

    link: Text
    """name of a link, such as node3.nic2:tx; without :tx or :rx both ways; * stands for any characters but . and :, as
    in node3.nic*, and then every such link has a flow of its own"""
    share: Fraction
    """what it would take of the link's bandwidth; less where its fair share is less"""


BackgroundTraffic = TrafficBetween | TrafficOnLink

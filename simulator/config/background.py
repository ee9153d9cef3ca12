"""Traffic of others on a cluster: what takes its share of links all the time."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Discriminator, Field, Tag

from simulator.config.section import Section, Text, likeliest


class Flow(Section):
    """A flow from one end of the cluster to another."""

    model_config = ConfigDict(serialize_by_alias=True)

    source: Text = Field(alias="from")
    """where it comes from: a network card or GPU, such as node0.nic0"""
    to: Text
    """where it goes to: another of the same kind, on another node"""
    bandwidth_Bps: float = Field(gt=0, le=1e18)
    """bytes/s that it would move on an idle network; less where its fair share is less"""


class LinkLoad(Section):
    """A flow that crosses one link."""

    link: Text
    """name of a link, such as node3.nic2:tx; without :tx or :rx both ways; * stands for any characters but . and :, as
    in node3.nic*, and then every such link has a flow of its own"""
    share: float = Field(gt=0, le=1)
    """what it would take of the link's bandwidth; less where its fair share is less"""


Background = Annotated[
    Annotated[Flow, Tag("Flow")] | Annotated[LinkLoad, Tag("LinkLoad")],
    Discriminator(lambda value: likeliest(value, Flow, LinkLoad)),
]

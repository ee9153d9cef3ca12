"""The result of a simulation: what ran where and when, and what links carried."""

from simulator.timeline.links import Contention, LinkUse, Meeting
from simulator.timeline.template import (
    CATEGORIES,
    COMMUNICATION,
    FIRST_COMMUNICATION,
    Floats,
    Ints,
    Template,
    covered_s,
    play,
)
from simulator.timeline.timeline import Timeline

__all__ = [
    "CATEGORIES",
    "COMMUNICATION",
    "FIRST_COMMUNICATION",
    "Contention",
    "Floats",
    "Ints",
    "LinkUse",
    "Meeting",
    "Template",
    "Timeline",
    "covered_s",
    "play",
]

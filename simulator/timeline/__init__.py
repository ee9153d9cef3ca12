"""Timelines: what ran where and when, and what links carried."""

from simulator.timeline.links import Contender, Contention, LinkUse
from simulator.timeline.span_labels import SpanLabels
from simulator.timeline.template import CATEGORIES, COMMUNICATION, FIRST_COMMUNICATION, Template, covered_s, play
from simulator.timeline.timeline import Timeline

__all__ = [
    "CATEGORIES",
    "COMMUNICATION",
    "FIRST_COMMUNICATION",
    "Contender",
    "Contention",
    "LinkUse",
    "SpanLabels",
    "Template",
    "Timeline",
    "covered_s",
    "play",
]

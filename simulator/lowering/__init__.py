"""Lowering: a workload becomes a program."""

from simulator.lowering.layout import Layout, layout
from simulator.lowering.program import build_program
from simulator.lowering.schedule_alone import schedule_program
from simulator.lowering.shortening import PipelineSize, ShortenedStep, shortened, shortened_order

__all__ = [
    "Layout",
    "PipelineSize",
    "ShortenedStep",
    "build_program",
    "layout",
    "schedule_program",
    "shortened",
    "shortened_order",
]

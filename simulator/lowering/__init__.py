"""Lowering: a workload becomes a program."""

from simulator.lowering.layout import Layout, layout
from simulator.lowering.program import build_program
from simulator.lowering.schedule_alone import schedule_program

__all__ = ["Layout", "build_program", "layout", "schedule_program"]

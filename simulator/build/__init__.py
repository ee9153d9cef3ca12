"""From a workload to a program: layout, pipeline, gradients, optimizer."""

from simulator.build.layout import Layout, layout
from simulator.build.program import build_program
from simulator.build.schedule import schedule_program

__all__ = ["Layout", "build_program", "layout", "schedule_program"]

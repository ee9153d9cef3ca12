"""Published measurements, and how far predictions are from them."""

from simulator.validation.evaluate import Outcome, evaluate, summarise
from simulator.validation.rows import read_rows
from simulator.validation.suites import SUITES, Bounds, Suite

__all__ = ["SUITES", "Bounds", "Outcome", "Suite", "evaluate", "read_rows", "summarise"]

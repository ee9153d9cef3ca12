"""Published measurements, and how far predictions are from them."""

from simulator.validation.evaluate import STEP_TIME, Outcome, Quantity, evaluate, summarise
from simulator.validation.rows import read_rows
from simulator.validation.suite import Bounds, Suite
from simulator.validation.suites import SUITES

__all__ = ["STEP_TIME", "SUITES", "Bounds", "Outcome", "Quantity", "Suite", "evaluate", "read_rows", "summarise"]

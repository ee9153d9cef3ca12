"""What holds for all tests."""

import gc
import os
import signal

from simulator.garbage import THRESHOLDS

# Tests make as many small objects as simulations do, and search as rarely for garbage among them.
gc.set_threshold(*THRESHOLDS)

# A shell that starts tests in the background has them ignore Ctrl-C, and they would hand that on to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As many tests run at once as there are cores. PyTorch's threads for each core would spin and wait for one another, in
# the processes that tests start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Commands without doctests, of which one loads a package that no test needs.
collect_ignore = ["mutate.py"]

# pytest-xdist tells its workers how wide the terminal is; output is read here as a pipe that nobody has told.
os.environ.pop("COLUMNS", None)


def pytest_collection_finish() -> None:
    """Let Python's search for cyclic garbage pass over what was collected: it lives until the last test ends."""
    gc.freeze()

"""Cases of `calibration.measure.layers` while other processes keep CPUs busy, as on machines that are shared: some of
what a host does takes twice as long then, and some hardly longer."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from calibration.measure import layers
from calibration.measure.case import Case, Level, Scalar

DEPTH = 12
#: Busy processes, of the number of CPUs: cores are shared by two threads, or CPUs by two processes.
BUSY = (0.5, 1.0)
#: Ends when its parent, whose number it is given, has.
PROCESS = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
#: From when they are started until all of them run.
SETTLE_S = 2.0


def cases(level: Level, gpus: int) -> Iterator[Case]:
    """What issues ops that the probe of the host does not have, and the probe's own as a check."""
    if level == "smoke":
        yield Case("crowded", "split", {"busy": BUSY[0], "model": "gpt", "layers": 1})
        return
    models = ("gpt",) if level == "quick" else ("gpt", "llama")
    for busy in BUSY[:1] if level == "quick" else BUSY:
        for model in models:
            of: dict[str, Scalar] = {"busy": busy, "model": model, "layers": DEPTH}
            yield Case("crowded", "passes", {**of, "batches": 4})
            for op in ("split", "input"):
                yield Case("crowded", op, of)
            yield Case("crowded", "passes", {**of, "recompute": "full"})
        yield Case("crowded", "passes", {"busy": busy, "model": "moe", "layers": DEPTH})
        for layout, of_layout in layers.SHARED.items() if gpus > 1 else ():
            batches = 8 if layers.is_pipeline(layout) else 3
            for model in (of_layout[0],) if level == "quick" else of_layout:
                of = {"busy": busy, "model": model, "layers": DEPTH, "layout": layout, "batches": batches}
                yield Case("crowded", "passes", of, tuple(range(gpus)), limit_s=120.0)


@contextlib.contextmanager
def crowd(busy: float) -> Iterator[None]:
    """``busy`` times as many busy processes as this one may use CPUs."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    others = [
        subprocess.Popen([sys.executable, "-S", "-c", PROCESS, str(os.getpid())], stdin=subprocess.DEVNULL)
        for _ in range(math.ceil(busy * cpus))
    ]
    try:
        if others:
            time.sleep(SETTLE_S)
        yield
    finally:
        for one in others:
            one.kill()
        for one in others:
            one.wait()

"""Seconds of the host for a call, beside its seconds for a probe at the same time.

Hosts of one kind issue the same ops in half or twice the time, from machine to machine and from one tenth of a second
to the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from calibration.measure.bench import Bench, MeasuredFigures, summary
from calibration.measure.team import Team
from calibration.train.host import Probe

#: Blocks of runs, a probe before each and one behind the last; how long a block is, about, and in runs at most.
BLOCKS, BLOCK_S, MOST = 6, 0.05, 20
WARM_UP = 3


def beside_probes(run: Callable[[], float], bench: Bench, probe: Probe | None, team: Team | None) -> MeasuredFigures:
    """Return the host's seconds of ``run``, which returns them itself, beside those of probes.

    ``time_s``: of the slowest member in each block; ``each_s``: of every member. ``block_s``: [member][block], seconds
    of a run. ``probe_s`` and ``probe_forward_s``, where there is a probe: [member][block], of the probes around the
    blocks, and of their forward passes.
    """

    def once() -> float:
        if team is not None:
            team.barrier()
        seconds = run()
        bench.synchronize()
        return seconds

    warm = [once() for _ in range(WARM_UP)][-1]
    slowest = warm if team is None else max(team.all(warm))
    n = max(1, min(MOST, math.ceil(BLOCK_S / slowest))) if bench.cuda else 1
    blocks: list[float] = []
    probes = [probe.seconds()] if probe else []
    for _ in range(BLOCKS if bench.cuda else 1):
        blocks.append(statistics.fmean(once() for _ in range(n)))
        if probe:
            probes.append(probe.seconds())
    mine = (blocks, [sum(parts) for parts in probes], [forward for forward, _ in probes])
    each = [mine] if team is None else team.all(mine)
    row: MeasuredFigures = {
        **summary([max(seconds) for seconds in zip(*(member_blocks for member_blocks, *_ in each), strict=True)]),
        "runs": n,
        "each_s": [_rounded(statistics.median(member_blocks)) for member_blocks, *_ in each],
    }
    if probe:
        row |= {
            name: [[*map(_rounded, one[n])] for one in each]
            for n, name in enumerate(("block_s", "probe_s", "probe_forward_s"))
        }
    return row


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")

"""Small pipelines row by row, as text: F lasts 1, B 2, a transfer 0.5."""

from __future__ import annotations

import pytest

from simulator.build import schedule_program
from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.schedules import SCHEDULES
from simulator.timeline import Timeline


def text(timeline: Timeline) -> str:
    """rank, lane, op, start, end; the op with its stage and micro-batch as in torch: 0F1. A transfer has the stage that
    made what it carries."""
    lines = []
    for row in timeline.frame().itertuples():
        op = f"{row.stage}{row.name}{row.microbatch}" if row.lane == "compute" else f"{row.stage}.{row.microbatch}"
        lines.append(f"{row.rank} {row.lane:<11} {op:<3} {row.start_s:4g} {row.end_s:4g}")
    return "\n".join(lines)


def play(name: str, p: int, m: int, v: int, *, fold: bool, coalesce: bool) -> str:
    program = schedule_program(SCHEDULES[name], p, m, v, 1.0, 2.0)
    return text(simulate(program, ideal_cluster(p, 0.5), Costs.ideal(), fold=fold, coalesce=coalesce))


# Rank 0 fills the pipeline with two forwards, which reach rank 1 half a second after they end; rank 1 turns the first
# one round at once. The gradient of micro-batch 0 is back at 5, that of micro-batch 1, made at 7.5, at 8.
ONE_F_ONE_B = """
0 compute     0F0    0    1
0 compute     0F1    1    2
0 compute     0B0    5    7
0 compute     0B1    8   10
0 pp_recv_bwd 1.0  4.5    5
0 pp_recv_bwd 1.1  7.5    8
0 pp_send_fwd 0.0    1  1.5
0 pp_send_fwd 0.1    2  2.5
1 compute     1F0  1.5  2.5
1 compute     1B0  2.5  4.5
1 compute     1F1  4.5  5.5
1 compute     1B1  5.5  7.5
1 pp_recv_fwd 0.0    1  1.5
1 pp_recv_fwd 0.1    2  2.5
1 pp_send_bwd 1.0  4.5    5
1 pp_send_bwd 1.1  7.5    8
"""

# GPipe: as above until rank 1 has the second forward; all forwards come before the first backward.
GPIPE = """
0 compute     0F0    0    1
0 compute     0F1    1    2
0 compute     0B0    6    8
0 compute     0B1    8   10
0 pp_recv_bwd 1.0  5.5    6
0 pp_recv_bwd 1.1  7.5    8
0 pp_send_fwd 0.0    1  1.5
0 pp_send_fwd 0.1    2  2.5
1 compute     1F0  1.5  2.5
1 compute     1F1  2.5  3.5
1 compute     1B0  3.5  5.5
1 compute     1B1  5.5  7.5
1 pp_recv_fwd 0.0    1  1.5
1 pp_recv_fwd 0.1    2  2.5
1 pp_send_bwd 1.0  5.5    6
1 pp_send_bwd 1.1  7.5    8
"""

# Four stages on two ranks: 0 and 2 on rank 0, 1 and 3 on rank 1. Both micro-batches go through stages 0 and 1, then 2
# and 3. Rank 1 turns micro-batch 0 round at 5.5, before the last forward; gradients return through stages 3, 2, 1, 0.
INTERLEAVED = """
0 compute     0F0    0    1
0 compute     0F1    1    2
0 compute     2F0    3    4
0 compute     2F1    4    5
0 compute     2B0    8   10
0 compute     2B1   11   13
0 compute     0B0   13   15
0 compute     0B1   16   18
0 pp_recv_bwd 3.0  7.5    8
0 pp_recv_bwd 3.1 10.5   11
0 pp_recv_bwd 1.0 12.5   13
0 pp_recv_bwd 1.1 15.5   16
0 pp_recv_fwd 1.0  2.5    3
0 pp_recv_fwd 1.1  3.5    4
0 pp_send_bwd 2.0   10 10.5
0 pp_send_bwd 2.1   13 13.5
0 pp_send_fwd 0.0    1  1.5
0 pp_send_fwd 0.1    2  2.5
0 pp_send_fwd 2.0    4  4.5
0 pp_send_fwd 2.1    5  5.5
1 compute     1F0  1.5  2.5
1 compute     1F1  2.5  3.5
1 compute     3F0  4.5  5.5
1 compute     3B0  5.5  7.5
1 compute     3F1  7.5  8.5
1 compute     3B1  8.5 10.5
1 compute     1B0 10.5 12.5
1 compute     1B1 13.5 15.5
1 pp_recv_bwd 2.0   10 10.5
1 pp_recv_bwd 2.1   13 13.5
1 pp_recv_fwd 0.0    1  1.5
1 pp_recv_fwd 0.1    2  2.5
1 pp_recv_fwd 2.0    4  4.5
1 pp_recv_fwd 2.1    5  5.5
1 pp_send_bwd 3.0  7.5    8
1 pp_send_bwd 3.1 10.5   11
1 pp_send_bwd 1.0 12.5   13
1 pp_send_bwd 1.1 15.5   16
1 pp_send_fwd 1.0  2.5    3
1 pp_send_fwd 1.1  3.5    4
"""


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("coalesce", [True, False])
@pytest.mark.parametrize(
    ("name", "v", "expected"),
    [("1f1b", 1, ONE_F_ONE_B), ("gpipe", 1, GPIPE), ("interleaved", 2, INTERLEAVED)],
    ids=["1f1b", "gpipe", "interleaved"],
)
def test_two_ranks_two_microbatches(name: str, v: int, expected: str, fold: bool, coalesce: bool) -> None:
    assert play(name, 2, 2, v, fold=fold, coalesce=coalesce) == expected.strip()

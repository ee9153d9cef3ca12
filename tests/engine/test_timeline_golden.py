"""Small pipelines row by row, as text: F lasts 1, B 2, a transfer 0.5."""

from __future__ import annotations

import pytest

from simulator.cluster.ideal import ideal_cluster
from simulator.costs import Costs
from simulator.engine import simulate
from simulator.lowering import schedule_program
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
# and 3, and back. What the two say to each other is one stream, in the order in which passes would end if all took one
# turn: 0F1, done at 2, is sent at 3, behind the receive of what 1F0 makes until 2.5; 2F0, done at 4, at 5, behind what
# 1F1 makes; 2F1 at 6.5, as its receive is posted when 3F0 has ended; 1B0, done at 13.5, at 14.5, behind 2B1 (14).
INTERLEAVED = """
0 compute     0F0    0    1
0 compute     0F1    1    2
0 compute     2F0    3    4
0 compute     2F1    5    6
0 compute     2B0    9   11
0 compute     2B1   12   14
0 compute     0B0   15   17
0 compute     0B1 17.5 19.5
0 pp_recv_bwd 3.0  8.5    9
0 pp_recv_bwd 3.1 11.5   12
0 pp_recv_bwd 1.0 14.5   15
0 pp_recv_bwd 1.1   17 17.5
0 pp_recv_fwd 1.0  2.5    3
0 pp_recv_fwd 1.1  4.5    5
0 pp_send_bwd 2.0   11 11.5
0 pp_send_bwd 2.1   14 14.5
0 pp_send_fwd 0.0    1  1.5
0 pp_send_fwd 0.1    3  3.5
0 pp_send_fwd 2.0    5  5.5
0 pp_send_fwd 2.1  6.5    7
1 compute     1F0  1.5  2.5
1 compute     1F1  3.5  4.5
1 compute     3F0  5.5  6.5
1 compute     3B0  6.5  8.5
1 compute     3F1  8.5  9.5
1 compute     3B1  9.5 11.5
1 compute     1B0 11.5 13.5
1 compute     1B1 14.5 16.5
1 pp_recv_bwd 2.0   11 11.5
1 pp_recv_bwd 2.1   14 14.5
1 pp_recv_fwd 0.0    1  1.5
1 pp_recv_fwd 0.1    3  3.5
1 pp_recv_fwd 2.0    5  5.5
1 pp_recv_fwd 2.1  6.5    7
1 pp_send_bwd 3.0  8.5    9
1 pp_send_bwd 3.1 11.5   12
1 pp_send_bwd 1.0 14.5   15
1 pp_send_bwd 1.1   17 17.5
1 pp_send_fwd 1.0  2.5    3
1 pp_send_fwd 1.1  4.5    5
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

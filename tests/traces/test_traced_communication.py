"""Traces of simulated steps tell bytes and groups of communication, as PyTorch's profiler does."""

from __future__ import annotations

from pathlib import Path

import simulator
from simulator.output.comm_arguments import CommArguments
from simulator.program import from_text
from simulator.traces.files import open_trace
from simulator.traces.hardware import exchange_factor, unknown_exchanges

SMALL = {"model.layers": 2, "training.global_batch": 4, "training.recompute": "none"}


def test_a_step_read_back_tells_bytes_and_groups(tmp_path: Path) -> None:
    """Two stages of two tensor ranks and two replicas. Of the model's parameters a rank reduces its quarter, in fp32.

    Rank 0's tensor group is 0 and 1, its data group 0 and 2, and rank 4 has the next stage.
    """
    layout = {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.dp": 2, "parallelism.zero": 0}
    result = simulator.run("llama3_8b_dgx_h100", set={**SMALL, **layout})
    result.save_traces(tmp_path, [0, 1])
    trace = open_trace([str(tmp_path)])
    assert unknown_exchanges(trace) == 0
    rank = trace.ranks[0]
    told = {(one.operation, one.ranks): one for one in rank.collectives}
    assert {ranks for operation, ranks in told if operation != "send_recv"} >= {(0, 1), (0, 2)}
    gather = told["all_gather", (0, 1)]  # sequence parallelism gathers the tokens of a layer: seq x hidden in bf16
    model, training = result.workload.model, result.workload.training
    assert gather.nbytes == training.micro_batch * training.seq * model.hidden * 2
    assert gather.kind == "tp"
    faster = exchange_factor(trace, "dgx_h100", {"name": "dgx_h100", "node": {"nvlink": {"bandwidth_Bps": 900e9}}})
    assert 0.4 < faster(gather) < 1


TEXT = """
program name=three
role all ranks=0-2
  lane x
    step gather
      comm g all_gather nbytes=30 axis=dp purpose=dp
    step scatter after=gather
      comm s reduce_scatter nbytes=30 axis=dp purpose=dp
group dp 0,1,2
"""


def test_gathers_put_in_a_part_and_scatters_take_one_out() -> None:
    written = CommArguments(from_text(TEXT))
    gather = written.arguments(1, "gather", "g", "all_gather")
    scatter = written.arguments(1, "scatter", "s", "reduce_scatter")
    assert (gather["In msg nelems"], gather["Out msg nelems"]) == (10, 30)
    assert (scatter["In msg nelems"], scatter["Out msg nelems"]) == (30, 10)
    assert gather["Process Group Ranks"] == "[0, 1, 2]"
    assert written.arguments(1, "gather", "other", "all_gather") == {}

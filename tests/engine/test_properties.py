"""What holds of every step, whatever the layout: random legal jobs, played twice."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from simulator.analysis.time.memory_curve import memory_curve
from simulator.engine.invariants import Place, check
from simulator.errors import InputError
from simulator.step_result import StepResult
from tests.support.exact import leaves
from tests.support.jobs import any_job
from tests.support.quick import SPEEDS, load, play


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    return any_job(lambda *choices: draw(st.sampled_from(choices)))


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate, Phase.shrink])
@given(jobs(), st.sampled_from(SPEEDS))
def test_every_legal_job_gives_a_possible_step(description: dict[str, Any], speeds: dict[str, float]) -> None:
    try:
        workload = load(description)
    except InputError:
        reject()
    first, second = play(workload, speeds), play(workload, speeds)
    timeline = first.spans

    # Nothing overlaps, nothing runs before what it needs, links keep to their capacity, bytes are conserved.
    check(first.program, timeline, Place(first.placed, first.cluster))

    # No rank is done before it has done its own work at full speed.
    work = np.array([template.length_s for template in timeline.templates])[timeline.template]
    in_lane = np.array(timeline.lane_names)[timeline.lane] == "compute"
    for rank in timeline.ranks:
        assert work[(timeline.rank == rank) & in_lane].sum() <= timeline.step_time_s * (1 + 1e-9)

    # Activations are never negative, and all given back at the end.
    for rank in timeline.ranks:
        _, held, workspace, *_ = memory_curve(timeline, rank)
        most = float(held.max())
        assert held.min() >= -1e-9 * most
        assert workspace.min() >= -1e-9 * float(workspace.max())
        assert held[-1] == pytest.approx(0.0, abs=1e-9 * most)
        assert workspace[-1] == pytest.approx(0.0, abs=1e-9 * float(workspace.max()))

    # A step is cut up without rest, twice over: by what ranks do, and along the critical path.
    result = first.to_dict()
    parts = leaves(result["time_breakdown_s"])
    assert min(parts) >= -1e-9 * timeline.step_time_s
    assert sum(parts) == pytest.approx(timeline.step_time_s, rel=1e-9)
    assert sum(part["seconds"] for part in result["critical_path"]) == pytest.approx(timeline.step_time_s, rel=1e-9)

    # The FLOPs of the rows, every rank's, are those that the model's formula gives for the kernels.
    rows = timeline.rows()
    like = np.array([timeline.ranks_like[int(rank)] for rank in rows["rank"]])
    products = np.isin(rows["kind"].astype(str), ["matmul", "attention"])
    flops = float((rows["flops"].astype(float) * like)[products].sum())
    assert flops == pytest.approx(result["hardware_flops_per_step"], rel=1e-9)
    assert result["hardware_flops_per_step"] >= result["model_flops_per_step_causal"] * (1 - 1e-9)

    # The same again, to the last digit; only the clock on the wall may differ.
    assert plain(first) == plain(second)


def plain(result: StepResult) -> str:
    answer = json.loads(json.dumps(result.to_dict()))
    del answer["simulation"]["wall_s"]
    return json.dumps(answer) + result.timeline.to_csv()

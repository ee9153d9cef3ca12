"""CUDA graphs of Megatron-Core: the kernels inside, the host's time to launch one, and the memory of its pool."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from simulator import models
from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.costs.launch import issued, single
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.models import Part
from simulator.program import AllToAll, Compute, GraphPlace, from_text, to_text
from tests.support.jobs import job
from tests.support.pattern_models import LLAMA
from tests.support.unadvised import without_advice  # noqa: F401

MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 64}


def workload(graphs: list[str], **more: Any) -> Workload:
    framework = {"name": "megatron_core", "cuda_graphs": graphs}
    return load_workload(job(**{"model": LLAMA, **more, "framework": framework}))


def launches(part: Part, kind: str = "F") -> Counter[str]:
    """Return the host's work for a pass of a layer."""
    work: Counter[str] = Counter()
    for op in part.ops(kind):
        for one in single(op):
            work.update(issued(one, kind))
    return work


def in_graphs(part: Part) -> list[str]:
    return [op.name for op in part.forward if isinstance(op, Compute) and op.graph]


def test_a_layer_in_graphs_is_one_launch_each_way() -> None:
    """Attention and MLP stand behind each other, so that one graph holds both: a copy of its input, and a function of
    autograd. Attention alone is a graph, and the MLP's kernels are issued as before."""
    plain, both, attention = (models.layer(workload(graphs)) for graphs in ([], ["attn", "mlp"], ["attn"]))
    assert launches(both) == {"forward_norm": 1, "forward_other": 1}
    assert launches(both, "B") == {"backward_norm": 1, "backward_other": 1}
    assert not in_graphs(plain)
    mlp = Counter(launches(plain))
    for op in plain.forward:
        if isinstance(op, Compute) and not op.name.startswith("mlp."):
            mlp.subtract(issued(op, "F"))
    assert launches(attention) == +mlp + launches(both)


def test_graphs_of_experts_end_before_tokens_travel() -> None:
    """The norm and the router are captured, with the counting of tokens where that is asked for; no exchange is, and
    nothing behind one."""
    model = LLAMA | {"moe": MOE}
    layout = {"ep": 2, "dp": 2}
    router, counted = (
        models.layer(workload(graphs, model=model, parallelism=layout))
        for graphs in (["moe_router"], ["moe_router", "moe_preprocess"])
    )
    names = [op.name for op in router.forward if isinstance(op, Compute)]
    captured = in_graphs(router)
    assert captured == names[names.index("mlp.norm") : names.index("mlp.norm") + len(captured)]
    assert "moe.router" in captured
    assert not any("fc1" in name or "permute" in name for name in captured)
    assert set(captured) <= set(in_graphs(counted))
    assert not [op for op in counted.forward if isinstance(op, AllToAll) and op.graph]


def test_graphs_change_no_kernel_and_keep_what_their_largest_operation_needs() -> None:
    """Kernels, weights and activations are those without graphs. The pool has the gradients of the activation of
    the MLP. In bf16 these are 512 numbers of its output and 1,024 of its input, for each of 128 tokens."""
    plain, graphed = (models.layer(workload(graphs)) for graphs in ([], ["mlp"]))
    kernels = [[op.kernel for op in part.forward if isinstance(op, Compute)] for part in (plain, graphed)]
    assert kernels[0] == kernels[1]
    assert graphed.saved_bytes == plain.saved_bytes
    (pool,) = set(graphed.placeholders) - set(plain.placeholders)
    assert pool.nbytes == 2 * 128 * (512 + 2 * 512)


@pytest.mark.usefixtures("without_advice")
def test_a_step_that_waits_for_its_host_is_faster_with_more_in_graphs() -> None:
    """A small model on H100s, where hosts take longer than kernels."""
    steps = []
    for graphs in ([], ["attn"], ["attn", "mlp"], ["full_iteration"]):
        result = run(workload(graphs, cluster="dgx_h100"))
        check(result.program, result.played)
        steps.append(result.to_dict()["step_time_s"])
    assert steps == sorted(steps, reverse=True)
    assert steps[3] < steps[0] / 2


def test_places_in_graphs_are_read_back() -> None:
    program = run(workload(["attn"])).program
    again = from_text(to_text(program))
    block = again.roles[0].lanes["compute"][0].op
    assert to_text(again) == to_text(program)
    assert {op.graph for op in block.ops if isinstance(op, Compute)} == set(GraphPlace)


@pytest.mark.parametrize(
    ("graphs", "more", "message"),
    [
        (["attn", "full_iteration"], {}, "full_iteration has all parts in one graph"),
        (["moe_preprocess"], {"model": LLAMA | {"moe": MOE}}, "moe_preprocess is captured behind the router"),
        (["mamba"], {}, "no layer of the model has mamba"),
        (["full_iteration"], {"model": LLAMA | {"moe": MOE}}, "the host waits for the number of tokens"),
        (["attn"], {"training": {"seq": 128, "global_batch": 16, "recompute": "full"}}, "whole layers are run again"),
        (["attn"], {"parallelism": {"offload": {"activations": "cpu"}}}, "activations of graphs stay on the GPU"),
        (["mlp"], {"parallelism": {"zero": 3, "dp": 2}}, "weights of graphs are not gathered"),
    ],
)
def test_what_no_graph_holds_is_refused(graphs: list[str], more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        workload(graphs, **more)


def test_other_frameworks_refuse_graphs() -> None:
    with pytest.raises(InputError, match="pytorch is not simulated with CUDA graphs"):
        load_workload(job(framework={"name": "pytorch", "cuda_graphs": ["attn"]}))

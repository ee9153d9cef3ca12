"""The loss that balances experts: Megatron-Core's kernels, counted by hand, and where it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.errors import InputError
from simulator.models.experts import experts, mixture
from simulator.models.shapes import shapes
from simulator.program import Collective, Compute, Memory

MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 512, "balancing_loss": True}


def workload(framework: str = "megatron_core", *, moe: Any = MOE, changes: Any = None) -> Workload:
    """Return a job of 2,048 tokens, whose scores are 8 numbers for each."""
    model = {"layers": 2, "hidden": 1024, "heads": 8, "ffn_hidden": 2048, "vocab": 1024, "position": "rope"}
    plain = {"norm": "rmsnorm", "activation": "swiglu", "bias": False, "tied_embeddings": False, "moe": moe}
    job = {"model": {**model, **plain}, "framework": framework, "training": {"seq": 2048, "global_batch": 1}}
    return load_workload({**job, "parallelism": {"dp": 1}, "cluster": "hgx_h200_8gpu"}, changes or {})


def balancing(job: Workload, way: str) -> list[Compute | Collective]:
    """Return what the loss launches, ``forward`` or ``backward``."""
    nodes = mixture(shapes(job), experts(job)).nodes
    return [op for node in nodes for op in getattr(node, way) if "moe.balance" in op.name]


def test_fused_routers_have_a_kernel_for_scores_and_one_for_the_loss() -> None:
    """Beside them stand the counts and what is logged; backward the gradient of the loss, and a sum of scores'."""
    job = workload()
    forward, backward = balancing(job, "forward"), balancing(job, "backward")
    assert [op.name.removeprefix("moe.balance ") for op in forward] == ["scores", "counts", "loss", "log", "log sum"]
    assert [op.name.removeprefix("moe.balance ") for op in backward] == [
        *("ones", "scale", "loss bwd", "scores bwd", "sum")
    ]
    assert isinstance(forward[0], Compute)
    assert isinstance(forward[0].kernel, Memory)
    assert forward[0].kernel.read_bytes == 4 * 2048 * 8


def test_without_the_fused_router_pytorch_chooses_experts_once_more() -> None:
    """A softmax, a choice, four kernels for its map, counts, a sum, and five kernels on a few numbers."""
    job = workload(changes={"training.unfused": ["router"]})
    assert (len(balancing(job, "forward")), len(balancing(job, "backward"))) == (13, 6)


def test_ranks_that_share_a_layer_sum_their_counts() -> None:
    """Eight counts of 8 bytes."""
    (counts,) = [
        op for op in balancing(workload(changes={"parallelism.tp": 2}), "forward") if isinstance(op, Collective)
    ]
    assert (counts.name, counts.nbytes) == ("tp.all_reduce moe.balance", 64)


def test_without_the_key_there_is_no_such_loss() -> None:
    assert balancing(workload(moe={**MOE, "balancing_loss": False}), "forward") == []


def test_other_frameworks_are_not_simulated_with_it() -> None:
    with pytest.raises(InputError, match=r"model\.moe\.balancing_loss.*pytorch is simulated without a loss"):
        workload("pytorch")

"""Dispatchers of tokens to experts: what each cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import InputError
from simulator.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    from simulator.config.workload import Workload

_KEY = "parallelism.dispatcher"
#: DeepEP, csrc/kernels/configs.cuh: NUM_MAX_NVL_PEERS, and NUM_MAX_RDMA_PEERS nodes.
DEEPEP_GPUS, DEEPEP_NODES = 8, 20
#: Whose experts are Megatron-Core's, with all of its dispatchers.
CORE_FRAMEWORKS = tuple(
    name for name, one in FRAMEWORKS.items() if one.has_core_experts and all(limit.key != _KEY for limit in one.limits)
)


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield what stands in the way of a dispatcher other than the all-to-all."""
    layout, moe = workload.parallelism, workload.model.moe
    if layout.dispatcher == "all_to_all":
        return
    if moe is None:
        yield InputError("the model has no experts", key=_KEY, found=layout.dispatcher, allowed="all_to_all")
        return
    if not workload.software.has_core_experts:
        yield InputError(
            "kernels around other dispatchers than the all-to-all are Megatron-Core's",
            key=_KEY,
            found=layout.dispatcher,
            allowed=f"all_to_all, or framework {' or '.join(CORE_FRAMEWORKS)}",
        )
    if layout.etp > 1:
        yield InputError(
            f"dispatcher {layout.dispatcher} takes whole experts here",
            key="parallelism.etp",
            found=layout.etp,
            allowed="1, or dispatcher all_to_all",
            fix="etp: 1",
        )
    if moe.capacity_factor is not None:
        # Megatron-LM: "moe_expert_capacity_factor only works with alltoall token dispatcher".
        yield InputError(
            f"dispatcher {layout.dispatcher} drops no tokens",
            key="model.moe.capacity_factor",
            found=moe.capacity_factor,
            allowed="null, or dispatcher all_to_all",
        )
    if layout.overlap.expert_all_to_all and layout.dispatcher == "all_gather":
        # Megatron-LM: "overlap_moe_expert_parallel_comm is supported with alltoall/flex token dispatcher".
        yield InputError(
            "nothing hides the gathering of tokens",
            key=_KEY,
            found=layout.dispatcher,
            allowed="all_to_all, deepep or hybridep, or overlap.expert_all_to_all: false",
        )


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield why DeepEP does not run on these nodes."""
    layout = workload.parallelism
    if layout.dispatcher != "deepep" or layout.ep == 1:
        return
    per_node = max(node.gpus.count for node in workload.cluster.kinds)
    nodes = layout.expert_nodes(workload.cluster.gpus_per_node)
    if per_node > DEEPEP_GPUS or nodes > DEEPEP_NODES:
        yield InputError(
            f"DeepEP reaches {DEEPEP_GPUS} GPUs of a node and {DEEPEP_NODES} nodes, not {per_node} of {nodes}",
            key=_KEY,
            found=layout.dispatcher,
            allowed="all_to_all, hybridep",
            fix="dispatcher: hybridep",
        )

"""CUDA graphs: what Megatron-Core captures, and what stands in the way.

Source: github.com/NVIDIA/Megatron-LM, docs/user-guide/features/cuda_graph.md, and the checks of ``cuda_graph_impl`` in
megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.cuda_graphs import GraphPart, parts_in_model
from simulator.errors import Bare, InputError
from simulator.frameworks import FRAMEWORKS
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.workload import Workload

_KEY = "framework.cuda_graphs"
_WHOLE = GraphPart.WHOLE_STEP


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield why parts of layers, or passes of a step, cannot be launched as CUDA graphs."""
    chosen = workload.framework.cuda_graphs
    if not chosen:
        return
    able = " or ".join(name for name, one in FRAMEWORKS.items() if one.captures_graphs)
    if not workload.software.captures_graphs:
        yield _refused(
            chosen, f"{workload.framework.title} is not simulated with CUDA graphs", f"[], or framework: {able}"
        )
        return
    yield from _combination_problems(chosen)
    yield from _layer_problems(workload)
    yield from _memory_problems(workload)


def _refused(chosen: tuple[str, ...], message: str, allowed: str) -> InputError:
    return InputError(message, key=_KEY, found=brief(list(chosen)), allowed=allowed)


def _combination_problems(chosen: tuple[str, ...]) -> Iterator[InputError]:
    """Yield parts that do not go together."""
    if _WHOLE in chosen and len(chosen) > 1:
        yield _refused(chosen, f"{_WHOLE} has all parts in one graph", f"[{_WHOLE}] alone, or parts of layers")
    if GraphPart.PREPROCESS in chosen and GraphPart.ROUTER not in chosen:
        yield _refused(chosen, f"{GraphPart.PREPROCESS} is captured behind the router", f"{GraphPart.ROUTER} beside it")


def _layer_problems(workload: Workload) -> Iterator[InputError]:
    """Yield parts that no layer of the model has, and experts whose number of tokens the host has to read."""
    chosen, model = workload.framework.cuda_graphs, workload.model
    layers = range(model.layers)
    parts = parts_in_model({model.mixer(layer).name for layer in layers}, {model.mlp(layer) for layer in layers})
    for part in chosen:
        if part not in (*parts, _WHOLE):
            yield _refused(chosen, f"no layer of the model has {part}", ", ".join(parts))
    moe = model.moe
    if _WHOLE in chosen and moe is not None and (moe.capacity_factor is None or not moe.pad_to_capacity):
        yield _refused(
            chosen,
            "the host waits for the number of tokens that experts get, which no graph does",
            f"{', '.join(parts)}; or model.moe.capacity_factor with pad_to_capacity",
        )


def _memory_problems(workload: Workload) -> Iterator[InputError]:
    """Yield recomputation, shards and copies that the host steers inside a layer."""
    chosen, training, layout = workload.framework.cuda_graphs, workload.training, workload.parallelism
    if _WHOLE not in chosen and training.recompute.granularity == "full":
        yield InputError(
            "whole layers are run again inside a graph of all passes alone",
            key="training.recompute.granularity",
            found="full",
            allowed=f"none or selective, or framework.cuda_graphs: [{_WHOLE}]",
        )
    if (
        GraphPart.ROUTER in chosen
        and training.recompute.granularity == "selective"
        and "moe" in training.recompute.modules
    ):
        yield InputError(
            "experts that run again have their router with them, not in a graph",
            key="training.recompute.modules",
            found=brief(list(training.recompute.modules)),
            allowed="left out: moe",
        )
    if layout.offload.activations != "none":
        yield InputError(
            "activations of graphs stay on the GPU",
            key="parallelism.offload.activations",
            found=layout.offload.activations,
            allowed="none",
        )
    if layout.zero == 3:
        yield InputError("weights of graphs are not gathered", key="parallelism.zero", found=3, allowed="0, 1 or 2")
    if training.adapters is not None:
        yield InputError(
            "adapters are not simulated in CUDA graphs",
            key="training.adapters",
            found=Bare("a section"),
            allowed="null",
        )

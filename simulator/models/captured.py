"""Parts of a captured model, as one rank of a workload runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from simulator.captured import (
    INPUT,
    CapturedKernel,
    CapturedModel,
    CapturedNode,
    CapturedTensor,
    CapturedWeight,
    part_flops,
)
from simulator.config import Workload
from simulator.models.linear import add_gradient, new_gradient_bytes
from simulator.models.parts import Checkpoint, Part, part_of
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.models.weight_names import WORDS
from simulator.operations.nodes import Node, Op, Ops, Tensor, comm
from simulator.operations.shapes import ANY_TURN, Turn
from simulator.operations.weights import Weight
from simulator.program import Compute, Kernel, StepPhase, kernel_from_text


def captured_layer(workload: Workload, model: CapturedModel, number: int, recompute: str, turn: Turn) -> Part:
    """Return layer ``number`` of a captured model; after those that were recorded, the last of them again."""
    place = model.part_of_layer(number)
    return _part(shapes(workload, turn=turn), model, place, recompute == "full", "layer", False)


def captured_beginning(workload: Workload, model: CapturedModel, turn: Turn = ANY_TURN) -> Part:
    """Return what a captured model runs before its layers."""
    return _part(shapes(workload, turn=turn), model, model.before, False, "embedding", False)


def captured_end(workload: Workload, model: CapturedModel, turn: Turn = ANY_TURN) -> Part:
    """Return what a captured model runs after its layers, with the loss."""
    copied = not workload.parallelism.table_in_place
    return _part(shapes(workload, turn=turn), model, model.after, False, "head", copied)


def captured_flops(model: CapturedModel, layers: int, *, causal: bool) -> float:
    """Return the FLOPs of products and attention of one recorded micro-batch, forward and backward.

    Attention with its gradients counts three times its forward pass, in full where it is not ``causal``, as elsewhere.
    """
    places = [model.part_of_layer(number) for number in range(layers)]
    return sum(part_flops(model.parts[place], causal=causal) for place in (model.before, *places, model.after))


@lru_cache(maxsize=256)
def _part(shapes: FrameworkShapes, model: CapturedModel, place: int, again: bool, name: str, copied: bool) -> Part:
    """Return a part. It is cached, so that equal layers are one object and their blocks can be shared.

    ``again``: it keeps its input alone, and runs forward once more. ``copied``: weights that it shares with the first
    part are on another rank.
    """
    nodes = tuple(_node(shapes, node, model.table, copied) for node in model.parts[place].nodes) or (Node(),)
    checkpoints = [Checkpoint(nodes, (Tensor(INPUT, model.passed_bytes),))] if again else []
    return part_of(shapes, name, nodes, checkpoints, is_unit=name == "layer")


def _node(shapes: FrameworkShapes, node: CapturedNode, table: str, copied: bool) -> Node:
    weights = tuple(_weight(shapes, weight, table, copied) for weight in node.weights)
    trained = [weight for weight in weights if weight.trainable]
    added = {
        weight.name: add_gradient(shapes, weight.gradient_product or weight.name, weight.elements) for weight in trained
    }
    new_bytes = sum(new_gradient_bytes(shapes, weight.elements) for weight in trained)
    saved = tuple(_tensor(shapes, tensor) for tensor in node.saved)
    weight_grad = _ops(shapes, node.weight_grad, StepPhase.WEIGHT_GRADIENT)
    return Node(
        forward=_ops(shapes, node.forward, StepPhase.FORWARD),
        input_grad=_ops(shapes, node.input_grad, StepPhase.BACKWARD),
        weight_grad=(*weight_grad, *(op for ops in added.values() for op in ops)),
        saved=saved,
        saved_for_weights=saved if weight_grad and not node.input_grad else (),
        forward_bytes=node.forward_bytes,
        grad_bytes=node.grad_bytes + new_bytes,
        output_grad_bytes=node.output_grad_bytes,
        weight_grad_bytes=new_bytes,
        weights=weights,
    )


def _tensor(shapes: FrameworkShapes, tensor: CapturedTensor) -> Tensor:
    return Tensor(tensor.name, tensor.nbytes / (shapes.tp if tensor.split else 1))


def _weight(shapes: FrameworkShapes, weight: CapturedWeight, table: str, copied: bool) -> Weight:
    """Return a weight as this rank has it. The one that both ends read, the ``table``, is named as in other models."""
    at = weight.split_dimension
    return Weight(
        name=WORDS if table and weight.name == table and not weight.tied_to else weight.name,
        shape=tuple(size // (shapes.tp if place == at else 1) for place, size in enumerate(weight.shape)),
        whole=weight.shape,
        dtype=weight.dtype,
        sharded_over=("tp",) if at >= 0 else (),
        gradient_product=weight.gradient,
        tied_to=WORDS if table and weight.tied_to == table else weight.tied_to,
        copied=copied and bool(weight.tied_to),
        trainable=weight.trainable,
    )


def _ops(shapes: FrameworkShapes, kernels: tuple[CapturedKernel, ...], phase: StepPhase) -> Ops:
    """Return the kernels of a pass, with the sums and gatherings of tensor-parallel ranks behind them."""
    ops: list[Op] = []
    for one in kernels:
        ops.append(Compute(one.name, _shared(kernel_from_text(one.kernel), one.split, shapes.tp), phase))
        if shapes.tp > 1 and one.summed_bytes:
            ops.append(comm("all_reduce", one.name, one.summed_bytes))
        if shapes.tp > 1 and one.gathered_bytes:
            ops.append(comm("all_gather", one.name, one.gathered_bytes))
    return tuple(ops)


def _shared(kernel: Kernel, sizes: tuple[str, ...], tp: int) -> Kernel:
    """Return ``kernel`` with its ``sizes`` shared out to ``tp`` ranks."""
    if tp == 1 or not sizes:
        return kernel
    values: dict[str, Any] = {size: getattr(kernel, size) for size in sizes}
    shares = {size: value // tp if isinstance(value, int) else value / tp for size, value in values.items()}
    shared: Kernel = replace(cast(Any, kernel), **shares)
    return shared

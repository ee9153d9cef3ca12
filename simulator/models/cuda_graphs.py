"""CUDA graphs of parts of layers: kernels that one call of the host launches.

As Megatron-Core captures them with Transformer Engine (github.com/NVIDIA/Megatron-LM,
docs/user-guide/features/cuda_graph.md, ``--cuda-graph-impl transformer_engine`` and ``--cuda-graph-modules``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from simulator.config.cuda_graphs import GraphPart
from simulator.models.parts import Part
from simulator.operations.nodes import Node, Op, Ops, Tensor
from simulator.program import AllToAll, Beside, Collective, Compute, GraphPlace


def captured_nodes(
    modules: Collection[str], mixer: Sequence[Node], mlp: Sequence[Node], *, mamba: bool, has_experts: bool
) -> tuple[Node, ...]:
    """Return the operations of a layer that graphs of these ``modules`` hold, of its ``mixer`` and of its ``mlp``.

    Of experts these are what stands before the first exchange of tokens, and before the host waits for their number.
    """
    nodes: list[Node] = []
    if (GraphPart.MAMBA if mamba else GraphPart.ATTENTION) in modules:
        nodes += mixer
    if not has_experts and GraphPart.MLP in modules:
        nodes += mlp
    if has_experts and GraphPart.ROUTER in modules:
        for node in mlp:
            if any(map(_ends_capture, node.forward)):
                if GraphPart.PREPROCESS in modules:
                    nodes.append(Node(forward=tuple(_before_exchange(node.forward))))
                break
            nodes.append(node)
    return tuple(nodes)


def _ends_capture(op: Op) -> bool:
    """Tell whether no graph holds ``op``: tokens travel, or the host waits."""
    match op:
        case Beside():
            return _ends_capture(op.comm)
        case Collective():
            return isinstance(op, AllToAll) or op.host_waits or op.axis == "ep"
        case _:
            return op.host_waits


def _before_exchange(ops: Ops) -> Iterator[Op]:
    for op in ops:
        if _ends_capture(op):
            return
        yield op


def with_graphs(part: Part, nodes: Sequence[Node]) -> Part:
    """Return ``part`` with the operations of ``nodes`` in graphs, one for each run of them.

    Tensors of graphs lie in a memory pool of their own. What the largest operation needs while it runs stays there, and
    serves all layers of one size; activations are as many as before.
    """
    if not nodes:
        return part
    names = {_name(op) for node in nodes for op in (*node.forward, *node.backward)}
    pool = Tensor(f"graph pool of a {part.name}", max(max(node.grad_bytes, node.forward_bytes) for node in nodes))
    return replace(
        part,
        forward=_in_graphs(part.forward, names),
        recompute=_in_graphs(part.recompute, names),
        input_grad=_in_graphs(part.input_grad, names),
        weight_grad=_in_graphs(part.weight_grad, names),
        backward=_in_graphs(part.backward, names),
        placeholders=(*part.placeholders, pool),
    )


def _name(op: Op) -> str:
    return op.comm.name if isinstance(op, Beside) else op.name


def _in_graphs(ops: Ops, names: Collection[str]) -> Ops:
    """Return ``ops`` with those of these ``names`` in graphs; the first kernel of each run launches its graph."""
    placed: list[Op] = []
    launched = False
    for op in ops:
        if _name(op) not in names:
            launched = False
            placed.append(op)
            continue
        first = not launched and isinstance(op, Compute)
        placed.append(_placed(op, GraphPlace.FIRST if first else GraphPlace.INSIDE))
        launched = launched or first
    return tuple(placed)


def _placed(op: Op, place: GraphPlace) -> Op:
    if isinstance(op, Beside):
        return replace(
            op, comm=replace(op.comm, graph=place), kernels=tuple(replace(one, graph=place) for one in op.kernels)
        )
    return replace(op, graph=place)

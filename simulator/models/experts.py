"""A mixture of experts in place of a layer's MLP, as Megatron-Core runs it.

Each token chooses its experts (router), and travels to the ranks that hold them (dispatch). There copies in the order
of the experts pass their products, all of a rank's in one kernel. What these give travels back (combine) and is summed;
see `dispatching`. github.com/NVIDIA/Megatron-LM, megatron/core/transformer/moe: router.py, experts.py (TEGroupedMLP),
moe_layer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.config import Workload
from simulator.models.dispatching import (
    ONCE_TO_EACH_RANK,
    bytes_per_node,
    combine,
    dispatch,
    reach,
)
from simulator.models.expert_padding import padding
from simulator.models.linear import add_gradient, linear, new_gradient_bytes, product
from simulator.models.low_precision import in_low_precision
from simulator.models.pointwise import activation
from simulator.models.routing import routing
from simulator.models.shapes import FrameworkShapes
from simulator.models.weight_names import weight_name
from simulator.operations.experts import PROBABILITY, Experts
from simulator.operations.nodes import Node, Op, Ops, Tensor, memory
from simulator.operations.shapes import ANY_SEAT, Seat
from simulator.operations.weights import Weight
from simulator.program import AllToAll, Beside, Compute, GroupedMatmul, Matmul, Memory, StepPhase


def experts(workload: Workload, seat: Seat = ANY_SEAT) -> Experts:
    """Return the `Experts` of a rank at ``seat`` in the layers that have some."""
    layout, moe = workload.parallelism, workload.model.moe
    assert moe is not None
    routed = routing(workload)
    once = layout.dispatcher in ONCE_TO_EACH_RANK and layout.ep > 1
    per_copy = reach(workload).ranks / moe.top_k if once else 1.0
    return Experts(
        tokens=routed.tokens,
        experts=moe.experts,
        top_k=moe.top_k,
        sent=routed.sent,
        received=routed.received[seat.ep],
        loads=routed.loads[seat.ep],
        received_shares=routed.received_shares,
        dispatcher=layout.dispatcher,
        travelling=routed.sent * per_copy,
        arriving=routed.received[seat.ep] * per_copy,
        per_node=bytes_per_node(workload),
        ep=layout.ep,
        etp=layout.etp,
        ffn=moe.ffn_hidden // layout.etp,
        shared_ffn=moe.shared_ffn_hidden // layout.tp,
        shared_gate=moe.shared_gate,
        counted=moe.capacity_factor is None or not moe.pad_to_capacity,
        router_dtype=moe.router_dtype,
        overlaps=layout.overlap.ep and layout.ep > 1,
        hidden_by_others=layout.overlap.expert_all_to_all,
        beside_dense=moe.beside_dense,
        permutes_by_operations=not workload.training.fused_permutation,
        balanced=moe.balancing_loss,
        nodes=layout.expert_nodes(workload.cluster.gpus_per_node),
    )


class Mixture(NamedTuple):
    """The operations of a mixture of experts, in order.

    ``shared_first``: the shared experts come between the dispatch and the routed ones, as in the layers that
    Megatron-Core takes apart (models/gpt/fine_grained_callables.py, ``submodule_moe_forward``).
    """

    before: tuple[Node, ...]
    activation: Node
    after: tuple[Node, ...]
    shared: tuple[Node, ...]
    add: tuple[Node, ...]

    shared_first: bool = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        if self.shared_first:
            return (*self.before[:2], *self.shared, *self.before[2:], self.activation, *self.after, *self.add)
        return (*self.before, self.activation, *self.after, *self.shared, *self.add)


def mixture(shapes: FrameworkShapes, experts: Experts) -> Mixture:
    """Return the operations from the normed rows (tensor ``mlp.normed``) to the MLP's output."""
    fc1 = experts.ffn * (2 if shapes.gated else 1)
    elements = experts.worked_on * experts.ffn
    act = activation(shapes, "moe", elements)
    if shapes.framework.experts.one_by_one:
        shares = [load / experts.worked_on for load in experts.loads if load]
        act = replace(act, forward=_split(act.forward, shares), input_grad=_split(act.input_grad, shares))
    if shapes.framework.experts.weighs_in_activation:
        act = replace(act, saved=(*act.saved, Tensor("moe.probs", float(PROBABILITY * experts.worked_on))))
    padded, cut = padding(shapes, experts)
    add = memory("F", "shared.add", "residual", 2 * shapes.row_bytes, shapes.row_bytes, shapes.dtype)
    whole = Mixture(
        before=(
            _router(shapes, experts),
            dispatch(shapes, experts),
            *padded,
            _grouped(shapes, experts, "fc1", fc1, shapes.hidden, split="column", saved="moe.input"),
        ),
        activation=act,
        after=(
            _grouped(shapes, experts, "fc2", shapes.hidden, experts.ffn, split="row", saved="moe.act"),
            *cut,
            combine(shapes, experts),
        ),
        shared=_shared_experts(shapes, experts) if experts.shared_ffn else (),
        add=(*_shared_gate(shapes, experts), Node(forward=(add,), grad_bytes=shapes.row_bytes))
        if experts.shared_ffn
        else (),
        shared_first=experts.hidden_by_others,
    )
    return _overlapped(whole) if experts.overlaps and experts.shared_ffn else whole


def _overlapped(mixture: Mixture) -> Mixture:
    """Run the shared experts' first product and activation beside the dispatch, and their second beside the combine.

    Their gradients run so too (Megatron-Core's ``moe_shared_expert_overlap``). Their tensor-parallel communication
    stays in line, and so do weight gradients.
    """
    router, dispatch, *rest = mixture.before
    *products, combine = mixture.after
    first, act, second = mixture.shared
    dispatch = replace(
        dispatch,
        forward=_hidden_by(dispatch.forward, (*first.forward, *act.forward)),
        input_grad=_hidden_by(dispatch.input_grad, first.input_grad),
    )
    combine = replace(
        combine,
        forward=_hidden_by(combine.forward, second.forward),
        input_grad=_hidden_by(combine.input_grad, (*second.input_grad, *act.input_grad)),
    )
    first, act, second = (
        replace(node, forward=_comms(node.forward), input_grad=_comms(node.input_grad)) for node in (first, act, second)
    )
    # What is left of the first product gathers before the dispatch, and sums after its gradient.
    return Mixture(
        (router, first, act, dispatch, *rest), mixture.activation, (*products, combine), (second,), mixture.add
    )


def _hidden_by(ops: Ops, shared: Ops) -> Ops:
    """Return ``ops`` with the kernels among the ``shared`` ones beside their all-to-all of tokens, the largest."""
    kernels = tuple(op for op in shared if isinstance(op, Compute))
    exchanges = (op for op in ops if isinstance(op, AllToAll))
    tokens = max(exchanges, key=lambda op: op.nbytes, default=None)
    return tuple(Beside(op, kernels) if isinstance(op, AllToAll) and op is tokens else op for op in ops)


def _comms(ops: Ops) -> Ops:
    """Return the communication among ``ops``."""
    return tuple(op for op in ops if not isinstance(op, Compute))


def _router(shapes: FrameworkShapes, experts: Experts) -> Node:
    """Return the framework's router; every tensor-parallel rank holds its weight, and routes its own tokens."""
    node = shapes.framework.experts.router(shapes, experts)
    gradient = add_gradient(shapes, "moe.router", experts.experts * shapes.hidden)
    weights: tuple[Weight, ...] = (_router_weight(shapes, experts),)
    if "router" in shapes.biases:
        shape = (experts.experts,)
        scores = float(PROBABILITY * experts.tokens * experts.experts)
        name = weight_name("moe.router", "bias")
        weights += (Weight(name, shape, shape, shapes.dtype, partial_rows=experts.experts if shapes.tp > 1 else 0),)
        gradient += (
            memory(
                "W", "moe.router bias grad", "reduce", scores, shapes.element * experts.experts, "fp32", experts.experts
            ),
        )
        gradient += add_gradient(shapes, "moe.router bias", experts.experts)
    return replace(node, weight_grad=(*node.weight_grad, *gradient), weights=weights)


def _router_weight(shapes: FrameworkShapes, experts: Experts) -> Weight:
    """Return the router's weight, which every rank holds; tensor-parallel ranks route different rows."""
    name, shape = "moe.router", (experts.experts, shapes.hidden)
    partial = experts.experts if shapes.tp > 1 else 0
    product = f"{name} wgrad"
    return Weight(weight_name(name), shape, shape, shapes.dtype, partial_rows=partial, gradient_product=product)


class _Around(NamedTuple):
    """Kernels behind experts' products, before and behind those of the backward pass, and of gradients of biases."""

    forward: Ops = ()
    before: Ops = ()
    behind: Ops = ()
    gradients: Ops = ()


def _around(shapes: FrameworkShapes, experts: Experts, split: str) -> _Around:
    """Return what stands around the experts' first product, which is ``split`` by column, or around their second.

    Experts one by one read parts of all rows, whose gradients are joined, and what they give is joined.
    """
    hooks, nbytes = shapes.framework.experts, float(shapes.element * experts.worked_on * shapes.hidden)
    joins = hooks.one_by_one and len(experts.loads) > 1

    def join(phase: str, name: str) -> Ops:
        parts = len(experts.loads)
        return (memory(phase, f"moe.{name}", "copy", nbytes, nbytes, shapes.dtype, parts=parts),) if joins else ()

    biased = hooks.biased if "experts" in shapes.biases else None
    added, back, gradients = biased(shapes, experts, split) if biased else ((), (), ())
    if split == "column":
        return _Around(added, back, join("B", "split bwd"), gradients)
    return _Around((*added, *join("F", "join")), back, (), gradients)


def _split(ops: Ops, shares: Sequence[float]) -> Ops:
    """Return memory-bound kernels of all experts as a kernel for each of these ``shares`` of their work."""

    def part(op: Op, share: float) -> Compute:
        assert isinstance(op, Compute)
        assert isinstance(op.kernel, Memory)
        work = {name: getattr(op.kernel, name) * share for name in ("read_bytes", "write_bytes", "flops", "elements")}
        return replace(op, kernel=replace(op.kernel, **work))

    return tuple(part(op, share) for op in ops for share in shares)


def _product_alone(shapes: FrameworkShapes, name: str, role: str, phase: str, m: int, n: int, k: int) -> Ops:
    """Return the product of one expert.

    Without rows there is none, but the gradient of its weight is set to zero (aten/src/ATen/native/cuda/Blas.cpp,
    ``addmm_out_cuda_impl``).
    """
    if m * n * k:
        return (Compute(name, Matmul(m, n, k, dtype=shapes.dtype, role=role), StepPhase(phase)),)
    return (memory(phase, f"{name} zero", "zero", 0, shapes.element * m * n, shapes.dtype),) if role == "wgrad" else ()


def _grouped(shapes: FrameworkShapes, experts: Experts, name: str, n: int, k: int, *, split: str, saved: str) -> Node:
    """Return y = x W for every expert of the rank.

    W is n x k, and etp ranks ``split`` it by ``column`` or by ``row``.
    """
    shapes = replace(shapes, fills_buckets=shapes.fills_expert_buckets)
    name, local = f"moe.{name}", len(experts.loads)
    x_bytes, y_bytes = (float(shapes.element * experts.worked_on * size) for size in (k, n))
    params = local * n * k

    def products(phase: str, role: str, n: int, k: int) -> Ops:
        """Return all experts' products, in one kernel or one after another."""
        called = name if role == "fwd" else f"{name} {role}"
        if shapes.framework.experts.one_by_one:
            sizes = ((n, k, load) if role == "wgrad" else (load, n, k) for load in experts.loads)
            return tuple(op for one in sizes for op in _product_alone(shapes, called, role, phase, *one))
        accumulate = role == "wgrad" and shapes.accumulates_in_product
        out_dtype = shapes.grad_dtype if accumulate else ""
        kernel = GroupedMatmul(
            experts.loads, n, k, dtype=shapes.dtype, role=role, out_dtype=out_dtype, accumulate=accumulate
        )
        return (Compute(called, kernel, StepPhase(phase)),)

    around = _around(shapes, experts, split)
    weight_grad: Ops = (*around.gradients, *products("W", "wgrad", n, k))
    if not shapes.accumulates_in_product:
        added = add_gradient(shapes, name, params)
        weight_grad += _split(added, [1 / local] * local) if shapes.framework.experts.one_by_one else added
    if "experts" in shapes.biases:
        if not around.gradients:
            weight_grad += (
                memory("W", f"{name} bias grad", "reduce", y_bytes, shapes.element * local * n, shapes.dtype, n),
            )
        weight_grad += add_gradient(shapes, f"{name} bias", local * n)
    weight_grad_bytes = 0.0 if shapes.accumulates_in_product else new_gradient_bytes(shapes, params)
    node = Node(
        forward=(*products("F", "fwd", n, k), *around.forward),
        input_grad=(*around.before, *products("B", "dgrad", k, n), *around.behind),
        weight_grad=weight_grad,
        saved=(Tensor(saved, x_bytes),),
        saved_for_weights=(Tensor(saved, x_bytes),),
        grad_bytes=x_bytes + y_bytes + weight_grad_bytes,
        output_grad_bytes=y_bytes,
        weight_grad_bytes=weight_grad_bytes,
        weights=_expert_weights(shapes, experts, name, n, k, split=split),
    )
    return in_low_precision(shapes, node, name, experts.worked_on, n, k, loads=experts.loads)


def _expert_weights(
    shapes: FrameworkShapes, experts: Experts, name: str, n: int, k: int, *, split: str
) -> tuple[Weight, ...]:
    """Return the weights of a product of all experts of a rank, one expert after the other; see `_grouped`."""
    local, over = len(experts.loads), ("ep", "etp")
    wide, deep = (n, k * experts.etp) if split == "row" else (n * experts.etp, k)
    shape, whole = (local, n, k), (experts.experts, wide, deep)
    weight = Weight(
        weight_name(name),
        shape,
        whole,
        shapes.dtype,
        sharded_over=over,
        gradient_product=f"{name} wgrad",
        tensors=local if shapes.framework.experts.one_by_one else 1,
    )
    if "experts" not in shapes.biases:
        return (weight,)
    bias = Weight(weight_name(name, "bias"), (local, n), (experts.experts, wide), shapes.dtype, sharded_over=over)
    return (weight, bias)


def _shared_gate(shapes: FrameworkShapes, experts: Experts) -> tuple[Node, ...]:
    """Return the gate of the shared experts' output: a product with one column, its sigmoid, and a weighing of rows.

    Every tensor-parallel rank holds its weight, and works on its rows (Megatron-Core, moe/shared_experts.py).
    """
    if not experts.shared_gate:
        return ()
    name, numbers = "shared.gate", float(shapes.element * shapes.rows)
    weight = Weight(
        weight_name(name),
        (1, shapes.hidden),
        (1, shapes.hidden),
        shapes.dtype,
        partial_rows=1 if shapes.sequence_parallel else 0,
        gradient_product=f"{name} wgrad",
    )
    rows = shapes.row_bytes
    return (
        Node(
            forward=(
                product(shapes, name, "fwd", shapes.rows, 1, shapes.hidden),
                memory("F", f"{name} sigmoid", "activation", numbers, numbers, shapes.dtype),
                memory("F", f"{name} weigh", "weigh", rows + numbers, rows, shapes.dtype),
            ),
            input_grad=(
                memory("B", f"{name} weigh bwd", "weigh", 2 * rows + numbers, rows + numbers, shapes.dtype),
                memory("B", f"{name} sigmoid bwd", "activation_bwd", 2 * numbers, numbers, shapes.dtype),
                product(shapes, name, "dgrad", shapes.rows, shapes.hidden, 1),
                memory("B", f"{name} input grad", "residual", 2 * rows, rows, shapes.dtype),
            ),
            weight_grad=(
                product(shapes, name, "wgrad", 1, shapes.hidden, shapes.rows),
                *add_gradient(shapes, name, shapes.hidden),
            ),
            saved=(Tensor("mlp.normed", rows), Tensor("shared.output", rows)),
            saved_for_weights=(Tensor("mlp.normed", rows),),
            grad_bytes=3 * rows,
            output_grad_bytes=rows,
            weights=(weight,),
        ),
    )


def _shared_experts(shapes: FrameworkShapes, experts: Experts) -> tuple[Node, ...]:
    """Return the experts that every token passes: one MLP, split over tp. Its output is added to that of the others."""
    shapes = replace(shapes, overlaps_tp=shapes.overlaps_tp and not experts.overlaps)
    fc1 = experts.shared_ffn * (2 if shapes.gated else 1)
    bias = "mlp" in shapes.biases
    return (
        linear(shapes, "shared", "fc1", fc1, shapes.hidden, split="column", saved="mlp.normed", bias=bias),
        activation(shapes, "shared", shapes.tokens * experts.shared_ffn),
        linear(shapes, "shared", "fc2", shapes.hidden, experts.shared_ffn, split="row", saved="shared.act", bias=bias),
    )

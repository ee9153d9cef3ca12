"""Frozen weights, and adapters beside them (LoRA, arXiv 2106.09685; QLoRA, arXiv 2305.14314).

Autograd runs what trained weights need, and keeps for it no more than that. Gradients flow from the loss down to the
first trained weight; frozen ones pass them on, and have none of their own.

An adapter of a product y = x W has A, which takes x to ``rank`` columns, and B, which takes these to the columns of its
target. Over tensor-parallel ranks it is split as PEFT splits it (peft/tuners/lora/tp_layer.py). Beside a product that
is split by columns A is whole and B split by columns. Beside one that is split by rows A is split so, and B whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simulator.adapters import ADAPTERS
from simulator.frameworks import Framework
from simulator.frameworks.framework import traffic_kernels
from simulator.models.attention import projected_widths
from simulator.models.linear import add_gradient, new_gradient_bytes, product
from simulator.models.shapes import FrameworkShapes
from simulator.models.tuning import is_of_kinds
from simulator.models.weight_names import weight_name
from simulator.operations.dropout import drop_kernel
from simulator.operations.nodes import Node, Op, Ops, Tensor, comm, memory
from simulator.operations.tuning import ALL_TRAINED, AdapterPlan, ThinProducts
from simulator.operations.weights import NF4_BLOCK, SCALE_BYTES, Weight
from simulator.program import Compute


def tuned(shapes: FrameworkShapes, nodes: Sequence[Node]) -> list[tuple[Node, ...]]:
    """Return, for each of ``nodes`` in their order, the operations in its place: itself and the adapters beside it.

    They compute no more gradients than the trained weights need (``shapes.tuning``).
    """
    if shapes.tuning == ALL_TRAINED:
        return [(node,) for node in nodes]
    reached = shapes.tuning.reached
    families = []
    for node in nodes:
        family = []
        for one in (_with_frozen_weights(shapes, node), *_adapter_nodes(shapes, node)):
            trained = any(weight.trainable for weight in one.weights)
            family.append(_with_needed_gradients(one, trained=trained, reached=reached))
            reached |= trained
        families.append(tuple(family))
    return families


def _with_needed_gradients(node: Node, *, trained: bool, reached: bool) -> Node:
    """Return ``node`` with the gradients that are needed.

    ``reached``: one of its input is; ``trained``: it has weights that are.
    """
    if not reached and not trained:
        return Node(forward=node.forward, forward_bytes=node.forward_bytes, weights=node.weights)
    if not reached:
        return replace(node, input_grad=(), together=())
    if trained or not node.weights:
        return node
    return replace(
        node,
        weight_grad=(),
        gather=(),
        together=(),
        saved=tuple(tensor for tensor in node.saved if tensor not in node.saved_for_weights),
        grad_bytes=max(node.grad_bytes - node.weight_grad_bytes, node.output_grad_bytes),
        weight_grad_bytes=0.0,
        placeholders=(),
    )


def _with_frozen_weights(shapes: FrameworkShapes, node: Node) -> Node:
    """Return ``node`` with its frozen weights marked, and matrices among them made whole before each product."""
    if not node.weights:
        return node
    weights = tuple(_as_trained(shapes, weight) for weight in node.weights)
    back = tuple(op for weight in weights for op in _dequantized(shapes, weight, "B")) if node.input_grad else ()
    return replace(
        node,
        weights=weights,
        forward=(*(op for weight in weights for op in _dequantized(shapes, weight, "F")), *node.forward),
        input_grad=(*back, *node.input_grad),
    )


def _as_trained(shapes: FrameworkShapes, weight: Weight) -> Weight:
    """Return ``weight`` marked as frozen where it is; the projection to the vocabulary is never quantized."""
    if not is_of_kinds(weight, shapes.tuning.frozen):
        return weight
    in_layer = weight.gradient_product and is_of_kinds(weight, ("attention", "mlp"))
    quantized = in_layer and not is_of_kinds(weight, ("router",))
    return replace(weight, trainable=False, storage=shapes.tuning.storage if quantized else "")


def _dequantized(shapes: FrameworkShapes, weight: Weight, phase: str) -> Ops:
    """Return the kernels that make a quantized ``weight`` whole in working precision, before a product of ``phase``.

    bitsandbytes first makes the scales of ``nf4`` whole. It takes them from bytes and adds their mean (functional.py,
    ``dequantize_4bit`` of nested states).
    """
    if not weight.storage:
        return ()
    name = f"{weight.gradient_product.removesuffix(' wgrad')} dequantize"
    count = float(weight.elements)
    scales = count / NF4_BLOCK
    wide = SCALE_BYTES * scales
    return (
        memory(phase, f"{name} scales", "upcast", scales, wide, "fp32"),
        memory(phase, f"{name} mean", "activation", wide, wide, "fp32"),
        replace(
            memory(phase, name, "upcast", 0.5 * count + wide, shapes.element * count, shapes.dtype), dequantizes=True
        ),
    )


@dataclass(frozen=True)
class _Adapter:
    """The adapter of one target: the rows that A takes, the products with both, A (rank x inner) and B (outer x rank).

    All is of this rank.
    """

    rows_in: int
    products: ThinProducts
    a: Weight
    b: Weight


@dataclass(frozen=True)
class _TunedProduct:
    """A product with adapters beside it, as kinds of these see it (`simulator.adapters.AdaptedProduct`).

    ``matrix``: its weight, marked as frozen; ``source``: its input. ``thin``: shapes in the type of A and B.
    """

    shapes: FrameworkShapes
    thin: FrameworkShapes
    plan: AdapterPlan
    matrix: Weight
    source: Tensor
    adapters: Sequence[_Adapter]

    @property
    def software(self) -> Framework:
        return self.shapes.framework

    @property
    def targets(self) -> Sequence[ThinProducts]:
        return [one.products for one in self.adapters]

    @property
    def storage(self) -> str:
        return self.matrix.storage

    def factors(self) -> tuple[Node, Node]:
        block = self.matrix.gradient_product.partition(".")[0]
        return (
            _products_with_a(self.thin, self.plan, self.adapters, self.source),
            _products_with_b(self.thin, self.plan, self.adapters, _split(self.matrix), block),
        )

    def made_whole(self) -> Ops:
        return _dequantized(self.shapes, self.matrix, "F")

    def column_weights(self, tensor: str) -> tuple[Weight, ...]:
        return tuple(
            Weight(weight_name(f"{one.name}.{tensor}"), (one.outer,), (one.outer,), self.shapes.dtype)
            for one in self.targets
        )


def _adapter_nodes(shapes: FrameworkShapes, node: Node) -> tuple[Node, ...]:
    """Return the operations of the adapters beside the product of ``node``, if it is a target of some."""
    plan = shapes.tuning.adapters
    matrix = next((weight for weight in node.weights if len(weight.shape) == 2 and weight.gradient_product), None)
    if plan is None or matrix is None:
        return ()
    columns = {name: width for name, width in _target_widths(shapes, matrix).items() if name in plan.targets}
    if not columns:
        return ()
    thin = replace(shapes, dtype=plan.dtype)
    adapters = [_adapter(thin, matrix, plan.rank, name, width) for name, width in columns.items()]
    product = _TunedProduct(shapes, thin, plan, _as_trained(shapes, matrix), node.saved_for_weights[0], adapters)
    return ADAPTERS[plan.kind].nodes(product)


def _target_widths(shapes: FrameworkShapes, matrix: Weight) -> Mapping[str, int]:
    """Return the targets that a product has, and how wide each is on this rank; none for products of other names."""
    n = matrix.shape[0]
    module = matrix.name.removesuffix(".weight")
    if module == "attention.qkv":
        return {**projected_widths(shapes), "qkv": n}
    if module == "attention.proj":
        return {"o": n}
    if module.startswith("attention."):
        return {module.removeprefix("attention."): n}
    if module in ("mlp.fc1", "mlp.shared_experts.fc1"):
        return {"gate": n // 2, "up": n // 2, "gate_up": n} if shapes.gated else {"up": n}
    if module in ("mlp.gate", "mlp.up"):
        return {module.removeprefix("mlp."): n}
    return {"down": n} if module in ("mlp.fc2", "mlp.shared_experts.fc2") else {}


def _split(matrix: Weight) -> str:
    """Return how a matrix is split over tensor-parallel ranks: ``column``, ``row`` or ``none``."""
    if "tp" not in matrix.sharded_over:
        return "none"
    return "row" if matrix.name.endswith((".proj.weight", ".fc2.weight")) else "column"


def _adapter(shapes: FrameworkShapes, matrix: Weight, rank: int, target: str, width: int) -> _Adapter:
    """Return the adapter of ``target``, ``width`` columns of the product of ``matrix``.

    Where every rank works on its own rows, it makes a part of the gradients of a matrix that is not split.
    """
    split, inner = _split(matrix), matrix.shape[1]
    base = f"{matrix.gradient_product.partition('.')[0]}.{target}"
    shared = matrix.partial_rows if split == "column" and target in ("k", "v", "qkv") else 0
    copies = shapes.kv_replicas if target in ("k", "v") else 1
    whole = width * shapes.tp // copies if split == "column" else width
    if target == "qkv":
        whole = matrix.whole[0]
    rows_in = shapes.tokens if split == "row" else shapes.rows
    rows_out = shapes.tokens if split == "column" else shapes.rows
    partial = shapes.sequence_parallel
    over: tuple[str, ...] = ("tp",)
    a = Weight(
        weight_name(f"{base}.lora_A"),
        (rank, inner),
        (rank, matrix.whole[1]),
        shapes.dtype,
        sharded_over=over if split == "row" else (),
        partial_rows=rank if partial and split != "row" else 0,
        gradient_product=f"{base}.lora_A wgrad",
    )
    b = Weight(
        weight_name(f"{base}.lora_B"),
        (width, rank),
        (whole, rank),
        shapes.dtype,
        sharded_over=over if split == "column" else (),
        partial_rows=min(shared, width) if split == "column" else width if partial else 0,
        gradient_product=f"{base}.lora_B wgrad",
    )
    return _Adapter(rows_in, ThinProducts(base, rows_out, inner, rank, width), a, b)


def _products_with_a(
    shapes: FrameworkShapes, chosen: AdapterPlan, adapters: Sequence[_Adapter], source: Tensor
) -> Node:
    """Return the products with A of the tensor ``source``, or with dropout of a copy of it for each adapter.

    Autograd adds up the gradients that reach the input.
    """
    forward: list[Op] = []
    input_grad: list[Op] = []
    weight_grad: list[Op] = []
    saved: list[Tensor] = []
    largest = 0.0
    for one in adapters:
        name, elements = f"{one.products.name}.lora_A", one.rows_in * one.products.inner
        nbytes = float(shapes.element * elements)
        if chosen.dropout:
            forward.append(drop_kernel(shapes, f"{one.products.name} dropout", elements))
            saved += [
                Tensor(f"{one.products.name} dropped", nbytes),
                Tensor(f"{one.products.name} mask", float(elements)),
            ]
        forward.append(product(shapes, name, "fwd", one.rows_in, chosen.rank, one.products.inner))
        input_grad.append(product(shapes, name, "dgrad", one.rows_in, one.products.inner, chosen.rank))
        if chosen.dropout:
            input_grad.append(
                memory("B", f"{one.products.name} dropout bwd", "dropout_bwd", nbytes + elements, nbytes, shapes.dtype)
            )
        input_grad += traffic_kernels(
            "B", one.products.name, (shapes.framework.adapters.input_summed,), nbytes, shapes.dtype
        )
        weight_grad += _weight_gradient(shapes, name, chosen.rank, one.products.inner, one.rows_in)
        largest = max(largest, nbytes)
    thin = float(shapes.element * adapters[0].rows_in * chosen.rank * len(adapters))
    new = max(new_gradient_bytes(shapes, one.a.elements) for one in adapters)
    return Node(
        forward=tuple(forward),
        input_grad=tuple(input_grad),
        weight_grad=tuple(weight_grad),
        saved=tuple(saved) or (source,),
        grad_bytes=2 * largest + thin,
        output_grad_bytes=thin,
        weight_grad_bytes=new,
        weights=tuple(one.a for one in adapters),
    )


def _products_with_b(
    shapes: FrameworkShapes, chosen: AdapterPlan, adapters: Sequence[_Adapter], split: str, block: str
) -> Node:
    """Return the products with B, and the exchange of ``rank`` columns between tensor-parallel ranks before them."""
    forward: list[Op] = []
    input_grad: list[Op] = []
    weight_grad: list[Op] = []
    saved: list[Tensor] = []
    whole = 0.0
    for one in adapters:
        name, rank = f"{one.products.name}.lora_B", chosen.rank
        before, after = _exchange_between(shapes, split, block, float(shapes.element * shapes.tokens * rank))
        forward += [*before, product(shapes, name, "fwd", one.products.rows, one.products.outer, rank)]
        input_grad += [product(shapes, name, "dgrad", one.products.rows, rank, one.products.outer), *after]
        weight_grad += _weight_gradient(shapes, name, one.products.outer, rank, one.products.rows)
        saved.append(Tensor(f"{one.products.name} lora", float(shapes.element * one.products.rows * rank)))
        whole += float(shapes.element * one.products.rows * one.products.outer)
    new = max(new_gradient_bytes(shapes, one.b.elements) for one in adapters)
    return Node(
        forward=tuple(forward),
        input_grad=tuple(input_grad),
        weight_grad=tuple(weight_grad),
        saved=tuple(saved),
        grad_bytes=2 * whole,
        output_grad_bytes=whole,
        weight_grad_bytes=new,
        weights=tuple(one.b for one in adapters),
    )


def _exchange_between(shapes: FrameworkShapes, split: str, block: str, nbytes: float) -> tuple[Ops, Ops]:
    """Return the communication of ``nbytes`` between A and B, forward and backward."""
    if shapes.tp == 1 or split == "none":
        return (), ()
    gathered = (comm("all_gather", block, nbytes),) if shapes.sequence_parallel else ()
    summed = (comm("reduce_scatter" if shapes.sequence_parallel else "all_reduce", block, nbytes),)
    return (gathered, summed) if split == "column" else (summed, gathered)


def _weight_gradient(shapes: FrameworkShapes, name: str, n: int, k: int, rows: int) -> Ops:
    """Return the product that makes the gradient of an n x k matrix, and its addition to the buffer."""
    gradient: Compute = product(shapes, name, "wgrad", n, k, rows)
    return (gradient,) if shapes.accumulates_in_product else (gradient, *add_gradient(shapes, name, n * k))

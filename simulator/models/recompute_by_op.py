"""Recomputation by operation, torchtitan's selective activation checkpointing "op": the outputs of attention, of every
other product and of what reduces or exchanges between ranks are kept, everything else of a layer runs again.

github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py (``_apply_op_sac``) and the models' lists
of ops whose outputs are saved: ``aten.mm``, every second one of a layer not, SDPA, ``reduce_scatter_tensor``,
``all_to_all_single``. Batched and grouped products are others than ``aten.mm`` and run again, as the router's product
does (``per_op_sac_force_recompute_mm_shapes_by_fqns``), which is not counted among the products either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.models.parts import Part
from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Op, Tensor
from simulator.operations.shapes import Shapes
from simulator.program import AllToAll, Attention, Beside, Comm, Compute, Matmul, StepPhase

#: Communication whose result is kept; all-reduced ones come again, and gathered ones for what does.
KEPT_COMMS = frozenset(("reduce_scatter", "all_to_all"))
#: Queries before keys and values, as torchtitan's latent attention multiplies.
_ORDER = ("attn.q", "attn.q_down", "attn.q_up", "attn.kv_down", "attn.kv_up")
_INPUTS = frozenset(("attn.q", "attn.k", "attn.v", "attn.k expanded", "attn.v expanded"))


class _Piece(NamedTuple):
    """One of torchtitan's products, of which ours may hold several side by side: the tensor that it writes, named as
    who reads it names it, its ``width`` in columns, and whether it is ``kept``."""

    tensor: str
    width: int
    kept: bool


def recomputed_by_op(z: Shapes, x: Experts | None, nodes: Sequence[Node], part: Part) -> Part:
    """``part`` of ``nodes``, a layer, with its operations recomputed but for those kept."""
    pieces = _pieces(z, nodes)
    outputs = _outputs(z, x, nodes, pieces)
    kept = {"input": z.row_bytes}
    for tensor in outputs:
        kept[tensor.name] = kept.get(tensor.name, 0.0) + tensor.nbytes
    # What is kept of a tensor need not be made again.
    made = {tensor.name: tensor.nbytes for tensor in (*part.saved, *part.recomputed)}
    rest = {name: nbytes - kept.get(name, 0.0) for name, nbytes in made.items()}
    return replace(
        part,
        saved=tuple(Tensor(name, nbytes) for name, nbytes in kept.items()),
        recomputed=tuple(Tensor(name, nbytes) for name, nbytes in rest.items() if nbytes > 0),
        recompute=tuple(again for node in nodes for again in _again(node, pieces)),
    )


def _pieces(z: Shapes, nodes: Sequence[Node]) -> dict[str, list[_Piece]]:
    """The pieces of each product of a layer by its name. The first, third ... is kept, in torchtitan's order."""
    widths = {op.name: kernel.n for op, kernel in _products(nodes)}
    ordered = sorted(widths, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    found: dict[str, list[_Piece]] = {}
    count = 0
    for name in ordered:
        found[name] = []
        for tensor, width in _written(z, name, widths[name]):
            found[name].append(_Piece(tensor, width, kept=count % 2 == 0))
            count += 1
    return found


def _products(nodes: Sequence[Node]) -> Iterator[tuple[Compute, Matmul]]:
    """Products with a weight, chunks of those that are split in a ring included, but for the router's."""
    for op in (op for node in nodes for op in _computes(node)):
        if product := _product(op):
            yield op, product


def _product(op: Compute) -> Matmul | None:
    """The kernel of ``op`` where it is one of those products."""
    kernel = op.kernel
    return kernel if isinstance(kernel, Matmul) and kernel.batch == 1 and op.name != "moe.router" else None


def _computes(node: Node) -> Iterator[Compute]:
    """Kernels of the forward pass, those beside communication included."""
    for op in node.forward:
        match op:
            case Compute():
                yield op
            case Beside():
                yield from op.kernels
            case Comm():
                pass


def _written(z: Shapes, name: str, n: int) -> Iterator[tuple[str, int]]:
    """Tensors that a product ``n`` columns wide writes, each by a product of torchtitan's."""
    block, _, which = name.partition(".")
    if name == "attn.qkv":
        turned = " before rope" if z.position == "rope" else ""
        yield from ((f"attn.q{turned}", z.q_width), (f"attn.k{turned}", z.kv_width), ("attn.v", z.kv_width))
    elif which == "fc1" and z.gated:
        yield from ((f"{block}.pre", n // 2),) * 2
    elif which in ("q_down", "kv_down"):
        yield f"{name.removesuffix('_down')}_compressed", n
    else:
        yield f"{block}.pre" if which == "fc1" else f"{name} out", n


def _outputs(z: Shapes, x: Experts | None, nodes: Sequence[Node], pieces: dict[str, list[_Piece]]) -> Iterator[Tensor]:
    """What is kept beside the layer's input, in bytes; of a ring's chunks each its part."""
    for op, kernel in _products(nodes):
        for piece in pieces[op.name]:
            if piece.kept:
                yield Tensor(piece.tensor, float(z.element * kernel.m * piece.width))
    for node in nodes:
        if _attends(node):
            yield from (tensor for tensor in node.saved if tensor.name not in _INPUTS)
        for one in node.forward:
            comm = one.comm if isinstance(one, Beside) else one
            if isinstance(comm, Comm) and comm.op in KEPT_COMMS:
                yield Tensor(f"{comm.name} out", _received(z, x, comm))


def _received(z: Shapes, x: Experts | None, comm: Comm) -> float:
    """Bytes that a rank has after ``comm``."""
    if comm.op == "reduce_scatter":
        return comm.nbytes / (x.etp if x and comm.axis == "etp" else z.tp)
    if x and isinstance(comm, AllToAll) and comm.axis == "ep" and comm.receive_shares:
        return comm.nbytes * x.received / x.sent
    return comm.nbytes


def _attends(node: Node) -> bool:
    """Whether it is fused attention, over whole sequences or in a ring."""
    return any(isinstance(op.kernel, Attention) for op in _computes(node))


def _again(node: Node, pieces: dict[str, list[_Piece]]) -> Iterator[Op]:
    """The forward operations of ``node`` that run again. What is gathered for a product that is kept whole is not: the
    backward pass gathers it by itself."""
    if _attends(node):
        return
    of_node = [piece for op, _ in _products((node,)) for piece in pieces[op.name]]
    whole = bool(of_node) and all(piece.kept for piece in of_node)
    for op in node.forward:
        match op:
            case Comm():
                if op.op not in KEPT_COMMS and not (whole and op.op == "all_gather"):
                    yield op
            case Compute():
                yield from _product_again(op, pieces)
            case Beside():
                kernels = tuple(again for kernel in op.kernels for again in _product_again(kernel, pieces))
                if op.comm.op in KEPT_COMMS:
                    yield from kernels
                elif kernels:
                    yield replace(op, kernels=kernels)


def _product_again(op: Compute, pieces: dict[str, list[_Piece]]) -> Iterator[Compute]:
    """``op``, a product as wide as what of it is not kept."""
    kernel = _product(op)
    if kernel is None:
        yield replace(op, phase=StepPhase.RECOMPUTE)
    elif width := sum(piece.width for piece in pieces[op.name] if not piece.kept):
        yield replace(op, kernel=replace(kernel, n=width), phase=StepPhase.RECOMPUTE)

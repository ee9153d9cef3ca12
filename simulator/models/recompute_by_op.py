"""Recomputation by operation: torchtitan's selective activation checkpointing "op".

The outputs of attention, of every other product, and of reductions and exchanges between ranks are kept. Everything
else of a layer runs again.

Sources: github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py (``_apply_op_sac``), and the
models' lists of ops whose outputs are saved. These are SDPA, ``reduce_scatter_tensor``, ``all_to_all_single``, and of
``aten.mm`` the first, third, fifth ... of a layer. Batched and grouped products are no ``aten.mm`` and run again. So
does the router's product (``per_op_sac_force_recompute_mm_shapes_by_fqns``), which is not counted among the products
either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.models.parts import Part, checkpoint_carrier
from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Op, Tensor
from simulator.operations.shapes import Shapes
from simulator.program import AllToAll, Attention, Beside, Comm, Compute, Matmul, StepPhase

#: Communication whose result is kept. All-reduces run again, and so do gathers for products that run again.
KEPT_COMMS = frozenset(("reduce_scatter", "all_to_all"))
#: Queries before keys and values, as torchtitan's latent attention multiplies.
_ORDER = ("attn.q", "attn.q_down", "attn.q_up", "attn.kv_down", "attn.kv_up")
_INPUTS = frozenset(("attn.q", "attn.k", "attn.v", "attn.k expanded", "attn.v expanded"))


class _Piece(NamedTuple):
    """One of torchtitan's products, several of which may stand side by side in one of ours.

    It writes ``tensor``, which has the name that its reader gives it and is ``width`` columns wide. ``kept``: this
    output is not computed again.
    """

    tensor: str
    width: int
    kept: bool


def recomputed_by_op(shapes: Shapes, experts: Experts | None, nodes: Sequence[Node], part: Part) -> Part:
    """Return ``part``, a layer of these ``nodes``, with all operations recomputed whose outputs are not kept.

    A layer without a backward pass keeps nothing, and runs nothing again.
    """
    if not part.backward:
        return part
    pieces = _pieces(shapes, nodes)
    outputs = _kept_outputs(shapes, experts, nodes, pieces)
    kept = {"input": shapes.row_bytes}
    for tensor in outputs:
        kept[tensor.name] = kept.get(tensor.name, 0.0) + tensor.nbytes
    # The kept bytes of a tensor need not be computed again.
    needed = {tensor.name: tensor.nbytes for tensor in (*part.saved, *part.recomputed)}
    rest = {name: nbytes - kept.get(name, 0.0) for name, nbytes in needed.items()}
    again = tuple(op for node in nodes for op in _operations_again(node, pieces))
    carrier = checkpoint_carrier(again)
    return replace(
        part,
        saved=tuple(Tensor(name, nbytes) for name, nbytes in kept.items()),
        recomputed=tuple(Tensor(name, nbytes) for name, nbytes in rest.items() if nbytes > 0),
        recompute=tuple(replace(op, carries_checkpoint=True) if op is carrier else op for op in again),
    )


def _pieces(shapes: Shapes, nodes: Sequence[Node]) -> dict[str, list[_Piece]]:
    """Return the pieces of each product of a layer by its name. The first, third ... is kept, in torchtitan's order."""
    widths = {op.name: kernel.n for op, kernel in _products(nodes)}
    ordered = sorted(widths, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    pieces: dict[str, list[_Piece]] = {}
    count = 0
    for name in ordered:
        pieces[name] = []
        for tensor, width in _written_tensors(shapes, name, widths[name]):
            pieces[name].append(_Piece(tensor, width, kept=count % 2 == 0))
            count += 1
    return pieces


def _products(nodes: Sequence[Node]) -> Iterator[tuple[Compute, Matmul]]:
    """Yield the products with a weight, without the router's. Chunks of products in a ring are yielded one by one."""
    for op in (op for node in nodes for op in _computes(node)):
        if product := _product(op):
            yield op, product


def _product(op: Compute) -> Matmul | None:
    """Return the kernel of ``op`` where it is a product with a weight, and not the router's."""
    kernel = op.kernel
    return kernel if isinstance(kernel, Matmul) and kernel.batch == 1 and op.name != "moe.router" else None


def _computes(node: Node) -> Iterator[Compute]:
    """Yield the kernels of the forward pass, those beside communication included."""
    for op in node.forward:
        match op:
            case Compute():
                yield op
            case Beside():
                yield from op.kernels
            case Comm():
                pass


def _written_tensors(shapes: Shapes, name: str, n: int) -> Iterator[tuple[str, int]]:
    """Yield name and width of the tensors that a product ``n`` columns wide writes.

    Torchtitan has a product for each of them.
    """
    block, _, which = name.partition(".")
    if name == "attn.qkv":
        turned = " before rope" if shapes.position == "rope" else ""
        yield from (
            (f"attn.q{turned}", shapes.q_width),
            (f"attn.k{turned}", shapes.kv_width),
            ("attn.v", shapes.kv_width),
        )
    elif which == "fc1" and shapes.gated:
        yield from ((f"{block}.pre", n // 2),) * 2
    elif which in ("q_down", "kv_down"):
        yield f"{name.removesuffix('_down')}_compressed", n
    else:
        yield f"{block}.pre" if which == "fc1" else f"{name} out", n


def _kept_outputs(
    shapes: Shapes, experts: Experts | None, nodes: Sequence[Node], pieces: dict[str, list[_Piece]]
) -> Iterator[Tensor]:
    """Yield the kept tensors beside the layer's input; of a product in a ring, a part for each chunk."""
    for op, kernel in _products(nodes):
        for piece in pieces[op.name]:
            if piece.kept:
                yield Tensor(piece.tensor, float(shapes.element * kernel.m * piece.width))
    for node in nodes:
        if _is_fused_attention(node):
            yield from (tensor for tensor in node.saved if tensor.name not in _INPUTS)
        for one in node.forward:
            comm = one.comm if isinstance(one, Beside) else one
            if isinstance(comm, Comm) and comm.op in KEPT_COMMS:
                yield Tensor(f"{comm.name} out", _received_bytes(shapes, experts, comm))


def _received_bytes(shapes: Shapes, experts: Experts | None, comm: Comm) -> float:
    """Return the bytes that a rank has after ``comm``."""
    if comm.op == "reduce_scatter":
        return comm.nbytes / (experts.etp if experts and comm.axis == "etp" else shapes.tp)
    if experts and isinstance(comm, AllToAll) and comm.axis == "ep" and comm.receive_shares:
        return comm.nbytes * experts.received / experts.sent
    return comm.nbytes


def _is_fused_attention(node: Node) -> bool:
    """Return True where ``node`` is fused attention, over whole sequences or in a ring."""
    return any(isinstance(op.kernel, Attention) for op in _computes(node))


def _operations_again(node: Node, pieces: dict[str, list[_Piece]]) -> Iterator[Op]:
    """Yield the forward operations of ``node`` that run again.

    Rows are not gathered again for a product whose whole output is kept: the backward pass gathers them by itself.
    """
    if _is_fused_attention(node):
        return
    node_pieces = [piece for op, _ in _products((node,)) for piece in pieces[op.name]]
    whole = bool(node_pieces) and all(piece.kept for piece in node_pieces)
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
    """Yield ``op`` as it runs again; a product has the columns alone that are not kept."""
    kernel = _product(op)
    if kernel is None:
        yield replace(op, phase=StepPhase.RECOMPUTE)
    elif width := sum(piece.width for piece in pieces[op.name] if not piece.kept):
        yield replace(op, kernel=replace(kernel, n=width), phase=StepPhase.RECOMPUTE)

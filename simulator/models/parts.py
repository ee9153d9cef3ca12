"""A part of the model: the kernels of each of its passes, its weights, and the bytes that it keeps between passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from simulator.models.adapters import tuned
from simulator.models.shapes import FrameworkShapes
from simulator.operations.nodes import Node, Op, Ops, Tensor, run_again, unique
from simulator.operations.weights import Weight
from simulator.program import AllToAll, Compute, StepPhase


@dataclass(frozen=True)
class Part:
    """Operations and bytes of a part of the model on one tensor-parallel rank, per micro-batch.

    Ops are in launch order. ``forward`` has phase F, ``recompute`` (run again before the backward pass) R,
    ``input_grad`` B and ``weight_grad`` W. ``backward`` is the unsplit backward pass, B and W as autograd interleaves
    them. ``weights`` are those that the operations read.

    The first ``leading_weights`` of these have nothing that is trained before them in the part. Products with them pass
    no gradient on, unless something before the part is trained.

    ``saved`` is kept from forward to backward; ``forward_bytes`` are alive only while the forward pass runs.
    ``recomputed`` exists again while the backward pass runs; ``grad_bytes`` are the largest set of gradients alive
    then. ``placeholders`` stay for good (see `Node`).

    Where the weight gradient is a pass of its own, the input gradient leaves it ``held_for_weights``. These are the
    inputs of all nodes with weights, recomputed ones too, and the gradients of their outputs. For GELU, ffn 4h and
    2-byte activations, products need 14 and 18 s b h bytes of them. These are the 32 s b h of arXiv 2401.10241, table
    1. The two norms, which the paper leaves out, need 8. ``weight_grad_bytes`` are alive beside them.

    ``left_gradient_bytes``: gradients that the backward pass makes and leaves for the optimizer. ``trailing``: tensors
    in ``saved`` that only operations behind the last ones with weights keep. ``graph_stays``: a separate input gradient
    gives back at its end the tensors in ``saved`` that the weight gradient does not need. It also leaves
    ``input_gradient_bytes`` until the step has ended. ``is_unit``: the part is sharded (torch's ``fully_shard``) and
    offloaded by itself, as layers and the projection of a multi-token-prediction module are. Embeddings and heads are
    not.
    """

    name: str
    forward: Ops
    recompute: Ops
    input_grad: Ops
    weight_grad: Ops
    backward: Ops
    weights: tuple[Weight, ...]
    saved: tuple[Tensor, ...]
    recomputed: tuple[Tensor, ...]
    grad_bytes: float
    held_for_weights: tuple[Tensor, ...]
    weight_grad_bytes: float
    forward_bytes: float = 0.0
    placeholders: tuple[Tensor, ...] = ()
    is_unit: bool = False
    left_gradient_bytes: float = 0.0
    trailing: tuple[Tensor, ...] = ()
    graph_stays: bool = False
    leading_weights: int = 0
    input_gradient_bytes: float = 0.0

    def ops(self, kind: str) -> Ops:
        """Return the ops of a pass (F, B, I or W)."""
        match kind:
            case "F":
                return self.forward
            case "B":
                return (*self.recompute, *self.backward)
            case "I":
                return (*self.recompute, *self.input_grad)
            case _:
                return self.weight_grad

    @cached_property
    def saved_bytes(self) -> float:
        """Bytes held from forward to backward, per micro-batch."""
        return sum(tensor.nbytes for tensor in self.saved)

    @cached_property
    def workspace_bytes(self) -> float:
        """Extra bytes held only while this part's backward pass, with its recomputation, runs."""
        return sum(tensor.nbytes for tensor in self.recomputed) + self.grad_bytes

    @cached_property
    def held_bytes(self) -> float:
        """Bytes held from the input gradient to the weight gradient, per micro-batch."""
        return sum(tensor.nbytes for tensor in self.held_for_weights)

    @cached_property
    def input_workspace_bytes(self) -> float:
        """Extra bytes held only while this part's input gradient, with its recomputation, runs."""
        kept = {tensor.name for tensor in self.held_for_weights}
        return sum(tensor.nbytes for tensor in self.recomputed if tensor.name not in kept) + self.grad_bytes


class PassBytes(NamedTuple):
    """Bytes of one pass: held from its start, given back at its end, and held only while it runs."""

    alloc: float
    free: float
    workspace: float


def pass_bytes(parts: Sequence[Part], kind: str) -> PassBytes:
    """Return the bytes that a pass (F, B, I or W) of one micro-batch through a stage holds and gives back.

    A forward pass takes the saved bytes, and a whole backward pass gives them back. A split one first exchanges them
    for the bytes that the weight gradient needs (less, or more where these are recomputed). The weight gradient gives
    these back. Gradients that are left for the optimizer stay.

    Part after part takes or gives back its own bytes. The workspace is the most that any moment inside the pass needs
    beside all of these.
    """
    saved, for_weights = [part.saved_bytes for part in parts], [part.held_bytes for part in parts]
    left = [part.left_gradient_bytes for part in parts]
    match kind:
        case "F":
            return PassBytes(
                sum(saved), 0.0, _fullest_moment([part.forward_bytes for part in parts[::-1]], saved[::-1])
            )
        case "B":
            return _backward_bytes(saved, left, [part.workspace_bytes for part in parts])
        case "I" if parts and parts[0].graph_stays:
            return _beside_the_graph(parts)
        case "I":
            return _backward_bytes(saved, for_weights, [part.input_workspace_bytes for part in parts])
        case _:
            return _backward_bytes(for_weights, left, [part.weight_grad_bytes for part in parts])


def _backward_bytes(before: Sequence[float], after: Sequence[float], workspaces: Sequence[float]) -> PassBytes:
    """Return the bytes of a pass that goes through parts from the last to the first.

    ``before`` and ``after`` are the bytes that each part keeps before and after its turn.
    """
    freed = [one - other for one, other in zip(before, after, strict=True)]
    more = max(-sum(freed), 0.0)
    return PassBytes(more, max(sum(freed), 0.0), max(_fullest_moment(workspaces[::-1], freed[::-1]) - more, 0.0))


def swapped_bytes(parts: Sequence[Part]) -> tuple[float, float]:
    """Return the bytes of activations of ``parts`` that an input gradient takes at its start and gives back at its end.

    Where the graph stays while it runs these are all that it makes and all that it lets go, else the difference of
    both.
    """
    if any(part.graph_stays for part in parts):
        new = sum(_bytes_not_in(part.held_for_weights, part.saved) for part in parts)
        return new, sum(_bytes_not_in(part.saved, part.held_for_weights) for part in parts)
    more = sum(part.held_bytes - part.saved_bytes for part in parts)
    return max(more, 0.0), max(-more, 0.0)


def _beside_the_graph(parts: Sequence[Part]) -> PassBytes:
    """Return the bytes of an input gradient during which all saved tensors stay.

    Part after part adds the gradients of its outputs to them.
    """
    new, freed = swapped_bytes(parts)
    each = [_bytes_not_in(part.held_for_weights, part.saved) for part in parts]
    added = _backward_bytes([0.0] * len(parts), each, [part.input_workspace_bytes for part in parts])
    left = sum(part.input_gradient_bytes for part in parts)
    return PassBytes(new + left, freed, max(added.workspace - left, 0.0))


def _bytes_not_in(tensors: Sequence[Tensor], excluded: Sequence[Tensor]) -> float:
    """Return the bytes of the ``tensors`` whose names are not among those ``excluded``."""
    names = {tensor.name for tensor in excluded}
    return sum(tensor.nbytes for tensor in tensors if tensor.name not in names)


def _fullest_moment(workspaces: Sequence[float], freed: Sequence[float]) -> float:
    """Return the most bytes that a pass needs at once beside its kept bytes: the workspace of a part, less freed bytes.

    Each part has given up its ``freed`` bytes when the next one runs. In a forward pass, whose parts are listed from
    the last, these are bytes that are not taken yet.
    """
    before = itertools.accumulate(freed, initial=0.0)
    return max(0.0, max(workspace - less for workspace, less in zip(workspaces, before, strict=False)))


def by_part(parts: Sequence[Part], kind: str) -> list[tuple[int, ...]]:
    """Cut a pass by part: return the indices of the parts of each piece, in the order in which they run.

    A part that runs nothing goes with the one before it, the first with the one after it.
    """
    pieces: list[list[int]] = [[]]
    for index in range(len(parts)) if kind == "F" else reversed(range(len(parts))):
        if parts[index].ops(kind) and any(parts[other].ops(kind) for other in pieces[-1]):
            pieces.append([])
        pieces[-1].append(index)
    return [tuple(piece) for piece in pieces]


class Checkpoint(NamedTuple):
    """Nodes that keep nothing but their ``inputs``, and run forward again before the backward pass.

    Nodes behind them still keep the outputs that they need, except tensors named in ``dropped``, which are computed
    again too. ``apart``: each node is run again by itself.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    dropped: tuple[str, ...] = ()
    apart: bool = False

    @property
    def groups(self) -> tuple[tuple[Node, ...], ...]:
        """Return the nodes that are run again together."""
        return tuple((node,) for node in self.nodes) if self.apart else (self.nodes,)


def checkpoint_carrier(again: Iterable[Op]) -> Compute | None:
    """Return the kernel that carries a checkpoint (see `Compute`), of the operations that this runs ``again``."""
    kernels = [op for op in again if isinstance(op, Compute)]
    return next((op for op in kernels if op.computes_attention), kernels[0] if kernels else None)


def part_of(
    shapes: FrameworkShapes,
    name: str,
    nodes: Sequence[Node],
    checkpoints: Sequence[Checkpoint] = (),
    *,
    held_gradient_bytes: float = 0.0,
    is_unit: bool = False,
) -> Part:
    """Return the part that runs ``nodes``, trained as ``shapes.tuning`` says.

    ``held_gradient_bytes`` is the gradient that waits beside the block. Of ``checkpoints`` those count that have a
    backward pass: autograd keeps nothing else for one, and calls nothing that would run again.
    """
    families = tuned(shapes, nodes)
    family_by_id = {id(node): family for node, family in zip(nodes, families, strict=True)}
    checkpoints = [one for one in checkpoints if any(_runs_back(family_by_id[id(node)]) for node in one.nodes)]
    checkpointed_ids = {id(node) for checkpoint in checkpoints for node in checkpoint.nodes}
    again = {id(one) for node in checkpointed_ids for one in family_by_id[node]}
    nodes = [one for family in families for one in family]
    checkpointed = [node for node in nodes if id(node) in again]
    dropped = {tensor for checkpoint in checkpoints for tensor in checkpoint.dropped}
    kept = [tensor for checkpoint in checkpoints for tensor in checkpoint.inputs]
    kept += [tensor for node in nodes if id(node) not in again for tensor in node.saved]
    saved = unique(tensor for tensor in kept if tensor.name not in dropped)
    saved_names = {tensor.name for tensor in saved}
    recomputed = unique(tensor for node in nodes for tensor in node.saved if tensor.name not in saved_names)
    back = tuple(reversed(nodes))
    carriers = {
        id(checkpoint_carrier(op for node in group for one in family_by_id[id(node)] for op in one.forward))
        for checkpoint in checkpoints
        for group in checkpoint.groups
    }
    return Part(
        name=name,
        forward=tuple(op for node in nodes for op in node.forward),
        recompute=tuple(
            run_again(op, carries_checkpoint=id(op) in carriers) for node in checkpointed for op in node.forward
        ),
        input_grad=tuple(op for node in back for op in node.input_grad),
        weight_grad=tuple(op for node in back for op in (*node.gather, *node.weight_grad)),
        backward=_with_delays(shapes, tuple(op for node in back for op in node.backward)),
        weights=tuple(weight for node in nodes for weight in node.weights),
        saved=saved,
        recomputed=recomputed,
        grad_bytes=held_gradient_bytes + max(node.grad_bytes for node in nodes),
        held_for_weights=_held_for_weights(nodes),
        weight_grad_bytes=max(node.weight_grad_bytes for node in nodes),
        forward_bytes=max(*(node.forward_bytes for node in nodes), _checkpoint_forward_bytes(checkpointed)),
        placeholders=unique(tensor for node in nodes for tensor in node.placeholders),
        is_unit=is_unit,
        trailing=_trailing(nodes),
        leading_weights=_leading_weights(nodes),
    )


def _runs_back(family: Iterable[Node]) -> bool:
    return any(node.backward for node in family)


def _with_delays(shapes: FrameworkShapes, ops: Ops) -> Ops:
    """Return the ``ops`` of a backward pass, gradients of weights where they may wait behind the next all-to-all.

    What is left comes at the end of the part (Megatron-Core's ``delay_wgrad_compute``).
    """
    if not shapes.delays_weight_grad:
        return ops
    order: list[Op] = []
    waiting: list[Op] = []
    for op in ops:
        if isinstance(op, Compute) and op.phase == StepPhase.WEIGHT_GRADIENT:
            waiting.append(op)
            continue
        order.append(op)
        if isinstance(op, AllToAll):
            order += waiting
            waiting = []
    return (*order, *waiting)


def _checkpoint_forward_bytes(checkpointed: Sequence[Node]) -> float:
    """Return the bytes that a forward pass which keeps nothing has alive at most.

    These are the inputs of an operation and its output, which is the input of the next.
    """
    saved = [sum(tensor.nbytes for tensor in node.saved) for node in checkpointed if node.saved]
    return max((one + other for one, other in itertools.pairwise(saved)), default=0.0)


_OUTPUT_GRADIENT = "output gradient "


def output_gradients(part: Part) -> tuple[Tensor, ...]:
    """Return the gradients of outputs in ``held_for_weights`` of ``part``, in the order of its nodes."""
    return tuple(tensor for tensor in part.held_for_weights if tensor.name.startswith(_OUTPUT_GRADIENT))


def _held_for_weights(nodes: Sequence[Node]) -> tuple[Tensor, ...]:
    """Return the inputs and the gradients of the outputs of the nodes that have a weight gradient."""
    weighted = [node for node in nodes if node.weight_grad]
    inputs = unique(tensor for node in weighted for tensor in node.saved)
    gradients = (Tensor(f"{_OUTPUT_GRADIENT}{n}", node.output_grad_bytes) for n, node in enumerate(weighted))
    return (*inputs, *gradients)


def _trailing(nodes: Sequence[Node]) -> tuple[Tensor, ...]:
    """Return the tensors that only the nodes behind the last one with a weight gradient keep."""
    last = max((number for number, node in enumerate(nodes) if node.weight_grad), default=-1)
    before = {tensor.name for node in nodes[: last + 1] for tensor in node.saved}
    return unique(tensor for node in nodes[last + 1 :] for tensor in node.saved if tensor.name not in before)


def _leading_weights(nodes: Iterable[Node]) -> int:
    """Return the number of weights up to those of the first node that has trained ones."""
    count = 0
    for node in nodes:
        count += len(node.weights)
        if any(weight.trainable for weight in node.weights):
            break
    return count


def weights_of(parts: Iterable[Part]) -> tuple[Weight, ...]:
    """Return the weights of all ``parts``, part by part."""
    return tuple(weight for part in parts for weight in part.weights)

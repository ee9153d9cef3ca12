"""A transformer in parts: a layer, the embedding, the head, each as the kernels of one tensor-parallel rank.

The model is Megatron-LM's (arXiv 1909.08053, 2104.04473, 2205.05198): pre-norm layers whose products are split by
column and by row, a vocabulary split over the ranks, and fp32 loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from simulator.model.attention import attention_inputs, split_qkv
from simulator.model.context import core_attention
from simulator.model.experts import Experts, experts, mixture
from simulator.model.latent import Latent, latent, latent_projections, up_inputs
from simulator.model.mtp import joined
from simulator.model.nodes import (
    Node,
    Op,
    Ops,
    Tensor,
    activation,
    add_gradient,
    comm,
    dropout,
    fuse,
    linear,
    memory,
    new_gradient_bytes,
    norm,
    residual,
    rope,
    unique,
)
from simulator.model.shapes import ANY_SEAT, Seat, Shapes, shapes
from simulator.program import Attention, Beside, Comm, Compute, Matmul

if TYPE_CHECKING:
    from simulator.config import Workload


@dataclass(frozen=True)
class Part:
    """What one tensor-parallel rank does for a part of the model, per micro-batch.

    Ops are in launch order. ``forward`` has phase F, ``recompute`` (run again before the backward pass) R,
    ``input_grad`` B, ``weight_grad`` W; ``backward`` is the unsplit backward pass, B and W as autograd
    interleaves them.
    ``params`` are held by this rank, those of experts in ``expert_params`` apart; of ``params`` ``tp_reduced_params``
    have gradients to be summed over the tensor-parallel ranks once a step.
    ``saved`` is kept from forward to backward; ``forward_bytes`` is alive while the forward pass runs, and
    ``recomputed`` exists again while the backward pass runs; ``grad_bytes`` is the largest set of gradients alive then.
    Where the weight gradient is a pass of its own, ``held_for_weights`` is what the input gradient leaves for it: the
    inputs of everything with weights, recomputed ones too, and the gradients of their outputs; it is all that is then
    held. For GELU, ffn 4h and 2-byte activations these are 14 and 18 s b h bytes of the products, the 32 s b h of arXiv
    2401.10241, table 1, and 8 of the two norms, which the paper leaves out. ``weight_grad_bytes`` is alive beside it.
    ``forward_bytes`` is alive only while the forward runs; ``placeholders`` stay for good (see `Node`).
    """

    name: str
    forward: Ops
    recompute: Ops
    input_grad: Ops
    weight_grad: Ops
    backward: Ops
    params: int
    tp_reduced_params: int
    saved: tuple[Tensor, ...]
    recomputed: tuple[Tensor, ...]
    grad_bytes: float
    held_for_weights: tuple[Tensor, ...]
    weight_grad_bytes: float
    forward_bytes: float = 0.0
    placeholders: tuple[Tensor, ...] = ()
    expert_params: int = 0

    @property
    def params_on(self) -> dict[str, int]:
        """Parameters by the axis of the ranks that hold the same ones: ``dp``, or ``edp`` for those of experts."""
        return {axis: count for axis, count in (("dp", self.params), ("edp", self.expert_params)) if count}

    @property
    def saved_bytes(self) -> float:
        """Bytes held from forward to backward, per micro-batch."""
        return sum(tensor.nbytes for tensor in self.saved)

    @property
    def workspace_bytes(self) -> float:
        """Extra bytes held only while this part's backward pass, with its recomputation, runs."""
        return sum(tensor.nbytes for tensor in self.recomputed) + self.grad_bytes

    @property
    def held_bytes(self) -> float:
        """Bytes held from the input gradient to the weight gradient, per micro-batch."""
        return sum(tensor.nbytes for tensor in self.held_for_weights)

    @property
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
    """What a pass (F, B, I or W) of one micro-batch through a stage holds and gives back.

    A forward takes what is saved, and a whole backward gives it back. A split one goes from that to what the weight
    gradient needs (less, or more where it was recomputed), which the weight gradient gives back. Part after part takes
    or gives its own, so that the workspace beside all of it is what the fullest moment inside the pass needs more.
    """
    saved, held = [part.saved_bytes for part in parts], [part.held_bytes for part in parts]
    match kind:
        case "F":
            return PassBytes(sum(saved), 0.0, _beside([part.forward_bytes for part in parts[::-1]], saved[::-1]))
        case "B":
            return PassBytes(0.0, sum(saved), _beside([part.workspace_bytes for part in parts[::-1]], saved[::-1]))
        case "I":
            gone = [before - after for before, after in zip(saved, held, strict=True)]
            more = max(-sum(gone), 0.0)
            workspace = _beside([part.input_workspace_bytes for part in parts[::-1]], gone[::-1])
            return PassBytes(more, max(sum(gone), 0.0), max(workspace - more, 0.0))
        case _:
            return PassBytes(0.0, sum(held), _beside([part.weight_grad_bytes for part in parts[::-1]], held[::-1]))


def _beside(workspaces: Sequence[float], gone: Sequence[float]) -> float:
    """What is needed at most beside all that a pass holds, when the parts before have given up (in a forward pass: not
    taken yet) what is ``gone`` with them."""
    before = itertools.accumulate(gone, initial=0.0)
    return max(0.0, max(workspace - less for workspace, less in zip(workspaces, before, strict=False)))


class Checkpoint(NamedTuple):
    """Nodes that keep nothing but their ``inputs`` and run forward again before the backward pass. What they hand on is
    kept by those who need it, but for what is ``dropped``, to be computed again too."""

    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    dropped: tuple[str, ...] = ()


def _part(
    name: str, nodes: Sequence[Node], checkpoints: Sequence[Checkpoint] = (), *, held_gradient_bytes: float = 0.0
) -> Part:
    """The part that runs ``nodes``. ``held_gradient_bytes`` is the gradient that waits beside the block."""
    again = {id(node) for checkpoint in checkpoints for node in checkpoint.nodes}
    checkpointed = [node for node in nodes if id(node) in again]
    dropped = {tensor for checkpoint in checkpoints for tensor in checkpoint.dropped}
    kept = [tensor for checkpoint in checkpoints for tensor in checkpoint.inputs]
    kept += [tensor for node in nodes if id(node) not in again for tensor in node.saved]
    saved = unique(tensor for tensor in kept if tensor.name not in dropped)
    held = {tensor.name for tensor in saved}
    recomputed = unique(tensor for node in nodes for tensor in node.saved if tensor.name not in held)
    back = tuple(reversed(nodes))
    return Part(
        name=name,
        forward=tuple(op for node in nodes for op in node.forward),
        recompute=tuple(_again(op) for node in checkpointed for op in node.forward),
        input_grad=tuple(op for node in back for op in node.input_grad),
        weight_grad=tuple(op for node in back for op in (*node.gather, *node.weight_grad)),
        backward=tuple(op for node in back for op in node.backward),
        params=sum(node.params for node in nodes),
        expert_params=sum(node.expert_params for node in nodes),
        tp_reduced_params=sum(node.tp_reduced_params for node in nodes),
        saved=saved,
        recomputed=recomputed,
        grad_bytes=held_gradient_bytes + max(node.grad_bytes for node in nodes),
        held_for_weights=_held_for_weights(nodes),
        weight_grad_bytes=max(node.weight_grad_bytes for node in nodes),
        forward_bytes=max(*(node.forward_bytes for node in nodes), _passing(checkpointed)),
        placeholders=unique(tensor for node in nodes for tensor in node.placeholders),
    )


def _passing(checkpointed: Sequence[Node]) -> float:
    """What a forward pass that keeps nothing has alive at most: the inputs of an operation and its output, which is the
    input of the next."""
    saved = [sum(tensor.nbytes for tensor in node.saved) for node in checkpointed if node.saved]
    return max((one + other for one, other in itertools.pairwise(saved)), default=0.0)


def _held_for_weights(nodes: Sequence[Node]) -> tuple[Tensor, ...]:
    """Inputs and output gradients of the nodes that have a weight gradient."""
    weighted = [node for node in nodes if node.weight_grad]
    inputs = unique(tensor for node in weighted for tensor in node.saved)
    gradients = (Tensor(f"output gradient {n}", node.output_grad_bytes) for n, node in enumerate(weighted))
    return (*inputs, *gradients)


def _again(op: Op) -> Op:
    match op:
        case Compute():
            return replace(op, phase="R")
        case Beside():
            return replace(op, kernels=tuple(replace(kernel, phase="R") for kernel in op.kernels))
        case Comm():
            return op


def layer(workload: Workload, *, recompute: str | None = None, seat: Seat = ANY_SEAT, number: int = 0) -> Part:
    """Transformer layer ``number`` of the model, from 0 on. ``recompute`` (none, selective, full) stands in for the
    workload's own granularity.

    Saved per layer with GELU, ffn 4h, dropout and 2-byte activations, unfused attention:
    s b h (10 + 24/t + 5 a s / h t) bytes, with sequence parallelism s b h / t (34 + 5 a s / h) (arXiv 2205.05198,
    equations 2 and 4); selective recomputation of the core attention drops 5 a s / h, full recomputation keeps the
    input alone.
    """
    moe, chosen = workload.model.moe, workload.training.recompute
    mixed = experts(workload, seat) if moe is not None and moe.here(number) else None
    modules = {"none": (), "selective": tuple(dict.fromkeys(chosen.modules)), "ops": ("ops",), "full": ("layer",)}[
        recompute or chosen.granularity
    ]
    return _layer(shapes(workload, seat), modules, latent(workload), mixed)


@lru_cache(maxsize=1024)
def _layer(z: Shapes, recompute: tuple[str, ...], a: Latent | None, x: Experts | None) -> Part:
    """Cached, so that equal layers are one object and their blocks can be shared."""
    attn_norm = norm(z, "attn.norm", saved="input", residual=True)
    down, up = latent_projections(z, a) if a else (_projections(z), ())
    core = core_attention(z)
    projection = linear(z, "attn", "proj", z.hidden, z.context_width, split="row", saved="attn.context", bias=z.bias)
    add, mlp_norm = _residual_norm(z)
    mixed = mixture(z, x) if x else None
    mlp = mixed.nodes if mixed else _mlp(z)
    nodes = (attn_norm, *down, *up, *core, projection, add, mlp_norm, *mlp, residual(z, "mlp"))
    normed = Tensor("mlp.normed", z.row_bytes)
    # Megatron-LM's --recompute-modules; those that drop their output are its CheckpointWithoutOutput.
    checkpoints = {
        "layer": Checkpoint(nodes, attn_norm.saved),
        "ops": Checkpoint(nodes, () if x or a else _kept_by_op(z)),
        "core_attn": Checkpoint(core, attention_inputs(z)),
        "layernorm": Checkpoint(
            (attn_norm, mlp_norm), (*attn_norm.saved, *mlp_norm.saved), ("attn.normed", "mlp.normed")
        ),
        "mla_up_proj": Checkpoint(up, up_inputs(up), ("attn.q", "attn.k", "attn.v")),
    }
    if mixed:
        act = mixed.activation
        checkpoints["moe"] = Checkpoint(mlp, (normed,))
        checkpoints["moe_act"] = Checkpoint((act,), act.saved, ("moe.act",))
        checkpoints["shared_experts"] = Checkpoint(mixed.shared, (normed,) if mixed.shared else ())
    else:
        checkpoints["mlp"] = Checkpoint(mlp, (normed,))
    chosen = [checkpoints[module] for module in recompute if module in checkpoints]
    part = _part("moe layer" if x else "layer", nodes, chosen, held_gradient_bytes=z.row_bytes)
    return replace(part, recompute=tuple(_again_by_op(z, nodes))) if "ops" in recompute else part


def _kept_by_op(z: Shapes) -> tuple[Tensor, ...]:
    """What torchtitan's selective activation checkpointing by "op" keeps of a layer: the layer's input, the outputs of
    attention and of the first, third ... of its products, which are those for q, k, v, context, gate, up and down
    (torchtitan/models/llama3/infra/parallelize.py, ``_save_list``)."""
    q, _, v = attention_inputs(z)
    context = Tensor("attn.context", float(z.element * z.tokens * z.context_width))
    lse = Tensor("attn.lse", 4.0 * z.tokens * z.heads)
    gate = Tensor("mlp.gate", float(z.element * z.tokens * z.ffn))
    down = (Tensor("mlp.out", z.row_bytes),) if z.gated else ()
    return (Tensor("input", z.row_bytes), q, v, context, lse, gate, *down)


def _again_by_op(z: Shapes, nodes: Sequence[Node]) -> Iterator[Op]:
    """The forward ops of a layer that run again where `_kept_by_op` is kept: of products the one for k, the one after
    attention, and that for up."""
    again = {"attn.qkv": z.kv_width, "mlp.fc1": z.ffn if z.gated else 0, "mlp.fc2": 0}
    for op in (op for node in nodes for op in node.forward):
        kernel = op.kernel if isinstance(op, Compute) else None
        if isinstance(kernel, Attention) or (isinstance(op, Comm) and op.op == "reduce_scatter"):
            continue
        if isinstance(op, Compute) and isinstance(kernel, Matmul) and op.name in again:
            if again[op.name]:
                yield _again(replace(op, kernel=replace(kernel, n=again[op.name])))
            continue
        yield _again(op)


def _projections(z: Shapes) -> tuple[Node, ...]:
    """From the normed rows to queries, keys and values with their positions, in one product."""
    qkv = z.q_width + 2 * z.kv_width
    shared = 2 * z.kv_width if z.kv_replicas > 1 else 0
    return (
        linear(z, "attn", "qkv", qkv, z.hidden, split="column", saved="attn.normed", bias=z.bias, shared=shared),
        split_qkv(z),
        *((rope(z),) if z.position == "rope" else ()),
    )


def _mlp(z: Shapes) -> tuple[Node, ...]:
    fc1 = z.ffn * (2 if z.gated else 1)
    return (
        linear(z, "mlp", "fc1", fc1, z.hidden, split="column", saved="mlp.normed", bias=z.bias),
        activation(z, "mlp", z.tokens * z.ffn),
        linear(z, "mlp", "fc2", z.hidden, z.ffn, split="row", saved="mlp.act", bias=z.bias),
    )


def _residual_norm(z: Shapes) -> tuple[Node, Node]:
    """The attention block's residual and the norm after it; a compiler makes one kernel of them."""
    add, mlp_norm = residual(z, "attn"), norm(z, "mlp.norm", saved="attn.output", residual=True)
    if not z.compiled:
        return add, mlp_norm
    first, second = add.forward[-1], mlp_norm.forward[0]
    return replace(add, forward=()), replace(mlp_norm, forward=(fuse("F", first, second, z.row_bytes, keep=True),))


def embedding(workload: Workload) -> Part:
    """Word (and learned position) embedding, and dropout.

    With the vocabulary split each rank looks up its own words and the ranks' results are summed (arXiv 1909.08053,
    section 3). Under sequence parallelism the sum is a reduce-scatter, or, where positions have to be added to whole
    sequences first, an all-reduce of which each rank takes its rows (Megatron's `reduce_scatter_embeddings`).
    """
    z = shapes(workload)
    full = float(z.element * z.tokens * z.hidden)
    table = z.vocab * z.hidden
    summed = z.tp > 1 and z.vocab_parallel
    learned = z.position == "learned"
    scattered = summed and z.sequence_parallel and not learned
    forward: list[Op] = [memory("F", "embedding.lookup", "embedding", full, full, z.dtype)]
    if summed:
        foreign = full * (z.tp - 1) / z.tp
        forward.append(memory("F", "embedding.mask", "embedding", 0, foreign, z.dtype))
        forward.append(comm("reduce_scatter" if scattered else "all_reduce", "embedding", full))
    positions: Ops = ()
    if learned:
        forward.append(memory("F", "embedding.positions", "embedding", full, full, z.dtype))
        forward.append(memory("F", "embedding.add", "residual", 2 * full, full, z.dtype))
        rows = z.element * z.seq * z.hidden
        positions = (memory("W", "embedding.positions wgrad", "embedding", full, rows, z.dtype),)
        positions += add_gradient(z, "embedding.positions", z.seq * z.hidden)
    if z.sequence_parallel and not scattered:
        forward.append(memory("F", "embedding.scatter", "copy", z.row_bytes, z.row_bytes, z.dtype))
    lookup = Node(
        forward=tuple(forward),
        input_grad=(comm("all_gather", "embedding", full),) if z.sequence_parallel else (),
        weight_grad=(
            *positions,
            # The gradient of the whole table is cleared, and the tokens' rows are added to it.
            memory("W", "embedding.lookup wgrad", "embedding", full, full + z.element * table, z.dtype),
            *add_gradient(z, "embedding.lookup", table),
        ),
        grad_bytes=full + new_gradient_bytes(z, table),
        output_grad_bytes=full,
        weight_grad_bytes=new_gradient_bytes(z, table),
        params=table + (z.seq * z.hidden if learned else 0),
    )
    if not z.dropout:
        return _part("embedding", (lookup,))
    drop = dropout(z, "embedding.dropout", z.rows * z.hidden, mask="embedding.dropout mask")
    return _part("embedding", (lookup, drop))


def head(workload: Workload, *, projection: bool = True) -> Part:
    """Final norm, projection to the vocabulary, and fp32 cross-entropy.

    The projection's weight is the embedding's where they are tied: then this part has parameters of its own only if the
    pipeline puts it on another rank than the embedding, which holds a copy. Without ``projection`` it is elsewhere.
    """
    z = shapes(workload)
    product = linear(
        z,
        "head",
        "logits",
        z.vocab,
        z.hidden,
        split="column" if z.vocab_parallel else "none",
        saved="head.normed",
        cached=False,
    )
    if not projection or (workload.model.tied_embeddings and workload.parallelism.table_in_place):
        product = replace(product, params=0)
    return _part("head", (norm(z, "head.norm", saved="head.input", residual=False), product, _loss(z)))


def _loss(z: Shapes) -> Node:
    """Cross-entropy over this rank's share of the vocabulary: three all-reduces of one fp32 number per token (maximum,
    the target's logit, sum of exponentials; arXiv 1909.08053, section 3) where the vocabulary is split.

    Megatron casts logits to fp32 and works on them in place, keeping the softmax (2205.05198, section 4.3: 4 s b v / t
    bytes). Eager keeps the log-softmax; where the vocabulary is split its kernels are Megatron's. Compiled code never
    writes fp32 logits: it keeps those in working precision and computes the softmax again.
    """
    logits = float(z.tokens * z.vocab)
    x, fp32 = z.element, 4
    split = z.tp > 1 and z.vocab_parallel

    def kernel(phase: str, name: str, read: int, write: int) -> Compute:
        return memory(phase, f"loss.{name}", "loss", read * logits, write * logits, "fp32")

    def across(what: str) -> Ops:
        return (comm("all_reduce", f"loss {what}", fp32 * z.tokens),) if split else ()

    if z.compiles_loss:
        return Node(
            forward=(
                kernel("F", "max", x, 0),
                *across("max"),
                *across("target"),
                kernel("F", "sum_exp", x, 0),
                *across("sum"),
            ),
            input_grad=(kernel("B", "bwd", x, x),),
            saved=(Tensor("loss.logits", x * logits),),
            grad_bytes=x * logits,
        )
    if z.compiled or (z.eager and not split):
        return Node(
            forward=(
                kernel("F", "cast", x, fp32),
                *across("max"),
                *across("sum"),
                kernel("F", "log_softmax", fp32, fp32),
                *across("target"),
                kernel("F", "nll", 0, 0),
            ),
            input_grad=(
                kernel("B", "nll bwd", 0, fp32),
                kernel("B", "log_softmax bwd", 2 * fp32, fp32),
                kernel("B", "cast bwd", fp32, x),
            ),
            saved=(Tensor("loss.log_softmax", fp32 * logits),),
            grad_bytes=2 * fp32 * logits,
            forward_bytes=(x + fp32) * logits,
        )
    return Node(
        forward=(
            kernel("F", "cast", x, fp32),
            kernel("F", "max", fp32, 0),
            *across("max"),
            kernel("F", "subtract", fp32, fp32),
            *across("target"),
            kernel("F", "exp", fp32, fp32),
            kernel("F", "sum", fp32, 0),
            *across("sum"),
            kernel("F", "normalise", fp32, fp32),
        ),
        input_grad=(kernel("B", "bwd", fp32, fp32), kernel("B", "cast bwd", fp32, x)),
        saved=(Tensor("loss.softmax", fp32 * logits),),
        grad_bytes=x * logits,
        forward_bytes=x * logits,
    )


def params_on(parts: Iterable[Part]) -> dict[str, int]:
    """Parameters of all ``parts`` by axis (see `Part.params_on`)."""
    total: dict[str, int] = {}
    for part in parts:
        for axis, count in part.params_on.items():
            total[axis] = total.get(axis, 0) + count
    return total


def stage_parts(workload: Workload, stage: int, seat: Seat = ANY_SEAT) -> tuple[Part, ...]:
    """The parts of model stage ``stage`` (0 .. pp * vpp - 1) in order, for a rank at ``seat``: the embedding opens
    the first stage, the head closes the last; a stage that keeps its output has it with its last part. Where
    ``recompute.layers`` is given, the first so many layers of a stage are recomputed (Megatron's block method).
    """
    counts = workload.parallelism.layers_per_stage
    recompute = workload.training.recompute
    n_layers = counts[stage]
    n_recomputed = n_layers if recompute.layers is None else min(recompute.layers, n_layers)
    first = sum(counts[:stage])
    parts = tuple(
        layer(workload, recompute=None if place < n_recomputed else "none", seat=seat, number=first + place)
        for place in range(n_layers)
    )
    if stage == 0:
        parts = (embedding(workload), *parts)
    if stage == len(counts) - 1:
        parts = (*parts, head(workload))
        for number in range(workload.model.mtp_layers):
            parts += predictor(workload, number, seat)
    elif not workload.parallelism.deallocate_pipeline_outputs:
        output = Tensor("stage output", shapes(workload, seat).row_bytes)
        parts = (*parts[:-1], replace(parts[-1], saved=(*parts[-1].saved, output)))
    return parts


def predictor(workload: Workload, number: int, seat: Seat = ANY_SEAT) -> tuple[Part, ...]:
    """Module ``number`` of multi-token prediction: the embedding of later tokens joined with the last layer's output, a
    layer of its own, and the loss (DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding table and vocabulary
    projection are the model's; a rank that does not hold the table already has a copy of it."""
    table = embedding(workload)
    if number or workload.model.tied_embeddings or workload.parallelism.table_in_place:
        table = replace(table, params=0)
    recompute = None if workload.training.recompute.layers is None else "none"
    return (
        replace(table, name="mtp embedding"),
        _part("mtp projection", joined(shapes(workload))),
        layer(workload, recompute=recompute, seat=seat, number=workload.model.layers + number),
        replace(head(workload, projection=False), name="mtp head"),
    )

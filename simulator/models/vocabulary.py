"""Ends of a model: the embedding, and the head with its loss.

Both are split over tensor-parallel ranks by vocabulary (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import replace

from simulator.config import Workload
from simulator.losses import LOSSES, LossOptions
from simulator.losses.loss import is_split
from simulator.models.captured import captured_beginning, captured_end
from simulator.models.linear import add_gradient, linear, new_gradient_bytes
from simulator.models.norms import norm
from simulator.models.parts import Part, part_of
from simulator.models.shapes import FrameworkShapes, shapes
from simulator.models.tuning import EMBEDDING, HEAD, is_of_kinds
from simulator.models.weight_names import OUTPUT, OUTPUT_BIAS, POSITIONS, WORDS
from simulator.operations.dropout import dropout
from simulator.operations.nodes import Node, Op, Ops, Tensor, comm, memory
from simulator.operations.shapes import ANY_TURN, Turn
from simulator.operations.weights import Weight, tie


def embedding(workload: Workload, turn: Turn = ANY_TURN) -> Part:
    """Return the word (and learned position) embedding, and dropout.

    With the vocabulary split each rank looks up its own words and the ranks' results are summed (arXiv 1909.08053,
    section 3). Under sequence parallelism the sum is a reduce-scatter (Megatron's `reduce_scatter_embeddings`). Where
    positions have to be added to whole sequences first it is an all-reduce, of which each rank takes its rows.
    """
    if captured := workload.model.captured_model:
        return captured_beginning(workload, captured, turn)
    z = shapes(workload, turn=turn, number=EMBEDDING)
    full = float(z.weight_element * z.tokens * z.hidden)
    words = Weight(
        WORDS,
        (z.vocab, z.hidden),
        (workload.model.vocab, z.hidden),
        z.dtype,
        sharded_over=("tp",) if z.vocab_parallel else (),
    )
    table, places = words.elements, (z.seq, z.hidden)
    summed = z.tp > 1 and z.vocab_parallel
    learned = z.position == "learned"
    scattered = summed and z.sequence_parallel and not learned
    forward: list[Op] = [memory("F", "embedding.lookup", "embedding", full, full, z.dtype)]
    masked: Ops = ()
    if summed:
        hidden, masked = z.framework.embedding_mask(z, full)
        forward += hidden
        forward.append(comm("reduce_scatter" if scattered else "all_reduce", "embedding", full))
    positions: Ops = ()
    if learned:
        forward.append(memory("F", "embedding.positions", "embedding", full, full, z.dtype))
        forward.append(memory("F", "embedding.add", "residual", 2 * full, full, z.dtype))
        rows = z.weight_element * z.seq * z.hidden
        positions = (memory("W", "embedding.positions wgrad", "reduce", full, rows, z.dtype),)
        positions += add_gradient(z, "embedding.positions", z.seq * z.hidden)
    # What is made once serves the layers with a window too.
    windows = (workload.model.keys_seen(layer, z.seq).window for layer in range(workload.model.layers))
    before = z.framework.before_layers(replace(z, window=max(windows)))
    forward += before.forward
    if z.sequence_parallel and not scattered:
        forward.append(memory("F", "embedding.scatter", "copy", z.row_bytes, z.row_bytes, z.dtype))
    lookup = Node(
        forward=tuple(forward),
        input_grad=(comm("all_gather", "embedding", full),) if z.sequence_parallel else (),
        weight_grad=(
            *positions,
            *masked,
            *z.framework.lookup_gradient(z, table, workload.model.tied_embeddings),
            *add_gradient(z, "embedding.lookup", table),
        ),
        saved=before.saved,
        grad_bytes=full + new_gradient_bytes(z, table),
        output_grad_bytes=full,
        weight_grad_bytes=new_gradient_bytes(z, table),
        weights=(words, *((Weight(POSITIONS, places, places, z.dtype),) if learned else ())),
    )
    if not z.dropout:
        return part_of(z, "embedding", (lookup,))
    drop = dropout(z, "embedding.dropout", z.rows * z.hidden, mask="embedding.dropout mask")
    return part_of(z, "embedding", (lookup, drop))


def head(workload: Workload, turn: Turn = ANY_TURN, *, projection: bool = True) -> Part:
    """Return the final norm, the projection to the vocabulary, and the cross-entropy.

    The projection's weight is the embedding's where they are tied. The rank has a copy of it if the pipeline puts the
    embedding on another rank. Without ``projection`` the weight is that of another part of this rank.
    """
    if captured := workload.model.captured_model:
        return captured_end(workload, captured, turn)
    z = shapes(workload, turn=turn, number=HEAD)
    product = linear(
        z,
        "head",
        "logits",
        z.vocab,
        z.hidden,
        split="column" if z.vocab_parallel else "none",
        saved="head.normed",
        rows=workload.model.vocab,
        cached=False,
        wide=True,
        bias="head" in z.biases,
    )
    matrix, *bias = product.weights
    if not projection:
        names = (OUTPUT, OUTPUT_BIAS)
        tied = tuple(tie(weight, name) for weight, name in zip(product.weights, names, strict=False))
        product = replace(product, weights=tied)
    elif workload.model.tied_embeddings:
        copied = not workload.parallelism.table_in_place
        product = replace(product, weights=(tie(matrix, WORDS, copied=copied), *bias))
    if z.softcaps_logits:
        logits = float(z.element * z.tokens * z.vocab)
        product = replace(
            product,
            forward=(*product.forward, memory("F", "head.softcap", "activation", logits, logits, z.dtype)),
            input_grad=(
                memory("B", "head.softcap bwd", "activation_bwd", 2 * logits, logits, z.dtype),
                *product.input_grad,
            ),
            saved=(*product.saved, Tensor("head.capped", logits)),
        )
    trained = not is_of_kinds(matrix, z.tuning.frozen)
    loss = LOSSES[workload.training.loss.name]
    behind = loss.nodes(z, product, loss_options(workload, z, trained=trained))
    return part_of(z, "head", (norm(z, "head.norm", saved="head.input", residual=False), *behind))


def loss_options(workload: Workload, shapes: FrameworkShapes, *, trained: bool = True) -> LossOptions:
    """Return how the loss of ``workload`` is computed. ``trained``: the projection has a weight gradient."""
    choice, framework = workload.training.loss, shapes.framework
    return LossOptions(
        by_row=framework.by_row,
        keeps_log_softmax=framework.keeps_split_log_softmax if is_split(shapes) else framework.keeps_log_softmax,
        chunks=choice.chunks,
        recompute=choice.recompute,
        compile=choice.compile,
        trained=trained,
        returns_logits=framework.returns_logits is not None and framework.returns_logits(shapes.position),
        online_softmax=framework.online_softmax,
        apart=framework.compiles_loss_apart,
    )

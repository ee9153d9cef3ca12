"""Ends of a model: the embedding, and the head with its loss.

Both are split over tensor-parallel ranks by vocabulary (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulator.config import Workload
from simulator.losses import LOSSES, LossOptions, eager
from simulator.losses.loss import is_split
from simulator.models.captured import captured_beginning, captured_end
from simulator.models.layer_inputs import inputs_of_layers
from simulator.models.linear import add_gradient, linear, new_gradient_bytes
from simulator.models.norms import norm
from simulator.models.parts import Part, part_of
from simulator.models.residual_streams import first_streams, last_streams
from simulator.models.shapes import FrameworkShapes, has_window, shapes
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
    sizes = shapes(workload, turn=turn, number=EMBEDDING)
    full = float(sizes.weight_element * sizes.tokens * sizes.hidden)
    words = Weight(
        WORDS,
        (sizes.vocab, sizes.hidden),
        (workload.model.vocab, sizes.hidden),
        sizes.dtype,
        sharded_over=("tp",) if sizes.vocab_parallel else (),
    )
    table, places = words.elements, (sizes.seq, sizes.hidden)
    summed = sizes.tp > 1 and sizes.vocab_parallel
    learned = sizes.position == "learned"
    scattered = summed and sizes.sequence_parallel and not learned
    forward: list[Op] = [memory("F", "embedding.lookup", "embedding", full, full, sizes.dtype)]
    masked: Ops = ()
    if summed:
        hidden, masked = sizes.framework.embedding_mask(sizes, full)
        forward += hidden
        forward.append(comm("reduce_scatter" if scattered else "all_reduce", "embedding", full))
    positions: Ops = ()
    if learned:
        forward.append(memory("F", "embedding.positions", "embedding", full, full, sizes.dtype))
        forward.append(memory("F", "embedding.add", "residual", 2 * full, full, sizes.dtype))
        rows = sizes.weight_element * sizes.seq * sizes.hidden
        positions = (memory("W", "embedding.positions wgrad", "reduce", full, rows, sizes.dtype),)
        positions += add_gradient(sizes, "embedding.positions", sizes.seq * sizes.hidden)
    # What is made once serves the layers with a window too.
    windowed = any(has_window(workload.model, layer, sizes.seq) for layer in range(workload.model.layers))
    before = sizes.framework.before_layers(replace(sizes, has_window=windowed))
    forward += before.forward
    if sizes.sequence_parallel and not scattered:
        forward.append(memory("F", "embedding.scatter", "copy", sizes.row_bytes, sizes.row_bytes, sizes.dtype))
    lookup = Node(
        forward=tuple(forward),
        input_grad=(comm("all_gather", "embedding", full),) if sizes.sequence_parallel else (),
        weight_grad=(
            *positions,
            *masked,
            *sizes.framework.lookup_gradient(sizes, table, workload.model.tied_embeddings),
            *add_gradient(sizes, "embedding.lookup", table),
        ),
        saved=before.saved,
        grad_bytes=full + new_gradient_bytes(sizes, table),
        output_grad_bytes=full,
        weight_grad_bytes=new_gradient_bytes(sizes, table),
        weights=(words, *((Weight(POSITIONS, places, places, sizes.dtype),) if learned else ())),
    )
    return part_of(sizes, "embedding", (lookup, *_behind_lookup(sizes, workload)))


def _behind_lookup(sizes: FrameworkShapes, workload: Workload) -> Iterator[Node]:
    """Yield dropout, residual streams and inputs of layers, as far as the model has them."""
    if sizes.dropout:
        yield dropout(sizes, "embedding.dropout", sizes.rows * sizes.hidden, mask="embedding.dropout mask")
    if sizes.streams > 1:
        yield first_streams(sizes)
    if layer_inputs := workload.model.layer_inputs:
        yield from inputs_of_layers(sizes, workload, layer_inputs)


def head(workload: Workload, turn: Turn = ANY_TURN, *, projection: bool = True) -> Part:
    """Return the final norm, the projection to the vocabulary, and the cross-entropy.

    The projection's weight is the embedding's where they are tied. The rank has a copy of it if the pipeline puts the
    embedding on another rank. Without ``projection`` the weight is that of another part of this rank.
    """
    if captured := workload.model.captured_model:
        return captured_end(workload, captured, turn)
    sizes = shapes(workload, turn=turn, number=HEAD)
    product = linear(
        sizes,
        "head",
        "logits",
        sizes.vocab,
        sizes.hidden,
        split="column" if sizes.vocab_parallel else "none",
        saved="head.normed",
        rows=workload.model.vocab,
        cached=False,
        wide=True,
        bias="head" in sizes.biases,
    )
    matrix, *bias = product.weights
    if not projection:
        names = (OUTPUT, OUTPUT_BIAS)
        tied = tuple(tie(weight, name) for weight, name in zip(product.weights, names, strict=False))
        product = replace(product, weights=tied)
    elif workload.model.tied_embeddings:
        copied = not workload.parallelism.table_in_place
        product = replace(product, weights=(tie(matrix, WORDS, copied=copied), *bias))
    if sizes.softcaps_logits:
        product = _capped(sizes, product)
    trained = not is_of_kinds(matrix, sizes.tuning.frozen)
    loss = LOSSES[workload.training.loss.name]
    options = loss_options(workload, sizes, trained=trained)
    behind = loss.nodes(sizes, product, options)
    if number := workload.training.loss.metrics:
        gathered = loss.needs_rows and options.gathers_logits and is_split(sizes)
        behind = (*behind, eager.metrics(eager.whole_rows(sizes) if gathered else sizes, number))
    before = (last_streams(sizes),) if sizes.streams > 1 else ()
    return part_of(sizes, "head", (*before, norm(sizes, "head.norm", saved="head.input", residual=False), *behind))


def _capped(sizes: FrameworkShapes, product: Node) -> Node:
    """Return the projection with the cap of its logits: one kernel each way, or one for each operation."""
    logits = float(sizes.element * sizes.tokens * sizes.vocab)

    def scaling(phase: str, name: str) -> Ops:
        if not sizes.framework.caps_by_operations:
            return ()
        return (memory(phase, f"head.softcap {name}", "activation", logits, logits, sizes.dtype),)

    return replace(
        product,
        forward=(
            *product.forward,
            *scaling("F", "divide"),
            memory("F", "head.softcap", "activation", logits, logits, sizes.dtype),
            *scaling("F", "times"),
        ),
        input_grad=(
            *scaling("B", "times bwd"),
            memory("B", "head.softcap bwd", "activation_bwd", 2 * logits, logits, sizes.dtype),
            *scaling("B", "divide bwd"),
            *product.input_grad,
        ),
        saved=(*product.saved, Tensor("head.capped", logits)),
    )


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
        gathers_logits=framework.gathers_logits,
    )

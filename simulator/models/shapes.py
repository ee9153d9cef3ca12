"""Sizes of the tensors of a workload, with the framework whose kernels work on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.config import Model, Workload
from simulator.frameworks import Framework
from simulator.models.routing import routing
from simulator.models.tuning import tuning_at
from simulator.operations.shapes import ANY_SEAT, ANY_TURN, Seat, Shapes, Turn
from simulator.precisions import ProductRecipe
from simulator.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class FrameworkShapes(Shapes):
    """Sizes of a rank's share of the tensors, and the framework whose kernels work on them.

    ``product_recipe``: of products in 8 or 4 bits, if there is one. ``casts_weights``: this micro-batch casts weights.
    ``gathers_in_8_bits``: ZeRO-3 gathers weights so. ``keeps_weight_copies``: copies of weights stay for the step.
    ``delays_weight_grad``: gradients of weights wait until those of inputs are on their way to other ranks.
    ``graph_modules``: parts of layers that CUDA graphs hold. ``gathers_each_product``: products that read the same rows
    gather them each for itself, and sum the gradients of their shares.
    """

    framework: Framework
    product_recipe: ProductRecipe | None = None
    casts_weights: bool = True
    gathers_in_8_bits: bool = False
    keeps_weight_copies: bool = False
    delays_weight_grad: bool = False
    graph_modules: frozenset[str] = frozenset()
    gathers_each_product: bool = False

    @property
    def joins_products(self) -> bool:
        """Queries, keys and values come from one product, and so do gate and up, by the framework or the model."""
        return self.joined_products or self.framework.joins_projections(self.position)


def keeps_weight_copies(workload: Workload) -> bool:
    """Return True where copies of weights in 8 bits stay beside them; of gathered weights none stays."""
    recipe = workload.training.product_recipe
    return recipe is not None and recipe.weight_copies > 0 and workload.parallelism.zero != 3


def representative_seat(workload: Workload, seat: Seat) -> Seat:
    """Return ``seat`` with 0 for positions that make no difference; ranks with the same result do the same work."""
    layout = workload.parallelism
    uneven = layout.cp_method == "ring" and layout.cp_layout == "contiguous"
    ep = routing(workload).representative(seat.ep) if workload.model.moe else 0
    return Seat(cp=seat.cp if uneven else 0, ep=ep)


def shapes(workload: Workload, seat: Seat = ANY_SEAT, turn: Turn = ANY_TURN, number: int = 0) -> FrameworkShapes:
    """Return the `FrameworkShapes` of a workload, whose sizes divide (the configuration has checked it).

    They are those of a rank at ``seat``, a micro-batch whose ``turn`` it is, and the layer of this ``number``
    (see `tuning_at`).
    """
    model, training, layout = workload.model, workload.training, workload.parallelism
    replication, tp = workload.replication, layout.tp
    sequence_parallel = bool(layout.sequence_parallel) and tp > 1
    tokens = workload.rank_tokens
    vocab = model.padded_vocab(tp)
    heads, seen = model.heads_of(number), model.keys_seen(number, training.seq)
    attends = model.mixer(number).attends
    return FrameworkShapes(
        tp=tp,
        sequence_parallel=sequence_parallel,
        vocab_parallel=layout.vocab_parallel,
        overlaps_tp=layout.overlap.tp and tp > 1,
        cp=layout.cp,
        cp_method=layout.cp_method,
        cp_layout=layout.cp_layout,
        cp_rank=representative_seat(workload, seat).cp,
        batch=training.micro_batch,
        seq=training.seq,
        window=seen.window,
        chunk=seen.chunk,
        tokens=tokens,
        rows=tokens // tp if sequence_parallel else tokens,
        hidden=model.hidden,
        heads=heads.heads // tp,
        kv_heads=max(1, heads.kv_heads // tp),
        kv_replicas=max(1, tp // heads.kv_heads),
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        ffn=model.ffn_of(number) // tp,
        vocab=vocab // tp if layout.vocab_parallel else vocab,
        activation=model.activation,
        norm=model.norm,
        position="none" if model.position == "rope" and attends and not attends.rotates else model.position,
        biases=frozenset(model.biases),
        attention=model.attention,
        dropout=model.dropout,
        framework=workload.software,
        **_few_bits(workload, turn),
        dtype=training.precision,
        grad_dtype=training.grad_dtype,
        adds_gradients=replication.adds_first_gradients if turn.first else replication.adds_later_gradients,
        fills_buckets=turn.last and replication.in_ddp and layout.replicas("dp") > 1,
        fills_expert_buckets=turn.last and replication.in_ddp and layout.replicas("edp") > 1,
        accumulates_in_product=training.gradient_accumulation_fusion,
        keeps_gradients=training.keep_gradients,
        norm_place=model.norm_place,
        **_forms(model, number, training.seq),
        autocast=workload.software.autocasts(workload.traits),
        norm_by_operations=not training.fused_rms_norm and model.norm == "rmsnorm",
        tuning=tuning_at(workload, number),
        delays_weight_grad=layout.overlap.delayed_weight_grad,
        graph_modules=workload.framework.layer_graphs,
        gathers_each_product=layout.gather_per_product,
    )


def _few_bits(workload: Workload, turn: Turn) -> dict[str, Any]:
    """Return what shapes say of products in 8 or 4 bits."""
    recipe = workload.training.product_recipe
    return {
        "product_recipe": recipe,
        "casts_weights": turn.first or workload.microbatches == 1 or not (recipe and recipe.weights_once),
        "gathers_in_8_bits": workload.gathers_in_8_bits,
        "keeps_weight_copies": keeps_weight_copies(workload),
    }


def has_window(model: Model, layer: int, seq: int) -> bool:
    """Return True for a layer whose window is no longer than a sequence of ``seq``. One just as long hides nothing."""
    return model.mixer(layer).name == "window" and model.sliding_window is not None and model.sliding_window <= seq


def _forms(model: Model, layer: int, seq: int) -> dict[str, Any]:
    """Return what surrounds attention and blocks in a layer of a model."""
    in_window = model.mixer(layer).name == "window"
    return {
        "joined_products": model.joined_products,
        "has_window": has_window(model, layer, seq),
        "qk_norm": model.qk_norm_kind if model.qk_norm else "",
        "sinks": model.attention_sinks is True or (model.attention_sinks == "window" and in_window),
        "value_norm": model.value_norm,
        "keys_as_values": model.keys_as_values and not in_window,
        "softcap": model.attention_softcap is not None,
        "softcaps_logits": model.logit_softcap is not None,
        "gate": model.attention_gate,
        "streams": model.residual_streams,
        "layer_input": model.layer_inputs.width if model.layer_inputs else 0,
        "reuses_keys": model.reuses_keys(layer),
        "lends_keys": model.lends_keys(layer),
        "compressed_queries": (model.mla.q_lora_rank or 0) if model.mla else 0,
    }


def activation_bytes(workload: Workload) -> float:
    """Return the bytes of the tensor between two layers.

    They are b s h elements of each residual stream, of which each rank on axis cp has a share. Those of a captured
    model were recorded.
    """
    if captured := workload.model.captured_model:
        return captured.passed_bytes
    width = workload.model.residual_streams * workload.model.hidden
    return float(workload.rank_tokens * width * DTYPE_BYTES[workload.training.precision])


def passed_bytes(workload: Workload) -> float:
    """Return the bytes that a rank sends to the next stage.

    With sequence parallelism or scatter/gather they are divided by tp.
    """
    layout = workload.parallelism
    shared = layout.sequence_parallel or layout.scatter_gather_p2p
    return activation_bytes(workload) / (layout.tp if shared else 1)

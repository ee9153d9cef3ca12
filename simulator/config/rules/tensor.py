"""Tensor and sequence parallelism, and sizes of the model against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from simulator.config.rules.numbers import divisors, listed, nearest, nearest_multiple, shown, split
from simulator.config.rules.scale import fills_cluster
from simulator.errors import InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.parallelism import Parallelism
    from simulator.config.workload import Workload


#: Numbers in the largest tensor of a micro-batch, before it is split.
MAX_TENSOR = 10**15


def problems(workload: Workload) -> Iterator[InputError]:
    """Sizes of the model against each other and against tp."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    if model.mla is None and "head_dim" not in model.model_fields_set and model.hidden % model.heads:
        yield InputError(
            f"hidden {model.hidden} does not divide by it, and head_dim is not given",
            key="model.heads",
            found=model.heads,
            allowed=listed(divisors(model.hidden)),
            fix=f"heads: {nearest(model.heads, divisors(model.hidden))}",
        )
    widest = max(model.hidden, model.ffn_hidden, model.vocab, model.heads * model.head_dim, model.heads * training.seq)
    if (numbers := training.micro_batch * training.seq * widest) > MAX_TENSOR:
        yield InputError(
            f"makes tensors of {numbers:.1e} numbers (micro_batch * seq * the widest of the model, or heads * seq)",
            key="training.micro_batch",
            found=training.micro_batch,
            allowed=f"at most {MAX_TENSOR:.0e} numbers",
        )
    if model.qk_norm and model.mla is not None:
        yield InputError(
            "latent attention norms its compressed forms", key="model.qk_norm", found=brief(True), allowed="false"
        )
    if model.heads % model.kv_heads:
        yield InputError(
            f"heads {model.heads} does not divide by it",
            key="model.kv_heads",
            found=model.kv_heads,
            allowed=listed(divisors(model.heads)),
            fix=f"kv_heads: {nearest(model.kv_heads, divisors(model.heads))}",
        )
    else:
        yield from islice(_tp_problems(workload), 1)
    if layout.sequence_parallel and layout.scatter_gather_p2p:
        yield InputError(
            "sequence parallelism already sends 1/tp of the activation",
            key="parallelism.scatter_gather_p2p",
            found=brief(True),
            allowed="false, or sequence_parallel: false",
        )


def _tp_problems(workload: Workload) -> Iterator[InputError]:
    """Return the sizes that tp does not divide, the most telling first: one change of tp may mend them all."""
    model, tp = workload.model, workload.parallelism.tp
    if model.heads % tp:
        yield _heads_do_not_split(workload)
    if model.kv_heads % tp and tp % model.kv_heads:
        yield InputError(
            f"neither tp {tp} nor kv_heads {model.kv_heads} divides the other",
            key="parallelism.tp",
            found=tp,
            allowed=listed(_head_splits(workload)),
            fix=f"tp: {other_tp(workload)}",
        )
    if model.ffn_hidden % tp and model.has_dense_mlps:
        yield InputError(
            f"tp {tp} does not divide it",
            key="model.ffn_hidden",
            found=model.ffn_hidden,
            allowed=f"a multiple of {tp}",
            fix=f"ffn_hidden: {nearest_multiple(model.ffn_hidden, tp)}",
        )


def _head_splits(workload: Workload) -> list[int]:
    """Sizes of tp that divide the query heads, divide or are divided by the key and value heads, and that the framework
    has."""
    kv_heads = workload.model.kv_heads
    limits = [limit for limit in workload.software.limits if limit.key == "parallelism.tp" and not limit.where]
    sizes = [tp for tp in divisors(workload.model.heads) if kv_heads % tp == 0 or tp % kv_heads == 0]
    return [tp for tp in sizes if all(limit.allows(tp) for limit in limits)]


def other_tp(workload: Workload) -> int:
    """Return the size of tp nearest to the workload's that splits heads, MLP and sequence, and leaves no GPU over.

    It stays in a node. Of equally near ones it is the smaller; 1 where none does.
    """
    layout = workload.parallelism
    sizes = [
        tp
        for tp in _head_splits(workload)
        if tp <= workload.cluster.gpus_per_node
        and (workload.model.ffn_hidden % tp == 0 or not workload.model.has_dense_mlps)
        and workload.training.seq % sequence_unit(layout.model_copy(update={"tp": tp})) == 0
        and fills_cluster(workload, tp=tp)
    ]
    return min(sizes, key=lambda tp: (max(tp, layout.tp) / min(tp, layout.tp), tp), default=1)


def sequence_unit(layout: Parallelism) -> int:
    """Return the number of which a sequence must be a multiple.

    Context parallelism splits it into cp parts, or 2 cp chunks for a balanced ring (Megatron-LM's
    ``get_batch_on_this_cp_rank``). Sequence parallelism splits each rank's part over tp."""
    zigzag = layout.cp > 1 and layout.cp_method == "ring" and layout.cp_layout == "zigzag"
    return layout.cp * math.lcm(2 if zigzag else 1, layout.tp if layout.sequence_parallel else 1)


def _heads_do_not_split(workload: Workload) -> InputError:
    model, layout = workload.model, workload.parallelism
    instead = f"tp: {other_tp(workload)}"
    if layout.pp == 1 and layout.vpp == 1:
        if fills_cluster(workload, tp=1, dp=layout.dp * layout.tp):
            instead += f"; or tp: 1 with dp: {layout.dp * layout.tp}"
        if layout.tp <= model.layers and fills_cluster(workload, tp=1, pp=layout.tp):
            instead += f"; or tp: 1 with pp: {layout.tp}"
            if model.layers % layout.tp:
                instead += f" and layers_per_stage: {shown(split(model.layers, layout.tp))}"
    return InputError(
        f"{model.heads} heads do not divide by tp {layout.tp}",
        key="parallelism.tp",
        found=layout.tp,
        allowed=listed(_head_splits(workload)),
        fix=instead,
    )


def warnings(workload: Workload) -> Iterator[str]:
    """A gated MLP as wide as one without a gate, which has a matrix less."""
    model = workload.model
    if model.has_dense_mlps and model.activation in ("swiglu", "geglu") and "ffn_hidden" not in model.model_fields_set:
        # Llama's `multiple_of` is 256 (github.com/meta-llama/llama, model.py); Megatron-LM cuts down to 64s instead.
        narrow = 256 * math.ceil(8 * model.hidden / 3 / 256)
        yield (
            f"model.ffn_hidden is 4 * hidden = {model.ffn_hidden:,}, GPT's, and {model.activation} has a third matrix "
            f"of that size; Llama takes 8/3 * hidden, up to a multiple of 256: {narrow:,}"
        )

"""Gradients of parameters that two ranks of a pipeline hold: they are summed once each rank has reduced its own."""

from __future__ import annotations

from simulator.lowering.host_copies import gradients_to_host
from simulator.lowering.lanes import EMBEDDING_GRADIENTS, Lanes, gradients_ready, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.models import optimized_elements
from simulator.models.weight_names import WORDS
from simulator.operations.weights import elements
from simulator.program import COMPUTE_LANE, Axis, Collective, CollectiveKind, Purpose, Step
from simulator.units import DTYPE_BYTES


def add_twin_gradients(lanes: Lanes, context: RankContext) -> Lanes:
    """Sum the gradients of two ranks that hold the same stages (BitPipe's, Chimera's): under ZeRO each its shard."""
    if context.parallelism.pipeline_schedule.copies == 1 or context.parallelism.server_count:
        return lanes
    grad_bytes = DTYPE_BYTES[context.workload.training.grad_dtype]
    nbytes = optimized_elements(context.workload, context.weights) * grad_bytes
    comm = Collective("dp.all_reduce twin grads", CollectiveKind.ALL_REDUCE, nbytes, Axis.TWIN, Purpose.DATA)
    return with_steps(lanes, lanes[COMPUTE_LANE].followed_by([Step("twin grads", comm, gradients_ready(lanes))]))


def add_tied_gradients(lanes: Lanes, context: RankContext) -> Lanes:
    """Sum the embedding table's gradients where the first and the last stage hold a copy each.

    Tied embeddings and multi-token prediction need it. Of sharded gradients the shards are summed. A host that has
    its copy of the gradients already gets the sum too.
    """
    workload, parallelism = context.workload, context.parallelism
    if not workload.model.table_at_both_ends or parallelism.table_in_place or parallelism.server_count:
        return lanes
    if context.pipeline_rank not in parallelism.ends:
        return lanes
    table = elements(weight for weight in context.weights if WORDS in (weight.name, weight.tied_to))
    if not table:  # it is frozen
        return lanes
    share = table / (parallelism.shards(Axis.DP) if parallelism.zero >= 2 else 1)
    nbytes = share * DTYPE_BYTES[workload.training.grad_dtype]
    comm = Collective(
        "pp.all_reduce embedding grads", CollectiveKind.ALL_REDUCE, nbytes, Axis.EMBEDDING, Purpose.PIPELINE
    )
    total = Step(EMBEDDING_GRADIENTS, comm, gradients_ready(lanes))
    copies: list[Step] = []
    if parallelism.offload.optimizer != "none":
        copies = gradients_to_host(workload, total.label, share, (total.label,))
    return with_steps(lanes, lanes[COMPUTE_LANE].followed_by([total]), copies)

"""The parts of a model stage, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from simulator.model.layer import layer
from simulator.model.mtp import predictor
from simulator.model.nodes import Tensor
from simulator.model.parts import Part
from simulator.model.shapes import ANY_SEAT, ANY_TURN, Seat, Turn, shapes
from simulator.model.vocabulary import embedding, head

if TYPE_CHECKING:
    from simulator.config import Workload


def stage_parts(workload: Workload, stage: int, seat: Seat = ANY_SEAT, turn: Turn = ANY_TURN) -> tuple[Part, ...]:
    """The parts of model stage ``stage`` (0 .. pp * vpp - 1) in order, for a rank at ``seat`` and a micro-batch whose
    ``turn`` it is: the embedding opens the first stage, the head closes the last; a stage that keeps its output has it
    with its last part. Where ``recompute.layers`` is given, the first so many layers of a stage are recomputed
    (Megatron's block method).
    """
    counts = workload.parallelism.layers_per_stage
    recompute = workload.training.recompute
    n_layers = counts[stage]
    n_recomputed = n_layers if recompute.layers is None else min(recompute.layers, n_layers)
    first = sum(counts[:stage])
    parts = tuple(
        layer(workload, recompute=None if place < n_recomputed else "none", seat=seat, turn=turn, number=first + place)
        for place in range(n_layers)
    )
    if stage == 0:
        parts = (embedding(workload, turn), *parts)
    if stage == len(counts) - 1:
        parts = (*parts, head(workload, turn))
        for number in range(workload.model.mtp_layers):
            parts += predictor(workload, number, seat, turn)
    elif not workload.parallelism.deallocate_pipeline_outputs:
        output = Tensor("stage output", shapes(workload, seat).row_bytes)
        parts = (*parts[:-1], replace(parts[-1], saved=(*parts[-1].saved, output)))
    return parts

"""Passes from lanes to lanes: what a training step does beside the passes of its pipeline, in the order of `PASSES`.

A pass takes the lanes of one rank and facts of the rank. It returns lanes, the same ones where it has nothing to do. It
finds the steps of earlier passes by their kind, or by the conventions of `lanes`.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.lowering.lanes import Lanes
from simulator.lowering.passes.add_copies import add_tied_gradients, add_twin_gradients
from simulator.lowering.passes.compress_gradients import compress_gradients
from simulator.lowering.passes.cut_by_unit import cut_by_unit
from simulator.lowering.passes.gather_parameters import gather_parameters
from simulator.lowering.passes.gather_units import gather_units
from simulator.lowering.passes.hide_all_to_alls import hide_all_to_alls
from simulator.lowering.passes.offload_activations import offload_activations
from simulator.lowering.passes.reduce_gradients import reduce_gradients
from simulator.lowering.passes.take_turns import take_turns
from simulator.lowering.passes.update_on_host import move_parameters_out, update_on_host
from simulator.lowering.passes.update_weights import free_input_gradients, update_weights
from simulator.lowering.rank_context import RankContext

LanePass = Callable[[Lanes, RankContext], Lanes]

PASSES: tuple[LanePass, ...] = (
    cut_by_unit,
    gather_units,
    reduce_gradients,
    add_twin_gradients,
    add_tied_gradients,
    update_weights,
    free_input_gradients,
    update_on_host,
    move_parameters_out,
    gather_parameters,
    offload_activations,
    hide_all_to_alls,
    compress_gradients,
    take_turns,
)


def apply_passes(lanes: Lanes, context: RankContext) -> Lanes:
    """Return the ``lanes`` of a pipeline's passes with all else that a step does."""
    for change in PASSES:
        lanes = change(lanes, context)
    return lanes

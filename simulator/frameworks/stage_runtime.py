"""How the stages of a pipeline run, which frameworks decide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageRuntime:
    """How pipeline stages run, where they differ from those of Megatron-Core.

    ``buffers_each_microbatch``: a stage receives every micro-batch into a buffer of its own. ``keeps_last_outputs``:
    the last stage keeps what it returns. ``keeps_graphs``: a split backward pass leaves the graph between its halves.
    ``first_backward_whole``: the first stage, whose input has no gradient, does not split its backward pass.
    ``awaits_apart``: of a forward and a backward pass in one slot each waits for its own input. ``keeps_units``:
    backward passes of a fully sharded stage leave its parameters whole, and add up whole gradients. Behind the last one
    units are reduced one after another, and parameters are dropped.
    """

    buffers_each_microbatch: bool = False
    keeps_last_outputs: bool = False
    keeps_graphs: bool = False
    first_backward_whole: bool = False
    awaits_apart: bool = False
    keeps_units: bool = False


#: Megatron-Core's stages.
MEGATRON_STAGES = StageRuntime()

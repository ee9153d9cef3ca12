"""ZeRO-3: parameters are sharded, and gathered unit by unit for every pass (arXiv 2304.11277, section 3).

It is torch's ``fully_shard`` applied to every layer and to the whole. A forward pass and an input gradient need whole
parameters; a weight gradient does not. A unit that is not whole is gathered before its pass, layers up to ``prefetch``
ahead. Beside layer k those up to k + prefetch may be in flight or whole, no others. A layer is given up after its
forward pass (unless ``reshard_after_forward`` is off) and after its backward pass. The root is given up after the
backward pass alone, at its end. Torch's pipelines give up nothing in a backward pass but a stage's last. The gathers of
a forward pass wait for all that was computed before it, which may have been the optimizer (torch's
``FSDPState._root_pre_forward``).

Gathers and reductions have streams of their own, but one communicator (`take_turns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from simulator.lowering.lanes import Lanes, with_steps
from simulator.lowering.rank_context import RankContext
from simulator.lowering.sharded_units import Unit, UnitPass, UnitPiece, Units, sharded_units
from simulator.lowering.sharding import gather, gathered_bytes, hooks
from simulator.operations.weights import stored_elements
from simulator.program import COMPUTE_LANE, Step


def gather_units(lanes: Lanes, context: RankContext) -> Lanes:
    """Gather units before the passes that need them; see the module."""
    units = sharded_units(context)
    if units is None:
        return lanes
    gathering = _Gathering(context, units)
    for run in units.passes(lanes[COMPUTE_LANE]):
        if isinstance(run, UnitPass):
            gathering.run(run)
        else:
            gathering.compute.append(run)
    return with_steps(lanes, gathering.compute, gathering.gathers)


def _layers_ahead(context: RankContext, units: Units) -> int:
    """Return how many layers are gathered ahead: so many, or those that fit beside the root and the layer in use.

    DeepSpeed gathers before each module what comes next, until ``stage3_max_live_parameters`` are whole, frozen ones
    among them (partitioned_param_coordinator.py, ``fetch_sub_module``).
    """
    live = context.workload.software.live_parameters
    if not live:
        return context.parallelism.prefetch
    roots = set(units.roots.values())
    root = sum(stored_elements(units.weights[unit]) for unit in roots)
    layers = (stored_elements(weights) for unit, weights in units.weights.items() if unit not in roots)
    layer = max(layers, default=live)
    return max((live - root) // layer - 1, 0)


class _Use(NamedTuple):
    """A piece that needs parameters: its label, and that of the copies before it, if any."""

    label: str
    copies: str


class _Gathering:
    """Goes through a rank's passes in order and keeps track of which units are whole."""

    def __init__(self, context: RankContext, units: Units) -> None:
        self.compute: list[Step] = []
        self.gathers: list[Step] = []
        self._workload, self._units = context.workload, units
        parallelism = context.parallelism
        self._ahead = _layers_ahead(context, units) if parallelism.overlap.param_gather else 0
        self._drops_after_forward = parallelism.reshard_after_forward
        self._whole_after_backward = context.workload.stage_runtime.keeps_units
        self._variants = context.stages.variants
        self._whole: set[Unit] = set()
        self._last_use: dict[Unit, str] = {}
        #: Pieces of layers and, backward, of heads, in order.
        self._uses: list[_Use] = []
        self._beside_head = False
        #: Modules of units that are whole without a gather, whose hooks run before the next piece.
        self._hooks = 0

    def run(self, run: UnitPass) -> None:
        """Gather for one pass."""
        if not run.needs_weights:
            self._beside_head = False
            for piece in run.pieces:
                self._add(piece, (), 0.0, self._dropped_behind(run, piece))
            return
        root = self._units.roots[run.step.stage]
        before = tuple(step.label for step in self.compute[-1:] if run.is_forward)
        root_gathers = self._gather(root, run, f"gather {run.step.label} root", before)
        needs = root_gathers
        for number, piece in enumerate(run.pieces):
            layer = self._units.layer(run.step, piece.main)
            late_bytes = freed_bytes = 0.0
            gathers = root_gathers
            if layer:
                gathers = self._gather(layer, run, f"gather {piece.work.label}", (*before, *self._wait_for_room()))
                needs = [*needs, *gathers]
                late_bytes = self._taken_late(layer) if self._beside_head and gathers else 0.0
                drop = self._drops_after_forward if run.is_forward else not self._whole_after_backward
                freed_bytes = self._note_use(layer, piece, drop=drop)
            piece = piece if gathers else piece.without_copies
            self._beside_head = not run.is_forward and not layer and number == 0
            if layer or self._beside_head:
                self._uses.append(_Use(piece.work.label, piece.copies.label if layer and piece.copies else ""))
            if piece.work.label == run.step.label:
                drop = not (run.is_forward or self._whole_after_backward)
                freed_bytes += self._note_use(root, piece, drop=drop)
            self._add(piece, needs, late_bytes, freed_bytes + self._dropped_behind(run, piece))
            needs = []

    def _add(self, piece: UnitPiece, needs: Sequence[str], late_bytes: float, freed_bytes: float) -> None:
        """Add a piece that waits for ``needs``, takes ``late_bytes`` more and gives back ``freed_bytes`` more."""
        first, *rest = [step for step in (piece.copies, piece.work) if step]
        alloc_bytes, after = first.alloc_bytes + late_bytes, (*first.after, *needs)
        steps = [replace(first, after=after, alloc_bytes=alloc_bytes, hooks=self._hooks), *rest]
        self._hooks = 0
        steps[-1] = replace(steps[-1], free_bytes=steps[-1].free_bytes + freed_bytes)
        self.compute += steps

    def _dropped_behind(self, run: UnitPass, piece: UnitPiece) -> float:
        """Drop what is whole of a stage behind its last pass of a step; return the bytes that are given back."""
        if not (self._whole_after_backward and run.makes_gradients and piece.work.label == run.step.label):
            return 0.0
        if not self._variants.variant_of_step(run.step).turn.last:
            return 0.0
        stage = run.step.stage
        units = [unit for unit in self._whole if unit == self._units.roots[stage] or unit[0] == stage]
        self._whole -= set(units)
        self._last_use |= dict.fromkeys(units, piece.work.label)
        return sum(gathered_bytes(self._workload, self._units.weights[unit]) for unit in units)

    def _wait_for_room(self) -> tuple[str, ...]:
        """Return the labels that a layer's gather waits for, so that no more layers are whole or on their way.

        They are the copies of the piece that it goes on beside. Where that has none, or nothing goes on beside it, it
        is the piece before.
        """
        beside = len(self._uses) - self._ahead
        if self._ahead and beside >= 0 and self._uses[beside].copies:
            return (self._uses[beside].copies,)
        return (self._uses[beside - 1].label,) if beside >= 1 else ()

    def _gather(self, unit: Unit, run: UnitPass, label: str, after: Sequence[str]) -> list[str]:
        """Make a unit whole for a pass, if it is not; return the labels that the pass has to wait for."""
        if unit in self._whole:
            return []
        self._whole.add(unit)
        waits = dict.fromkeys((*after, *([self._last_use[unit]] if unit in self._last_use else ())))
        gathers = gather(self._workload, label, self._units.weights[unit], run.step)
        if not gathers:
            self._hooks += hooks(self._workload, self._units.weights[unit])
        self.gathers += [replace(one, after=(*waits, *one.after)) for one in gathers]
        return [one.label for one in gathers]

    def _taken_late(self, unit: Unit) -> float:
        """Return the bytes of a layer's gather that its piece takes, for the gather goes on beside the head's backward.

        A host's work takes memory in the order in which it is issued. This gather is issued after the loss, where most
        is alive (the hook on the root's output, torch's ``FSDPState._pre_backward``).
        """
        nbytes = gathered_bytes(self._workload, self._units.weights[unit])
        last = self.gathers[-1]
        late = min(nbytes, last.alloc_bytes)
        self.gathers[-1] = replace(last, alloc_bytes=last.alloc_bytes - late)
        return late

    def _note_use(self, unit: Unit, piece: UnitPiece, *, drop: bool) -> float:
        """Note the last use of a unit; return the bytes that the piece gives back."""
        self._last_use[unit] = piece.work.label
        if not drop:
            return 0.0
        self._whole.discard(unit)
        return gathered_bytes(self._workload, self._units.weights[unit])

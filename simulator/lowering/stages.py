"""Passes through the stages of a model as steps."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.config import Workload
from simulator.lowering.fsdp_copies import around, reduced
from simulator.lowering.gradients import Mark, gradients_complete, weights_used
from simulator.models import Op, Part, PassBytes, Seat, Turn, activation_bytes, pass_bytes, stage_parts, weights_of
from simulator.operations.weights import Weight
from simulator.program import Axis, Block, Collective, CollectiveKind, Compute, Fixed, Purpose, Step, StepPhase
from simulator.schedules import Action, Order

#: What a pass runs where the stage has no kernel for it: an embedding alone has no input gradient.
_NOTHING = Compute("nothing", Fixed(0.0), StepPhase.BACKWARD)

#: A stage, the kind of a pass through it, and a turn: passes with the same do the same.
Variant = tuple[int, str, Turn]


def first_and_last(order: Order, microbatches: int) -> dict[tuple[int, int], Turn]:
    """Return, by stage and micro-batch, the turns of those that make the first and the last gradients of a step."""
    making: dict[tuple[int, int], list[int]] = {}
    for action in (action for slots in order for slot in slots for action in slot):
        if action.kind in ("B", "W"):
            making.setdefault((action.stage, action.microbatch // microbatches), []).append(action.microbatch)
    return {
        (stage, microbatch): Turn(first=microbatch == row[0], last=microbatch == row[-1])
        for (stage, _), row in making.items()
        for microbatch in (row[0], row[-1])
    }


class Stages:
    """The blocks of every model stage for a rank at ``seat``, each distinct one built once. ``turns``: by stage and
    micro-batch, those that are the first or last of a step."""

    def __init__(self, workload: Workload, seat: Seat, turns: Mapping[tuple[int, int], Turn]) -> None:
        self.workload, self.seat, self._turns = workload, seat, turns
        parallelism = workload.parallelism
        self.n_stages = parallelism.n_stages
        self.parts = [stage_parts(workload, stage, seat) for stage in range(self.n_stages)] * parallelism.plan.copies
        self._chunk = {
            stage: chunk for rank in range(parallelism.pp) for chunk, stage in enumerate(parallelism.stages_of(rank))
        }
        self._parts_in: dict[tuple[int, Turn], tuple[Part, ...]] = {}
        self._blocks: dict[tuple[object, ...], Block] = {}
        self._pass_of: dict[Variant, tuple[Block, PassBytes]] = {}
        self._pieces_of: dict[Variant, list[tuple[int, Block]]] = {}

    def weights(self, *stages: int) -> tuple[Weight, ...]:
        """Return the weights of stages on one rank."""
        return weights_of(part for stage in stages for part in self.parts[stage])

    def gradients_complete(self, step: Step) -> list[Mark]:
        """Where the backward pass ``step`` completes gradients; what stands before the parts' own ops counts."""
        parts = self._parts_of(self.variant(step))
        own = sum(len(ops) for _, ops in self._ops(parts, step.phase))
        return gradients_complete(parts, self._n_ops(step) - own, whole=step.phase == "B")

    def weights_used(self, step: Step) -> list[Mark]:
        """Return where the forward pass ``step`` has used weights."""
        parts = self.parts[step.stage]
        return weights_used(parts, self._n_ops(step) - sum(len(part.forward) for part in parts))

    def by_part(self, step: Step) -> list[tuple[int, Block]]:
        """The pass ``step`` cut into those of its parts, in the order they run: (index of the part in its stage,
        block). What stands before the parts' own ops goes with the first."""
        key = self.variant(step)
        if key not in self._pieces_of:
            parts = self._parts_of(key)
            order = self._ops(parts, step.phase)
            before = self._n_ops(step) - sum(len(ops) for _, ops in order)
            first = order[0][0]
            self._pieces_of[key] = [
                (index, self._piece(parts[index], step, ops, before if index == first else 0)) for index, ops in order
            ]
        return self._pieces_of[key]

    def _piece(self, part: Part, step: Step, ops: list[Op], before: int) -> Block:
        """The pass of one part, ``ops``, after the first ``before`` ops of ``step``; equal ones are one block."""
        key = ("part", step.phase, before, tuple(ops), id(part))
        if key not in self._blocks:
            block, _ = self._pass_of[self.variant(step)]
            self._blocks[key] = Block(f"{step.phase} {part.name}", (*block.ops[:before], *ops))
        return self._blocks[key]

    def _n_ops(self, step: Step) -> int:
        return len(self._pass_of[self.variant(step)][0].ops)

    def variant(self, step: Step) -> Variant:
        """What tells the pass ``step`` from others."""
        return self._variant(step.stage, step.phase, step.microbatch)

    def _variant(self, stage: int, kind: str, microbatch: int) -> Variant:
        makes = kind in ("B", "W")
        return stage, kind, self._turns.get((stage, microbatch), Turn()) if makes else Turn()

    def parts_in(self, step: Step) -> tuple[Part, ...]:
        """The parts of the stage that the pass ``step`` goes through."""
        return self._parts_of(self.variant(step))

    def _parts_of(self, variant: Variant) -> tuple[Part, ...]:
        """The stage's parts; those that do nothing special in their turn are the very same ones."""
        stage, _, turn = variant
        if (stage, turn) not in self._parts_in:
            usual = self.parts[stage]
            special = stage_parts(self.workload, stage % self.n_stages, self.seat, turn)
            pairs = zip(usual, special, strict=True)
            self._parts_in[stage, turn] = tuple(one if one == other else other for one, other in pairs)
        return self._parts_in[stage, turn]

    def step(self, action: Action) -> Step:
        """The compute step of an action, with what it holds and gives back."""
        key = self._variant(action.stage, action.kind, action.microbatch)
        if key not in self._pass_of:
            parts = self._parts_of(key)
            self._pass_of[key] = self._block(action.stage, action.kind, parts), pass_bytes(parts, action.kind)
        block, moved = self._pass_of[key]
        return Step(
            str(action),
            block,
            phase=StepPhase(action.kind),
            microbatch=action.microbatch,
            stage=action.stage,
            chunk=self._chunk[action.stage],
            alloc_bytes=moved.alloc,
            free_bytes=moved.free,
            workspace_bytes=moved.workspace,
        )

    def _block(self, stage: int, kind: str, parts: tuple[Part, ...]) -> Block:
        place = stage % self.n_stages
        arrives = {"F": place > 0, "W": False}.get(kind, place < self.n_stages - 1)
        parallelism = self.workload.parallelism
        gathered = parallelism.scatter_gather_p2p and parallelism.tp > 1 and arrives
        key = (kind, gathered, tuple(id(part) for part in parts))
        if key not in self._blocks:
            ops = [op for _, of_part in self._ops(parts, kind) for op in of_part]
            if gathered:
                gather = CollectiveKind.ALL_GATHER
                nbytes = activation_bytes(self.workload)
                ops.insert(0, Collective("tp.all_gather p2p", gather, nbytes, Axis.TP, Purpose.TENSOR))
            ops = ops or [_NOTHING]
            self._blocks[key] = Block(f"{kind} {'+'.join(_runs(parts))}", tuple(ops))
        return self._blocks[key]

    def _ops(self, parts: tuple[Part, ...], kind: str) -> list[tuple[int, list[Op]]]:
        """What a pass of ``parts`` runs, in order: (index of a part, its ops). The copies of a root unit are the last
        of all."""
        order = range(len(parts)) if kind == "F" else reversed(range(len(parts)))
        if not self.workload.replication.fully_sharded:
            return [(index, list(parts[index].ops(kind))) for index in order]
        pieces = [(index, around(self.workload, parts[index], kind)) for index in order]
        with_ops = [ops for _, ops in pieces if ops]
        if with_ops:
            with_ops[-1] += reduced(self.workload, [part for part in parts if not part.is_unit], kind)
        return pieces


def _runs(parts: tuple[Part, ...]) -> list[str]:
    """Names of parts with repeats counted: embedding, 8 layer."""
    counts: dict[str, int] = {}
    for part in parts:
        counts[part.name] = counts.get(part.name, 0) + 1
    return [name if count == 1 else f"{count} {name}" for name, count in counts.items()]

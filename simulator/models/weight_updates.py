"""Updates of the weights of a rank: which optimizer updates which weights, in what types, and its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.config import Workload
from simulator.config.optimizer_choices import Choice, choices
from simulator.models.tuning import kinds_of_weight
from simulator.operations.nodes import Op
from simulator.operations.weights import DENSE_AXIS, EXPERT_AXIS, Weight, trained
from simulator.optimizers import Implementation, UpdatedTensor, UpdateTypes
from simulator.program import AllToAll, Axis, Purpose
from simulator.units import DTYPE_BYTES

#: Elements of a tensor from which on its states are paged (bitsandbytes/optim/optimizer.py, ``get_state_buffer``).
FEWEST_PAGED = 100_000


@dataclass(frozen=True)
class WeightUpdate:
    """Tensors that one optimizer updates, and how.

    ``exchanged`` are the bytes of momentum that this rank's shards of whole matrices have, by the axis of their ranks.
    """

    implementation: Implementation
    parameters: tuple[UpdatedTensor, ...]
    types: UpdateTypes
    paged: bool
    exchanged: tuple[tuple[Axis, float], ...] = ()

    def ops(self) -> tuple[Op, ...]:
        """Return the kernels, with exchanges of matrices before and after the kernels that need them whole."""
        first, *later_rounds = [kernels(self.parameters, self.types) for kernels in self.implementation.rounds]
        ops: list[Op] = [*first]
        for kernels in later_rounds:
            ops += [AllToAll("dp.all_to_all momentum", nbytes, axis, Purpose.DATA) for axis, nbytes in self.exchanged]
            ops += kernels
        return tuple(ops)

    @property
    def workspace_bytes(self) -> float:
        """Bytes that the step needs beside states."""
        return self.implementation.workspace_bytes(self.parameters, self.types)

    def state_tensors(self) -> tuple[float, ...]:
        """Return the bytes of each tensor of the states that are not paged: as many as have the weight's size."""
        sizes: list[float] = []
        for parameter in self.parameters:
            if not self._pages(parameter):
                nbytes = self.implementation.state_bytes(parameter, self.types)
                tensors = max(round(nbytes / (DTYPE_BYTES[self.types.state] * parameter.elements)), 1)
                sizes += [nbytes / tensors] * tensors
        return tuple(sizes)

    def state_bytes(self, *, paged: bool) -> float:
        """Return the bytes of states that are ``paged``, or of those that are not."""
        return sum(
            self.implementation.state_bytes(parameter, self.types)
            for parameter in self.parameters
            if paged == self._pages(parameter)
        )

    def _pages(self, parameter: UpdatedTensor) -> bool:
        """Tell whether the states of ``parameter`` page to the host's memory."""
        return self.paged and parameter.elements >= FEWEST_PAGED


def weight_updates(workload: Workload, weights: Iterable[Weight]) -> tuple[WeightUpdate, ...]:
    """Return the updates of the ``weights`` of a rank, in the order of the file's groups.

    Under ZeRO the rank updates its shard of each. Ranks with sharded parameters (ZeRO 3) hold a part of every matrix.
    """
    left = list(trained(weights))
    updates = []
    for choice in choices(workload):
        mine: list[Weight] = []
        rest: list[Weight] = []
        for weight in left:
            takes = not choice.weights or choice.weights in kinds_of_weight(weight)
            (mine if takes else rest).append(weight)
        left = rest
        if mine:
            updates.append(_update(workload, choice, mine))
    return tuple(updates)


def _update(workload: Workload, choice: Choice, weights: Sequence[Weight]) -> WeightUpdate:
    """Return the update of ``weights`` by one choice of an optimizer."""
    layout = workload.parallelism
    return WeightUpdate(
        choice.implementation,
        tuple(UpdatedTensor(weight.shape, 1 / layout.shards(weight.axis)) for weight in weights),
        update_types(workload, choice.state_dtype),
        choice.paged,
        _exchanged_bytes(workload, weights) if choice.rule.needs_whole and layout.zero == 3 else (),
    )


def update_types(workload: Workload, state_dtype: str) -> UpdateTypes:
    """Return the types of an update; the second moment of 1-bit Adam is frozen (arXiv 2102.02888, algorithm 1)."""
    training = workload.training
    master = training.optimizer.master_weights
    return UpdateTypes(
        weight="fp32" if master else training.trained_dtype,
        gradient="fp32" if master else training.grad_dtype,
        state=state_dtype,
        read_only="v" if workload.parallelism.grad_compression == "1bit" else "",
    )


def _exchanged_bytes(workload: Workload, weights: Sequence[Weight]) -> tuple[tuple[Axis, float], ...]:
    """Return the bytes of this rank's shards of ``weights`` in 16 bits, by the axis of the ranks that share them."""
    layout = workload.parallelism
    return tuple(
        (Axis(layout.shard_axis(axis)), DTYPE_BYTES["bf16"] * elements / layout.shards(axis))
        for axis in (DENSE_AXIS, EXPERT_AXIS)
        if layout.shards(axis) > 1 and (elements := sum(weight.elements for weight in weights if weight.axis == axis))
    )

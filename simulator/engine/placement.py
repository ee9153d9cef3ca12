"""A program, and the GPUs of a cluster that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.arrays import Ints, by_appearance
from simulator.cluster import Cluster
from simulator.cluster.gpu import Gpu
from simulator.costs import Costs
from simulator.program import Extension, Program, Repetition

#: Called with the time (s); returns the next extension of a program, or None where there is no more.
StepSource = Callable[[float], Extension | None]


class RankKind(NamedTuple):
    """The kind of ranks that do the same work at the same speed.

    ``role`` is their index of a role, ``gpu`` the type of their GPUs; speeds are those of
    `simulator.cluster.gpu.Gpu`.
    """

    role: int
    gpu: str
    speed_scale: float
    host_speed: float
    autograd_speed: float

    @classmethod
    def from_gpu(cls, role: int, gpu: Gpu) -> RankKind:
        """Return the kind of a rank that plays ``role`` on ``gpu``."""
        return cls(role, gpu.type, gpu.speed_scale, gpu.host_speed, gpu.autograd_speed)


@dataclass(frozen=True, eq=False)
class Placed:
    """A program on GPUs of a cluster; ``costs`` price its kernels.

    ``gpus[rank]`` is the GPU of a rank. ``servers`` are the nodes of the cluster that host its parameter servers.
    ``more()`` returns a new source of extensions for each play. ``repetition``: periods that the program leaves out.
    """

    program: Program
    costs: Costs
    gpus: tuple[int, ...]
    servers: tuple[int, ...]
    more: Callable[[], StepSource] | None = None
    repetition: Repetition | None = None

    @classmethod
    def on(
        cls,
        program: Program,
        costs: Costs,
        cluster: Cluster,
        nodes: Sequence[int] | None = None,
        more: Callable[[], StepSource] | None = None,
        repetition: Repetition | None = None,
    ) -> Placed:
        """Place rank after rank on the GPUs of ``nodes``, in their order; without ``nodes``, from the first GPU on.

        The program names the nodes of its parameter servers by their position in ``nodes``.
        """
        if nodes is None:
            return cls(program, costs, tuple(range(program.n_ranks)), program.servers, more, repetition)
        gpus = [gpu for node in nodes for gpu in cluster.gpus_of(node)]
        servers = tuple([nodes[at] for at in program.servers])
        return cls(program, costs, tuple(gpus[: program.n_ranks]), servers, more, repetition)

    def kinds(self, cluster: Cluster) -> list[RankKind]:
        """Return the kinds of its ranks, in the order of their first ranks."""
        return self._kinds(cluster)[1]

    def kind_numbers(self, cluster: Cluster) -> Ints:
        """Return the place of every rank's kind in `kinds`."""
        return self._kinds(cluster)[0]

    def rank_kinds(self, cluster: Cluster) -> list[RankKind]:
        """Return the kind of every rank."""
        numbers, kinds = self._kinds(cluster)
        return [kinds[number] for number in numbers.tolist()]

    def _kinds(self, cluster: Cluster) -> tuple[Ints, list[RankKind]]:
        gpu_kind, gpus = cluster.gpu_kinds
        kind = self.program.role_numbers * len(gpus) + gpu_kind[np.array(self.gpus, dtype=np.int64)]
        first, number = by_appearance(kind)
        pairs = (divmod(one, len(gpus)) for one in kind[first].tolist())
        return number, [RankKind.from_gpu(role, gpus[gpu]) for role, gpu in pairs]

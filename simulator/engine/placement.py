"""A program, and the GPUs of a cluster that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.cluster.cluster import Gpu
from simulator.costs import Costs
from simulator.program import Extension, Program, Repetition

#: Called with the time (s); returns the next extension of a program, or None where there is no more.
StepSource = Callable[[float], Extension | None]


class RankKind(NamedTuple):
    """The kind of ranks that do the same work at the same speed.

    ``role`` is their index of a role, ``gpu`` the type of their GPUs; speeds are those of
    `simulator.cluster.cluster.Gpu`.
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
        gpus_of_node: dict[int, list[int]] = {node: [] for node in nodes}
        for number, gpu in enumerate(cluster.gpus):
            if gpu.node in gpus_of_node:
                gpus_of_node[gpu.node].append(number)
        gpus = [gpu for node in nodes for gpu in gpus_of_node[node]]
        servers = tuple([nodes[at] for at in program.servers])
        return cls(program, costs, tuple(gpus[: program.n_ranks]), servers, more, repetition)

    def rank_kinds(self, cluster: Cluster) -> list[RankKind]:
        """Return the kind of every rank."""
        gpus = [cluster.gpus[gpu] for gpu in self.gpus]
        return [RankKind.from_gpu(role, gpu) for role, gpu in zip(self.program.role_of, gpus, strict=True)]

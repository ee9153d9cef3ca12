"""A program and where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.cluster import Cluster
from simulator.cluster.cluster import Gpu
from simulator.costs import Costs
from simulator.program import Program


class Kind(NamedTuple):
    """What ranks have in common that do the same on GPUs and hosts of one pace: ``role``, type of GPU, and the speeds
    of `simulator.cluster.cluster.Gpu`."""

    role: int
    gpu: str
    speed_scale: float
    host_speed: float
    autograd_speed: float

    @classmethod
    def of(cls, role: int, gpu: Gpu) -> Kind:
        return cls(role, gpu.type, gpu.speed_scale, gpu.host_speed, gpu.autograd_speed)


@dataclass(frozen=True, eq=False)
class Placed:
    """A program on GPUs of a cluster. ``gpus[rank]`` is the GPU of a rank; ``servers`` are the nodes, of the cluster's,
    of its parameter servers; ``costs`` price its kernels."""

    program: Program
    costs: Costs
    gpus: tuple[int, ...]
    servers: tuple[int, ...]

    @classmethod
    def on(cls, program: Program, costs: Costs, cluster: Cluster, nodes: Sequence[int] | None = None) -> Placed:
        """Rank after rank on the GPUs of ``nodes``, in their order; servers on those of them that the program names by
        position. Without ``nodes`` on those of the cluster, from the first."""
        if nodes is None:
            return cls(program, costs, tuple(range(program.n_ranks)), program.servers)
        of_node: dict[int, list[int]] = {node: [] for node in nodes}
        for number, gpu in enumerate(cluster.gpus):
            if gpu.node in of_node:
                of_node[gpu.node].append(number)
        gpus = [gpu for node in nodes for gpu in of_node[node]]
        return cls(program, costs, tuple(gpus[: program.n_ranks]), tuple([nodes[at] for at in program.servers]))

    def kinds(self, cluster: Cluster) -> list[Kind]:
        """Of every rank."""
        on = [cluster.gpus[gpu] for gpu in self.gpus]
        return [Kind.of(role, gpu) for role, gpu in zip(self.program.role_of, on, strict=True)]

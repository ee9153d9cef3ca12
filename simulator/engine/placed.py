"""A program and where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.cluster import Cluster
from simulator.costs import Costs
from simulator.program import Program


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

    def kinds(self, cluster: Cluster) -> list[tuple[int, str]]:
        """Role and type of GPU of every rank."""
        types = [cluster.gpus[gpu].type for gpu in self.gpus]
        return list(zip(self.program.role_of, types, strict=True))

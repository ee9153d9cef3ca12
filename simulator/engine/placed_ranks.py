"""The simulated ranks of a program, placed on GPUs, and the work of their hosts."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.cluster import Cluster
from simulator.engine.block_pieces import GpuSpeed
from simulator.engine.growth import HostType, host_type
from simulator.engine.issue_order import HostSpeeds, HostWork, host_work
from simulator.engine.placement import Placed, RankKind
from simulator.engine.rank import PlacedRank
from simulator.engine.recorder import GpuClocks
from simulator.engine.representatives import Representatives, SimulatedCluster
from simulator.program import COMPUTE_LANE, Block


def ranks_of_jobs(
    jobs: Sequence[Placed], simulated: SimulatedCluster, cluster: Cluster, clocks: Sequence[GpuClocks]
) -> list[list[PlacedRank]]:
    """Return the simulated ranks of each program, at the clocks of its GPUs."""
    each = zip(jobs, simulated.representatives, clocks, strict=True)
    return [_placed_ranks(placed, representatives, cluster, job_clocks) for placed, representatives, job_clocks in each]


def _placed_ranks(
    placed: Placed, representatives: Representatives, cluster: Cluster, clocks: GpuClocks
) -> list[PlacedRank]:
    """Return the simulated ranks of a program, at these clocks of their GPUs."""
    program, ranks = placed.program, []
    for number in representatives.multiplicity:
        gpu, role = cluster.gpus[placed.gpus[number]], program.role_of[number]
        groups = {
            axis: groups_of_axis[index]
            for axis, groups_of_axis in program.groups.items()
            if (index := program.group_index(axis, number)) >= 0
        }
        clock_hz = clocks[RankKind.from_gpu(role, gpu)]
        rank = PlacedRank(
            number=number,
            role=role,
            positions={axis: group.index(number) for axis, group in groups.items()},
            group_sizes={axis: len(group) for axis, group in groups.items()},
            speed=GpuSpeed(gpu.type, gpu.speed_scale, clock_hz, HostSpeeds.from_gpu(gpu)),
            interference=placed.costs.for_gpu(gpu.type).interference,
        )
        ranks.append(rank)
    return ranks


def n_blocks(jobs: Sequence[Placed], ranks: Sequence[Sequence[PlacedRank]]) -> int:
    """Return how many blocks of kernels the simulated ranks of all jobs run; 0 where a job grows, as nobody knows."""
    if any(placed.more is not None for placed in jobs):
        return 0
    total = 0
    for placed, ranks_of_job in zip(jobs, ranks, strict=True):
        lanes = [role.lanes.get(COMPUTE_LANE, ()) for role in placed.program.roles]
        by_role = [sum(isinstance(step.op, Block) for step in steps) for steps in lanes]
        total += sum(by_role[rank.role] for rank in ranks_of_job)
    return total


def work_of_hosts(placed: Placed, ranks: Sequence[PlacedRank]) -> dict[tuple[int, HostType], tuple[HostWork, ...]]:
    """Return the work of hosts around the steps of compute lanes, by role and kind of host."""
    kinds = dict.fromkeys((rank.role, host_type(rank)) for rank in ranks)
    costs, roles = placed.costs, placed.program.roles
    return {(role, kind): host_work(roles[role], costs.for_gpu(kind[0]), kind[1]) for role, kind in kinds}

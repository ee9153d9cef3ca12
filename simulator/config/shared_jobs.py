"""Rules of jobs that share a cluster: names, their one cluster and stack, profiles, and whose nodes are whose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from simulator.config.rules import scale
from simulator.config.workload import Workload
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec


def check_several(jobs: Sequence[Workload]) -> None:
    """Raise `InputError` where a job has nobody to share a cluster with."""
    if len(jobs) < 2:
        raise InputError(
            "shares the fabric with nobody", key="share_fabric", found=len(jobs), allowed="2 jobs and more"
        )


def with_distinct_names(jobs: Sequence[Workload]) -> list[Workload]:
    """Return the jobs with a number behind each name that a job before has, the first from 2 on that makes a new name.

    A name that a job has in its file is never another's: ``a``, ``a``, ``a (2)`` become ``a``, ``a (3)``, ``a (2)``.
    """
    used_names = {job.name for job in jobs}
    seen_names: set[str] = set()
    result = []
    for job in jobs:
        name = job.name
        if name in seen_names:
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            name = next(one for one in numbered if one not in used_names)
            used_names.add(name)
        seen_names.add(job.name)
        result.append(job if name == job.name else job.model_copy(update={"name": name}))
    return result


def with_nodes(jobs: Sequence[Workload]) -> tuple[list[Workload], int]:
    """Return the jobs with a list of their nodes as placement, and how many nodes their one cluster has.

    Raises `InputError` where the jobs are on different clusters or use different network stacks, and where nodes are
    too few or wanted twice.
    """
    first = jobs[0]
    for job in jobs[1:]:
        if replace(job.cluster, nodes=first.cluster.nodes) != first.cluster:
            raise InputError(
                f"{first.name} and {job.name} are on different clusters",
                key="cluster",
                found=f"{first.cluster.name} and {job.cluster.name}",
                fix="one cluster for both; only its number of nodes may differ",
            )
        if job.stack != first.stack:
            raise InputError(
                f"{first.name} and {job.name} share links, which one stack uses",
                key="stack",
                found=f"{first.stack or 'none'} and {job.stack or 'none'}",
                fix="one stack for both, or none",
            )
    nodes = _nodes_of_jobs(jobs, first.cluster)
    most = max(max(job.cluster.n_nodes for job in jobs), 1 + max(node for job_nodes in nodes for node in job_nodes))
    placed = [job.model_copy(update={"placement": job_nodes}) for job, job_nodes in zip(jobs, nodes, strict=True)]
    return placed, most


def calibrations_of_jobs(jobs: Sequence[Workload]) -> dict[str, str]:
    """Return the profile of each type of GPU that a job is on. Raises `InputError` where jobs name different ones."""
    profiles: dict[str, str] = {}
    first_job: dict[str, str] = {}
    for job in jobs:
        for gpu, name in job.calibrations.items():
            if profiles.setdefault(gpu, name) != name:
                raise InputError(
                    f"{first_job[gpu]} and {job.name} share links, which have one efficiency",
                    key="calibration",
                    found=f"{profiles[gpu]} and {name}",
                    fix="one calibration for both",
                )
            first_job.setdefault(gpu, job.name)
    return profiles


def _nodes_of_jobs(jobs: Sequence[Workload], cluster: ClusterSpec) -> tuple[tuple[int, ...], ...]:
    """Return the nodes of each job.

    A job has the nodes that it lists. Packed jobs take the first free nodes, job after job. Interleaved jobs then take
    free nodes one by one in turn. A cluster without a fixed number of nodes has as many as are needed.

    Raises `InputError` where two jobs list one node, and where there are too few.
    """
    owner: dict[int, str] = {}
    for job in jobs:
        for node in job.nodes or ():
            if node in owner:
                raise InputError(
                    f"node {node} is that of {owner[node]} and of {job.name}", key="placement", fix="nodes of its own"
                )
            owner[node] = job.name
    numbers = range(cluster.fixed_nodes) if cluster.fixed_nodes else itertools.count()
    free = (node for node in numbers if node not in owner)
    nodes = [list(job.nodes or ()) for job in jobs]

    def lacks(number: int) -> bool:
        job = jobs[number]
        return scale.gpus_of_workers(job.parallelism, cluster, nodes[number]) < job.n_ranks

    packed = [number for number, job in enumerate(jobs) if job.placement == "packed"]
    interleaved = [number for number, job in enumerate(jobs) if job.placement == "interleaved"]
    for group in (*([number] for number in packed), interleaved):
        while waiting := [number for number in group if lacks(number)]:
            for number in waiting:
                if (next_node := next(free, None)) is None:
                    problem = f"has no nodes left for {jobs[number].name}"
                    raise InputError(problem, key="cluster.nodes", found=cluster.fixed_nodes)
                nodes[number].append(next_node)
    return tuple(map(tuple, nodes))

"""Factors on recorded times that follow from other hardware: another type of GPU, another cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.cluster import Cluster, build_cluster
from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.config.profile import load_profile
from simulator.costs import Costs
from simulator.errors import InputError, located
from simulator.hardware.device_names import is_of_type
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.kernels import MatrixDtype
from simulator.network.collectives import OPERATIONS, idle_seconds, plan
from simulator.traces.classes import TRANSFER
from simulator.traces.trace import RunTrace, TracedCollective
from simulator.units import counted

#: Type of matrix FLOP/s by which GPUs are compared: what training computes in.
DTYPE: MatrixDtype = "bf16"
#: The network's operation of two ranks, one of which sends.
_ONE_WAY = "send"


def gpu_factors(trace: RunTrace, target: str, recorded: str | None) -> dict[str, float]:
    """Return by class the factor on kernels when GPUs are of the profile ``target``.

    Products and attention go with matrix FLOP/s, all else with the memory's bandwidth, by the profiles' data sheets.
    ``recorded``: profile of the GPU of the trace; None: the one that its name says. Raises `InputError` with the
    parameter's name as its key.
    """
    before, after = _spec(recorded or recorded_gpu(trace), "recorded"), _spec(target, "target")
    for spec, parameter, name in ((before, "recorded", recorded), (after, "target", target)):
        if DTYPE not in spec.peak_flops_per_s:
            raise InputError(f"the profile has no FLOP/s of {DTYPE}", key=parameter, found=name)
    flops = before.peak_flops_per_s[DTYPE].value / after.peak_flops_per_s[DTYPE].value
    memory = before.memory_bandwidth_Bps.value / after.memory_bandwidth_Bps.value
    return {"matmul": flops, "attention": flops, "memory": memory, "optimizer": memory}


def _spec(name: str, parameter: str) -> GpuSpec:
    return load_profile(name, key=parameter).gpu_spec


def recorded_gpu(trace: RunTrace) -> str:
    """Return the shipped profile of the trace's GPU. Raises `InputError` where its name does not say one."""
    name = trace.ranks[0].gpu
    fitting = [profile for profile in catalog.names("profile") if name and is_of_type(name, profile)]
    if len(fitting) != 1:
        raise InputError(
            "the trace does not say which profile its GPU has",
            key="recorded",
            found=name,
            allowed=", ".join(fitting or catalog.names("profile")),
        )
    return fitting[0]


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of collectives on an idle cluster, with the profile of its GPU."""

    cluster: Cluster
    costs: Costs

    @classmethod
    def on(cls, reference: str | Mapping[str, Any], n_ranks: int, parameter: str) -> ExchangeTimes:
        """Return the times on a cluster of as many nodes as hold ``n_ranks``.

        Raises `InputError` whose keys begin with ``parameter``, the name of what gave ``reference``.
        """
        with located(lambda key: (None, f"{parameter}.{key}" if key else parameter)):
            spec = load_cluster(reference)
            nodes = max(spec.n_nodes, spec.nodes_for(n_ranks))
            if nodes > spec.n_nodes and not all(node.nics.count for node in spec.kinds):
                has = f"has {counted(spec.n_gpus, 'GPU')} and no network cards, and the trace {n_ranks:,} ranks"
                raise InputError(has, found=spec.name, fix="a cluster with network cards")
            spec = load_cluster(reference, nodes=nodes)
            cluster = build_cluster(spec)
        profiles = {gpu: load_profile(gpu, key=parameter) for gpu in cluster.gpu_types(range(n_ranks))}
        return cls(cluster, Costs.from_profiles(profiles))

    def seconds(self, collective: TracedCollective) -> float | None:
        """Return the seconds of a collective; None where its operation, bytes or group are not known."""
        members = members_of(collective)
        if not members:
            return None
        if collective.operation == TRANSFER:
            chosen = plan(_ONE_WAY, collective.nbytes, members[:2], self.cluster, self.costs)
        else:
            chosen = plan(collective.operation, collective.nbytes, members, self.cluster, self.costs)
        return idle_seconds(chosen, self.cluster, self.costs)


def members_of(collective: TracedCollective) -> tuple[int, ...]:
    """Return the ranks of a collective; none where its operation, bytes or group are not known.

    Of a group whose members are not listed, the first ranks are taken.
    """
    ranks = collective.ranks or tuple(range(collective.size))
    is_known = collective.operation in OPERATIONS and collective.nbytes > 0 and len(ranks) > 1
    return ranks if is_known else ()


def exchange_factor(
    trace: RunTrace, recorded: str, target: str | Mapping[str, Any]
) -> Callable[[TracedCollective], float]:
    """Return the factor on the time of a collective, which was recorded on one cluster and is to run on another.

    It is 1 where the trace does not tell operation, bytes and group. Raises `InputError`.
    """
    n_ranks = _ranks_needed(trace)
    before = ExchangeTimes.on(recorded, n_ranks, "recorded")
    after = ExchangeTimes.on(target, n_ranks, "target")
    factors: dict[TracedCollective, float] = {}

    def factor(collective: TracedCollective) -> float:
        if collective not in factors:
            old, new = before.seconds(collective), after.seconds(collective)
            factors[collective] = new / old if old and new else 1.0
        return factors[collective]

    return factor


def _ranks_needed(trace: RunTrace) -> int:
    """Return how many ranks the job has, as far as the trace says."""
    counts = [rank.world_size for rank in trace.ranks] + [rank.rank + 1 for rank in trace.ranks]
    for rank in trace.ranks:
        for collective in rank.collectives:
            counts += [collective.size, *[member + 1 for member in collective.ranks]]
    return max(counts)


def unknown_exchanges(trace: RunTrace) -> int:
    """Return how many communications do not tell operation, bytes or group, and so keep their times anywhere."""
    count = 0
    for rank in trace.ranks:
        is_told = [bool(members_of(one)) for one in rank.collectives]
        numbers = rank.ops.collective[rank.ops.collective >= 0].tolist()
        count += sum(not is_told[number] for number in numbers)
    return count

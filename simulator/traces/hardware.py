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
from simulator.traces.trace import RunTrace, TracedCollective

#: Type of matrix FLOP/s by which GPUs are compared: what training computes in.
DTYPE: MatrixDtype = "bf16"
#: Names that Kineto and the network have for one operation of two ranks.
_NETWORK_NAME = {"send": "send", "recv": "send"}


def gpu_factors(trace: RunTrace, target: str, recorded: str | None) -> dict[str, float]:
    """Return by class the factor on kernels when GPUs are of the profile ``target``.

    Products and attention go with matrix FLOP/s, all else with the memory's bandwidth, by the profiles' data sheets.
    ``recorded``: profile of the GPU of the trace; None: the one that its name says. Raises `InputError`.
    """
    before, after = _spec(recorded or recorded_gpu(trace), "--recorded-gpu"), _spec(target, "--gpu")
    for spec, option, name in ((before, "--recorded-gpu", recorded), (after, "--gpu", target)):
        if DTYPE not in spec.peak_flops_per_s:
            raise InputError(f"the profile has no FLOP/s of {DTYPE}", key=option, found=name)
    flops = before.peak_flops_per_s[DTYPE].value / after.peak_flops_per_s[DTYPE].value
    memory = before.memory_bandwidth_Bps.value / after.memory_bandwidth_Bps.value
    return {"matmul": flops, "attention": flops, "memory": memory, "optimizer": memory}


def _spec(name: str, option: str) -> GpuSpec:
    return load_profile(name, file=option).gpu_spec


def recorded_gpu(trace: RunTrace) -> str:
    """Return the shipped profile of the trace's GPU. Raises `InputError` where its name does not say one."""
    name = trace.ranks[0].gpu
    fitting = [profile for profile in catalog.names("profile") if name and is_of_type(name, profile)]
    if len(fitting) != 1:
        raise InputError(
            "the trace does not say which profile its GPU has",
            key="--recorded-gpu",
            found=name,
            allowed=", ".join(fitting or catalog.names("profile")),
        )
    return fitting[0]


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of collectives on an idle cluster, with the profile of its GPU. Raises `InputError` when built."""

    cluster: Cluster
    costs: Costs

    @classmethod
    def on(cls, reference: str | Mapping[str, Any], n_ranks: int, option: str) -> ExchangeTimes:
        """Return the times on a cluster of as many nodes as hold ``n_ranks``."""
        with located(lambda key: (option, key)):
            spec = load_cluster(reference)
            spec = load_cluster(reference, nodes=max(spec.n_nodes, spec.nodes_for(n_ranks)))
            cluster = build_cluster(spec)
        profiles = {gpu: load_profile(gpu, file=option) for gpu in cluster.gpu_types(range(n_ranks))}
        return cls(cluster, Costs.from_profiles(profiles))

    def seconds(self, collective: TracedCollective) -> float | None:
        """Return the seconds of a collective; None where its operation, bytes or group are not known."""
        operation = _NETWORK_NAME.get(collective.operation, collective.operation)
        ranks = collective.ranks or tuple(range(collective.size))
        if operation not in OPERATIONS or not collective.nbytes or len(ranks) < 2:
            return None
        members = ranks[:2] if operation == "send" else ranks
        chosen = plan(operation, collective.nbytes, members, self.cluster, self.costs)
        return idle_seconds(chosen, self.cluster, self.costs)


def exchange_factor(
    trace: RunTrace, recorded: str, target: str | Mapping[str, Any]
) -> Callable[[TracedCollective], float]:
    """Return the factor on the transfer of a collective, which was recorded on one cluster and is to run on another.

    It is 1 where the trace does not tell operation, bytes and group. Raises `InputError`.
    """
    n_ranks = _ranks_needed(trace)
    before = ExchangeTimes.on(recorded, n_ranks, "--recorded-cluster")
    after = ExchangeTimes.on(target, n_ranks, "--cluster")
    factors: dict[TracedCollective, float] = {}

    def factor(collective: TracedCollective) -> float:
        if collective not in factors:
            old, new = before.seconds(collective), after.seconds(collective)
            factors[collective] = new / old if old and new else 1.0
        return factors[collective]

    return factor


def _ranks_needed(trace: RunTrace) -> int:
    """Return how many ranks the job has, as far as the trace says."""
    told = [rank.world_size for rank in trace.ranks] + [rank.rank + 1 for rank in trace.ranks]
    for rank in trace.ranks:
        for collective in rank.collectives:
            told += [collective.size, *[member + 1 for member in collective.ranks]]
    return max(told)


def unknown_exchanges(trace: RunTrace) -> int:
    """Return how many communications do not tell operation, bytes or group, and so keep their times anywhere."""
    count = 0
    for rank in trace.ranks:
        is_told = [
            _NETWORK_NAME.get(one.operation, one.operation) in OPERATIONS and one.nbytes > 0 and one.size > 1
            for one in rank.collectives
        ]
        numbers = rank.ops.collective[rank.ops.collective >= 0].tolist()
        count += sum(not is_told[number] for number in numbers)
    return count

"""Origins of a program's time: measured, published, data sheet or assumed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from simulator.costs.costs import Costs
from simulator.costs.origin import Origin
from simulator.program import Block, Program, Repetition, kernels_of


def priced_by(
    program: Program, costs: Costs, gpus: Sequence[str], repetition: Repetition | None = None
) -> dict[str, float]:
    """Return the shares of all kernel time by the origin of prices, the largest first.

    Origins are measured, published, datasheet, assumed and exact; ``extrapolated`` is the share of kernels that lie
    outside what was fitted. Roles weigh by ranks. ``gpus``: the type of every rank's GPU. ``repetition``: what the
    program leaves out."""
    block_seconds: dict[tuple[int, str], dict[str, float]] = {}
    prices: dict[tuple[int, str], tuple[Origin, float]] = {}
    total: dict[str, float] = defaultdict(float)
    for (index, gpu), ranks in Counter(zip(program.role_of, gpus, strict=True)).items():
        for _, _, step in program.roles[index].steps():
            if isinstance(step.op, Block):
                key = id(step.op), gpu
                if key not in block_seconds:
                    block_seconds[key] = _seconds_by_origin(step.op, costs.for_gpu(gpu), prices)
                runs = ranks if repetition is None else ranks * repetition.runs(step)
                for kind, seconds in block_seconds[key].items():
                    total[kind] += seconds * runs
    extrapolated = total.pop("extrapolated", 0.0)
    whole = sum(total.values()) or 1.0
    shares = {kind: total[kind] / whole for kind in sorted(total, key=lambda kind: -total[kind])}
    return {**shares, "extrapolated": extrapolated / whole}


def _seconds_by_origin(
    block: Block, costs: Costs, prices: dict[tuple[int, str], tuple[Origin, float]]
) -> dict[str, float]:
    """Return the seconds of a block by origin.

    ``prices`` are those of kernels, by id and GPU, as layers and blocks share them.
    """
    seconds: dict[str, float] = defaultdict(float)
    for kernel in (compute.kernel for op in block.ops for compute in kernels_of(op)):
        key = id(kernel), costs.gpu
        if key not in prices:
            prices[key] = costs.origin(kernel), costs.kernel_s(kernel, costs.gpu)
        origin, price = prices[key]
        seconds[origin.kind] += price
        if origin.extrapolated:
            seconds["extrapolated"] += price
    return seconds

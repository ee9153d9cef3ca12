"""What a program's time rests on."""

from __future__ import annotations

from collections import Counter, defaultdict

from simulator.costs.costs import Costs
from simulator.program import Block, Program
from simulator.program.ops import kernels_of


def priced_by(program: Program, costs: Costs, gpu: str) -> dict[str, float]:
    """Shares of all kernel time by where the prices come from (measured, published, datasheet, assumed, exact), the
    largest first, and ``extrapolated``: the share of kernels that lie outside what was fitted. Roles weigh by ranks."""
    of_block: dict[int, dict[str, float]] = {}
    total: dict[str, float] = defaultdict(float)
    ranks = Counter(program.role_of)
    for index, role in enumerate(program.roles):
        for _, _, step in role.steps():
            if isinstance(step.op, Block):
                if id(step.op) not in of_block:
                    of_block[id(step.op)] = _seconds_by_origin(step.op, costs, gpu)
                for kind, seconds in of_block[id(step.op)].items():
                    total[kind] += seconds * ranks[index]
    extrapolated = total.pop("extrapolated", 0.0)
    whole = sum(total.values()) or 1.0
    shares = {kind: total[kind] / whole for kind in sorted(total, key=lambda kind: -total[kind])}
    return {**shares, "extrapolated": extrapolated / whole}


def _seconds_by_origin(block: Block, costs: Costs, gpu: str) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for kernel in (compute.kernel for op in block.ops for compute in kernels_of(op)):
        origin, price = costs.origin(kernel), costs.kernel_s(kernel, gpu)
        seconds[origin.kind] += price
        if origin.extrapolated:
            seconds["extrapolated"] += price
    return seconds

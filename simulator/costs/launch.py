"""What the host takes to issue an op."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.config.profile import LaunchCosts
from simulator.program import Attention, Comm, Compute, GroupedMatmul, Matmul, Memory
from simulator.program.ops import POINT_TO_POINT

#: Phases that the main thread issues; what follows from them is issued by autograd's, which holds it up meanwhile.
FORWARD = ("F", "R")


def launch_seconds(costs: LaunchCosts) -> dict[str, float]:
    """Seconds by what `issued` calls an op."""
    table = {f"forward_{name}": seconds for name, seconds in costs.forward_s.items()}
    table |= {f"backward_{name}": seconds for name, seconds in costs.backward_s.items()}
    return {**table, "optimizer": costs.optimizer_s, "collective": costs.collective_s, "p2p": costs.p2p_s}


def issued(op: Compute | Comm) -> str:
    """What the host has to do for an op: ``forward_matmul``, ``backward_norm``, ``optimizer``, ``collective`` ..."""
    if isinstance(op, Comm):
        return "p2p" if op.op in POINT_TO_POINT else "collective"
    if op.phase == "O":
        return "optimizer"
    direction = "forward" if op.phase in FORWARD else "backward"
    match op.kernel:
        case Matmul() | GroupedMatmul():
            return f"{direction}_matmul"
        case Attention():
            return f"{direction}_attention"
        case Memory(normalizes=True):
            return f"{direction}_norm"
    return f"{direction}_other"


def seconds(table: Mapping[str, float], op: Compute | Comm) -> float:
    """Of one op; nothing where the table does not list it."""
    return table.get(issued(op), 0.0)

"""What the host takes to issue an op, and what goes with several of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from simulator.config.host import LaunchCosts
from simulator.program import Attention, Beside, Block, Comm, Compute, GroupedMatmul, Matmul, Memory, Step
from simulator.program.ops import HOST_LANES, POINT_TO_POINT, comm_of, kernels_of

#: Phases that the main thread issues; what follows from them is issued by autograd's, which holds it up meanwhile.
FORWARD = ("F", "R")
#: What the main thread does of a backward pass: cut its graph in two (torch/distributed/pipelining/_backward.py, in
#: Python), and post what a pipeline sends and receives.
BY_MAIN_THREAD = ("split", "p2p")
#: Of data parallelism: a bucket of DDP's, a unit of FSDP's with the hooks and copies around it.
DATA_PARALLEL = {"all_reduce": "bucket", "all_gather": "gather", "reduce_scatter": "reduce"}


def launch_seconds(costs: LaunchCosts) -> dict[str, float]:
    """Seconds by what `issued` and `issued_with` call things."""
    table = {f"forward_{name}": seconds for name, seconds in costs.forward_s.items()}
    table |= {f"backward_{name}": seconds for name, seconds in costs.backward_s.items()}
    table |= {"optimizer": costs.optimizer_s, "collective": costs.collective_s, "p2p": costs.p2p_s}
    table |= dict.fromkeys(("exchange", "tp_all_reduce"), costs.collective_s)
    table |= {f"{way}_grouped": table[f"{way}_matmul"] for way in ("forward", "backward")} | costs.around_s
    return table | {"recompute_attention": table["forward_attention"] + costs.around_s.get("checkpoint", 0.0)}


def issued(op: Compute | Comm) -> str:
    """What the host has to do for an op: ``forward_matmul``, ``backward_norm``, ``optimizer``, ``collective`` ...

    A checkpoint, around a layer or around its core, has one attention to run again, with which it is counted.
    """
    if isinstance(op, Comm):
        return _of_comm(op)
    if op.phase == "O":
        return "optimizer"
    direction = "forward" if op.phase in FORWARD else "backward"
    match op.kernel:
        case Matmul():
            return f"{direction}_matmul"
        case GroupedMatmul():
            return f"{direction}_grouped"
        case Attention():
            return "recompute_attention" if op.phase == "R" else f"{direction}_attention"
        case Memory(normalizes=True):
            return f"{direction}_norm"
    return f"{direction}_other"


def _of_comm(op: Comm) -> str:
    if op.op in POINT_TO_POINT:
        return "p2p"
    if op.op in HOST_LANES:
        return HOST_LANES[op.op]
    if op.purpose == "ep":
        return "exchange"
    if op.purpose == "tp" and op.op == "all_reduce":
        return "tp_all_reduce"
    return DATA_PARALLEL.get(op.op, "collective") if op.purpose == "dp" else "collective"


def issued_with(step: Step, *, begins: bool) -> dict[str, int]:
    """What the host does for a step beside its ops, and how often. Start autograd's engine, where it ``begins`` a
    backward pass; in a split one, cut the graph in two, which takes as long as there are products in it."""
    found: dict[str, int] = {}
    if begins and step.phase in ("B", "I"):
        found["autograd"] = 1
    if step.phase in ("I", "W"):
        found["split"] = sum(issued(op) == "backward_matmul" for op in ops_of(step))
    return found


def ops_of(step: Step) -> Iterator[Compute | Comm]:
    """The kernels and collectives of a block, one by one; of other steps none."""
    if isinstance(step.op, Block):
        for op in step.op.ops:
            yield from single(op)


def single(op: Compute | Comm | Beside) -> Iterator[Compute | Comm]:
    """The kernels and the collective of one op of a block."""
    if not isinstance(op, Compute):
        yield comm_of(op)
    yield from kernels_of(op)


def seconds(table: Mapping[str, float], op: Compute | Comm) -> float:
    """Of one op; nothing where the table does not list it."""
    return table.get(issued(op), 0.0)

"""Work of the host: what it issues for an op, and what goes with several of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simulator.hardware.host import LaunchCosts
from simulator.program import (
    HOST_LANES,
    Attention,
    Beside,
    Block,
    Collective,
    Comm,
    Compute,
    Fixed,
    GraphPlace,
    GroupedMatmul,
    HostOperation,
    Kernel,
    Matmul,
    Memory,
    PointToPoint,
    RecordedWork,
    Step,
    Tiled,
    comm_of,
    kernels_of,
)

#: Passes that autograd's thread issues, recomputation included (torch/csrc/autograd/engine.cpp: a thread per device).
#: The main thread is held up meanwhile ...
BACKWARD = ("B", "I", "W")
#: ... but for work done in Python (torch/distributed/pipelining): finding where a graph can be cut in two, calling
#: autograd's engine for each module's weights, posting sends.
BY_MAIN_THREAD = ("split", "weights", "p2p")
#: Kernels that compute gradients of weights, each called for by itself where they are computed apart
#: (`stage_backward_weight` of _backward.py there).
WEIGHTS = ("backward_matmul", "backward_grouped", "backward_norm")
#: Work of an optimizer's step, which no CUDA graph launches (Megatron-Core, full_cuda_graph.py).
OPTIMIZER = ("optimizer", "update", "dtensor_update")
#: Collectives of data parallelism: a bucket of DDP's, a unit of FSDP's with the hooks and copies around it.
DATA_PARALLEL = {"all_reduce": "bucket", "all_gather": "gather", "reduce_scatter": "reduce"}


def launch_seconds(
    costs: LaunchCosts, *, dtensors: Iterable[str] = (), passes_in_graph: bool = False
) -> dict[str, float]:
    """Return seconds by the names that `issued` and `issued_with` give. ``dtensors``: those that are of DTensors.

    ``passes_in_graph``: one CUDA graph launches all but the optimizer's step.
    """
    table = {f"forward_{name}": seconds for name, seconds in costs.forward_s.items()}
    table |= {f"backward_{name}": seconds for name, seconds in costs.backward_s.items()}
    table |= {"optimizer": costs.optimizer_s, "collective": costs.collective_s, "p2p": costs.p2p_s}
    table |= dict.fromkeys(("exchange", "tp_all_reduce"), costs.collective_s)
    table |= {"update": costs.forward_s["other"], "gradient": costs.backward_s["other"]}
    for kind in dtensors:
        table[kind] += costs.around_s.get("dtensor", 0.0)
    if passes_in_graph:
        return {kind: seconds for kind, seconds in (table | costs.around_s).items() if kind in OPTIMIZER}
    return table | {f"{way}_grouped": table[f"{way}_matmul"] for way in ("forward", "backward")} | costs.around_s


def by_autograd(phase: str, kind: str) -> bool:
    """Return whether autograd's thread, not the main one, does the ``kind`` of work in a step of this phase."""
    return phase in BACKWARD and kind not in BY_MAIN_THREAD


def issued(op: Compute | Comm, phase: str = "") -> dict[str, int]:
    """Return the host's work for an op of a step of this phase: kind -> how often.

    Kinds are ``forward_matmul``, ``backward_norm``, ``optimizer``, ``collective`` ... A checkpoint is counted with the
    kernel that carries it. What compiled software does for each layer each way is counted with its attention, a
    fused kernel or the softmax of scores. What is run again is part of the backward graph. The first product of experts
    in one kernel is that kernel's launch, ``expert`` each further one, and each kernel that is launched within a call.
    """
    if isinstance(op, Compute | Collective) and op.graph:
        return _graph_launch(op)
    if isinstance(op, Comm):
        return _comm_launch(op)
    if op.phase == "O":
        return _optimizer_launches(op.kernel)
    if op.within_call:
        return {"expert": 1}
    way = "forward" if op.phase in ("F", "R") else "backward"
    kind = "gradient" if adds_gradient(op) else f"{way}_{_class(op.kernel)}"
    work = {kind: op.kernel.launches if isinstance(op.kernel, Tiled) else 1}
    if isinstance(op.kernel, Memory) and op.kernel.parts:
        work[f"{way}_part"] = op.kernel.parts
    if op.carries_checkpoint:
        work["checkpoint"] = 1
    elif op.computes_attention and op.phase != "R":
        work["graph"] = 1
    if op.dequantizes:
        work["dequantize"] = 1
    if isinstance(op.kernel, GroupedMatmul) and len(op.kernel.products) > 1:
        work["expert"] = len(op.kernel.products) - 1
    if phase == "W" and kind in WEIGHTS:
        work["weights"] = 1
    return work


def _comm_launch(op: Comm) -> dict[str, int]:
    if isinstance(op, RecordedWork):
        return {}
    hooks = {"hook": op.hooks} if isinstance(op, Collective) and op.hooks else {}
    return {comm_kind(op): 1, **hooks}


def _graph_launch(op: Compute | Collective) -> dict[str, int]:
    """Return the host's work for the CUDA graph whose first kernel is ``op``; nothing for its other kernels.

    A graph is one function of autograd, as a norm is. It first copies its inputs to where the graph reads them
    (Transformer Engine, pytorch/graph.py, ``Graphed``). Both are assumed to take as long as a norm and a copy outside.
    """
    if isinstance(op, Collective) or op.graph == GraphPlace.INSIDE:
        return {}
    way = "forward" if op.phase in ("F", "R") else "backward"
    return {f"{way}_norm": 1, f"{way}_other": 1}


def adds_gradient(op: Compute) -> bool:
    """Return whether the kernel adds a weight's gradient to a buffer, which hooks of that weight call for."""
    return op.phase == "W" and isinstance(op.kernel, Memory) and op.kernel.op == "accumulate"


def _optimizer_launches(kernel: Kernel) -> dict[str, int]:
    """Return what the host issues for a kernel of an optimizer: a multi-tensor one, or some for one tensor each."""
    if isinstance(kernel, Fixed):
        return {"optimizer": 1}
    if isinstance(kernel, Memory) and not kernel.launches:
        return {"optimizer": 1, "dtensor_update": kernel.parts} if kernel.parts else {"optimizer": 1}
    if isinstance(kernel, Memory):
        return {"update": kernel.launches}
    return {"update": 1}


def _class(kernel: Kernel) -> str:
    match kernel:
        case Matmul():
            return "matmul"
        case GroupedMatmul():
            return "grouped"
        case Attention():
            return "attention"
        case Memory(normalizes=True):
            return "norm"
    return "other"


def comm_kind(op: Comm) -> str:
    """Return the kind of work that the host has with a communication."""
    if isinstance(op, PointToPoint):
        return "p2p"
    if isinstance(op, HostOperation):
        return HOST_LANES[op.op]
    if op.purpose == "ep":
        return "exchange"
    if op.purpose == "tp" and op.op == "all_reduce":
        return "tp_all_reduce"
    return DATA_PARALLEL.get(op.op, "collective") if op.purpose == "dp" else "collective"


def issued_with(step: Step, *, begins: bool) -> dict[str, int]:
    """Return the host's work for a step before its ops: kind -> how often.

    It runs hooks of modules that no collective brings along. It starts autograd's engine where the step ``begins`` a
    backward pass. Before one of inputs alone it looks for where to cut the graph, which takes a time for each of its
    products.
    """
    work = {"hook": step.hooks} if step.hooks else {}
    if begins and step.phase in ("B", "I"):
        work["autograd"] = 1
    if step.phase == "I":
        work["split"] = sum("backward_matmul" in issued(op) for op in ops_of(step))
    return work


def ops_of(step: Step) -> Iterator[Compute | Comm]:
    """Yield the kernels and collectives of a block, one by one; none of other steps."""
    if isinstance(step.op, Block):
        for op in step.op.ops:
            yield from single(op)


def single(op: Compute | Collective | Beside) -> Iterator[Compute | Comm]:
    """Yield the kernels and the collective of one op of a block."""
    if not isinstance(op, Compute):
        yield comm_of(op)
    yield from kernels_of(op)

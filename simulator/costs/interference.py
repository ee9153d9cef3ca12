"""Interference: what communication takes from the kernels beside it on their GPU, and they from it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from simulator.costs.memory import MemoryCost
from simulator.costs.origin import KernelCost
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.interference import Interference
from simulator.program import Attention, Comm, GroupedMatmul, Kernel, Matmul, Memory, PointToPoint, Tiled

#: Streams that reach less than this share of the memory's bandwidth on the whole GPU are bound by the loads that SMs
#: issue. Measured beside receives that wait, on 16 of an H200's 132 SMs (calibration/results/runs). Halves of rows and
#: rotations (0.33 to 0.42 alone) take 1.12 to 1.17 times as long. Sums, activations and GELU (0.65 to 0.9) take as long
#: as alone.
SM_BOUND = 0.6


class InterferenceCost(Protocol):
    """Slow-downs of kernels and communication that share a GPU.

    ``queues``: whether communication starts only when the kernel under way has ended."""

    @property
    def queues(self) -> bool: ...

    def load(self, waiting: Sequence[Comm], moving: Sequence[Comm]) -> Hashable:
        """Return the load of communication that holds SMs (`Comm.holds_sms`), ``waiting`` for its peers or ``moving``
        bytes. Equal loads slow kernels alike; None slows no kernel."""

    def speed(self, kernel: Kernel, load: Hashable) -> float:
        """Return the speed of a kernel under a load, relative to having the GPU for itself."""

    def takes(self, memory_Bps: float) -> float:
        """Return the share of the memory's time that so many bytes/s take."""

    def leaves(self, kernel: Kernel) -> float:
        """Return the share of the memory's time that a kernel leaves to communication beside it; inf: all of it."""


#: Communication that holds SMs: collectives, or sends and receives alone, which hold fewer.
HeldBy = Literal["collective", "p2p"]


class SmLoad(NamedTuple):
    """Communication on a GPU: ``moves``: it moves bytes; ``by``: its kind."""

    moves: bool
    by: HeldBy


@dataclass(frozen=True)
class SharedSms:
    """SMs shared with NCCL's thread blocks, which hold them from when their kernel is on the GPU to its end.

    Without their peers these blocks spin. A collective gets its SMs when a kernel ends: until then all are taken.
    ``whole``: type of kernel -> its price on all of the GPU's ``sms``. ``fewer``: the same on the SMs that collectives,
    or sends and receives alone, leave. On an H100 or H200 attention has all but 24 and 14 SMs, products all but 48
    (`Interference.matmul_sms`). Kernels that memory bounds have a measured speed each, another
    one while nothing moves. Streams that reach less than `SM_BOUND` of the bandwidth by their ``memory`` prices lose
    the part of the SMs that is held too.

    Communication moves bytes of its GPU's memory (`memory_bytes`), and has the share of the memory's time that the
    kernel beside it leaves. Where at full speed it would take more, it is slowed. Memory is busy all the time at
    ``plain_Bps``, the bandwidth of a plain sum of two tensors. Streams that SMs bound leave it enough. Measured beside
    sums on two H200s, collectives of any kind have 0.16 to 0.19 of it, and sums lose 0.16 to 0.19 of their speed
    (calibration/measurements).
    """

    model: Interference
    whole: Mapping[type, KernelCost]
    fewer: Mapping[HeldBy, Mapping[type, KernelCost]]
    memory: MemoryCost
    plain_Bps: float
    sms: int
    queues: bool = True
    _speeds: dict[tuple[Kernel, SmLoad], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def load(self, waiting: Sequence[Comm], moving: Sequence[Comm]) -> SmLoad | None:
        if not waiting and not moving:
            return None
        p2p = all(isinstance(comm, PointToPoint) for comm in (*waiting, *moving))
        return SmLoad(bool(moving), "p2p" if p2p else "collective")

    def speed(self, kernel: Kernel, load: Hashable) -> float:
        if not isinstance(load, SmLoad):
            return 1.0
        if (kernel, load) not in self._speeds:
            self._speeds[kernel, load] = self._speed(kernel, load)
        return self._speeds[kernel, load]

    def takes(self, memory_Bps: float) -> float:
        return memory_Bps / self.plain_Bps

    def leaves(self, kernel: Kernel) -> float:
        leaves = self.model.leaves
        if isinstance(kernel, Memory):
            return math.inf if self._sms_bound(kernel) else leaves.norm if kernel.normalizes else leaves.other
        if isinstance(kernel, Matmul | GroupedMatmul):
            return leaves.matmul
        return leaves.attention if isinstance(kernel, Attention | Tiled) else math.inf

    def _sms_bound(self, kernel: Memory) -> bool:
        return not kernel.normalizes and self.memory.share(kernel) < SM_BOUND

    def _speed(self, kernel: Kernel, load: SmLoad) -> float:
        if isinstance(kernel, Memory):
            speeds = self.model.memory_speed if load.moves else self.model.waiting_speed
            if kernel.normalizes:
                return speeds.norm
            lost = self.model.sms.p2p if load.by == "p2p" else self.model.sms.collective
            return speeds.other * (1 - lost / self.sms if self._sms_bound(kernel) else 1.0)
        if type(kernel) not in self.whole:
            return 1.0
        return min(1.0, self.whole[type(kernel)].seconds(kernel) / self.fewer[load.by][type(kernel)].seconds(kernel))


def _accesses(op: str, members: int) -> float:
    """Return how often a GPU reads and writes the ``nbytes`` of an operation as input and output, mean over so many
    members."""
    match op:
        case "all_reduce" | "all_to_all" | "send_recv" | "barrier":
            return 2.0
        case "all_gather" | "reduce_scatter" | "reduce":  # all and a part; of a reduce all read, the root writes
            return 1 + 1 / members
        case "broadcast" | "send" | "recv":  # who has it reads it, the others write it
            return 1.0
        case "gather" | "scatter":  # each a part, the root all
            return 2 / members
    raise ValueError(f"not of NCCL's kernels: {op}")


def memory_bytes(comm: Comm, members: int, received: float) -> float:
    """Return the bytes of its memory that a GPU reads and writes in a collective, or in its end of a transfer.

    ``received``: bytes that it receives. Both are means over so many members; a root may have more. The input is read
    once, the output written once. Bytes received are written into a buffer by their sender, and read there by the
    receiver's kernel. A sender reads its input only (NCCL's primitives, src/device/prims_simple.h).
    """
    return _accesses(comm.op, members) * comm.nbytes + (0.0 if comm.op == "send" else 2 * received)


def without(spec: GpuSpec, sms: int) -> GpuSpec:
    """Return the GPU with so many SMs less; bounds of memory and power stay."""
    left = max(1, spec.sms - sms)
    peaks = {dtype: replace(peak, value=peak.value * left / spec.sms) for dtype, peak in spec.peak_flops_per_s.items()}
    return replace(spec, sms=left, peak_flops_per_s=peaks)

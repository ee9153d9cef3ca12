"""Transports of hosts' memory and drives, for all GPUs whose profiles have none of their own."""

from __future__ import annotations

from simulator.hardware.figures import OriginKind
from simulator.hardware.transport import Protocol, Transport

#: Seconds to start a copy between a GPU and its host or a job of the CPU. Assumed: an asynchronous copy of a few bytes
#: takes about as long as a few kernel launches.
START_s = 10e-6
#: Bytes/s that one thread of a CPU moves in an optimizer step. DeepSpeed 0.18.2's CPU Adam with the passes around it
#: takes 2.35 to 2.60 ns for the 42 bytes of a parameter. Measured: Intel Xeon (host of an NVIDIA H200, 16 cores, its
#: model not told), 2026-11-29, one and two processes of a thread: calibration/measurements/optimizers-and-losses.csv.
THREAD_Bps = 17e9


def plain(start_s: float, efficiency: float, kind: OriginKind, source: str) -> Transport:
    """Return a transport that takes ``start_s`` to start, and then reaches this share of the links' bandwidth."""
    at_once = Protocol(base_latency_s=start_s, hop_latency_s=0.0, bandwidth_fraction=1.0)
    return Transport(
        efficiency=efficiency,
        copy_Bps=1e30,
        p2p_copy_Bps=1e30,
        peer_latency_s=0.0,
        protocols={"simple": at_once},
        p2p={"simple": at_once},
        kind=kind,
        source=source,
    )


HOST_TRANSPORTS: dict[str, Transport] = {
    # CPU-Adam updates 10 billion parameters in 2.57 s on a DGX-2 (ZeRO-Offload, arXiv 2101.06840, table 4). At the 30
    # bytes per parameter of mixed precision that is 117 GB/s, of 256 GB/s at best: 2 Xeon Platinum 8168 with 6 channels
    # of DDR4-2666 each.
    "memory": plain(START_s, 0.456, "published", "arXiv 2101.06840, table 4"),
    # Drives reach the sequential figures of their data sheets.
    "nvme": plain(START_s, 1.0, "assumed", "data sheets of drives"),
}

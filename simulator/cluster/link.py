"""Links of a cluster, and how the bytes of a transfer spread over them."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.hardware.transport import TransportKind

#: Links, each with the share of a transfer's bytes that crosses it.
Spread = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a full-duplex link.

    ``kind`` is the transport whose efficiency and latency apply: nvlink, pcie, infiniband, roce or tcp. Drives of a
    node have nvme, the memory of its host memory (one link for both directions). A NIC's port is ``node3.nic2:tx``
    (towards the switch) and ``:rx``; a leaf's uplinks are ``rail2.leaf0.up:tx`` and ``:rx``.
    """

    index: int
    name: str
    kind: TransportKind
    src: str
    dst: str
    bandwidth_Bps: float
    latency_s: float

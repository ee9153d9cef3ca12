"""The one rule that turns the parameters of a stack into transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.hardware.stack import Stack, StackParameters
from simulator.hardware.transport import Protocol, ProtocolName, Transport, TransportKind

#: A hop of each protocol relative to one of LL. NCCL's tuner has them in microseconds (src/graph/tuning.cc, hwLat of
#: rings): inside a node 0.6, 1.9 and 3.4; over the network 2.7, 4.0 and 14.0.
NVLINK_HOPS: Mapping[ProtocolName, float] = {"ll": 1.0, "ll128": 1.9 / 0.6, "simple": 3.4 / 0.6}
NETWORK_HOPS: Mapping[ProtocolName, float] = {"ll": 1.0, "ll128": 4.0 / 2.7, "simple": 14.0 / 2.7}
#: The same for hops in switches that add up: 25 microseconds for the four hops of NVLS, 18 for one between nodes.
IN_NVSWITCH, IN_SWITCH = 25 / 4 / 0.6, 18 / 2.7
#: LL128 sends 8 bytes of flags with 120 of data (NCCL src/device/prims_ll128.h).
LL128_FRACTION = 120 / 128
#: PCIe packets carry 256 bytes with 26 of headers and framing, and acknowledgements (PCI Express Base Specification).
PCIE_EFFICIENCY = 0.86
#: Networks between nodes: a cluster has one of them, and a stack means whichever that is.
NETWORKS: tuple[TransportKind, ...] = ("infiniband", "roce", "tcp")


def transports(stack: Stack) -> dict[str, Transport]:
    """Return how links of each kind carry collectives.

    Every protocol takes ``start_s``; LL reaches ``ll_fraction`` of the bandwidth, LL128 `LL128_FRACTION`; only simple
    works in chunks, whose pipeline fills as ``half_bytes`` and ``full_bytes`` say. PCIe hops take what NVLink's take.
    """
    parameters = stack.parameters
    # The shares of switches are of the links' own share, so that both together stay below the line rate.
    rings, nvls = parameters.nvlink_efficiency, parameters.nvls_efficiency or parameters.nvlink_efficiency
    links = max(rings, nvls)
    inside = _transport(stack, links, rings / links, parameters.nvlink_hop_s, NVLINK_HOPS)
    over_pcie = _transport(stack, PCIE_EFFICIENCY, 1.0, parameters.nvlink_hop_s, NVLINK_HOPS)
    between = _transport(stack, parameters.network_efficiency, 1.0, parameters.network_hop_s, NETWORK_HOPS)
    in_nvswitch = _protocol(parameters, "simple", parameters.nvlink_hop_s * IN_NVSWITCH, nvls / links)
    in_switch = _protocol(parameters, "simple", parameters.network_hop_s * IN_SWITCH)
    between = replace(between, in_switch=in_switch)
    return {
        "nvlink": replace(inside, in_switch=in_nvswitch),
        "pcie": over_pcie,
        **dict.fromkeys(NETWORKS, between),
    }


def _transport(
    stack: Stack, efficiency: float, share: float, hop_s: float, hops: Mapping[ProtocolName, float]
) -> Transport:
    parameters = stack.parameters
    protocols = {name: _protocol(parameters, name, hop_s * hops[name], share) for name in stack.protocols}
    return Transport(
        efficiency=efficiency,
        copy_Bps=parameters.copy_Bps,
        p2p_copy_Bps=parameters.copy_Bps,
        peer_latency_s=parameters.peer_latency_s,
        pat=stack.pat,
        protocols=protocols,
        p2p={name: protocol for name, protocol in protocols.items() if name != "ll128"},
        kind="published",
        source=stack.source,
    )


def _protocol(parameters: StackParameters, name: ProtocolName, hop_s: float, share: float = 1.0) -> Protocol:
    fractions = {"ll": parameters.ll_fraction, "ll128": LL128_FRACTION, "simple": 1.0}
    return Protocol(
        base_latency_s=parameters.start_s,
        hop_latency_s=hop_s,
        bandwidth_fraction=fractions[name] * share,
        half_bytes=parameters.half_bytes if name == "simple" else 0.0,
        full_bytes=parameters.full_bytes if name == "simple" else None,
        most_bytes=parameters.ll128_most_bytes if name == "ll128" else None,
    )

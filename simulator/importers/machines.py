"""Shipped clusters that machines are completed from where only the type of their GPUs is known."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShippedMachine:
    """A shipped cluster by ``name``, with so many GPUs in a node.

    ``tree``: its file says where each device is plugged in. ``network``: it has network cards.
    """

    name: str
    gpus: int
    tree: bool = False
    network: bool = True


_DESKTOP = (
    ShippedMachine("one_gpu", 1, network=False),
    ShippedMachine("workstation_2gpu", 2, network=False),
    ShippedMachine("pcie_rtx4090_8gpu", 8),
)
#: Type of GPU -> machines in which it is usual, the smallest first.
MACHINES = {
    "a10g-24gb": (ShippedMachine("aws_g5_12xlarge", 4),),
    "a100-pcie-80gb": (ShippedMachine("pcie_a100_nvlink_pairs", 8, tree=True),),
    "a100-sxm-40gb": (ShippedMachine("oci_a100_40gb", 8),),
    "a100-sxm-80gb": (ShippedMachine("dgx_a100", 8),),
    "b200-sxm-180gb": (ShippedMachine("dgx_b200", 8),),
    "b300-sxm-288gb": (ShippedMachine("dgx_b300", 8),),
    "gb200-186gb": (ShippedMachine("gb200_nvl72", 72, tree=True),),
    "gb300-288gb": (ShippedMachine("gb300_nvl72", 72, tree=True),),
    "gh200-480gb": (ShippedMachine("gh200_slingshot", 4, tree=True),),
    "h100-pcie-80gb": (ShippedMachine("pcie_h100_nvlink_pair", 2),),
    "h100-sxm-80gb": (ShippedMachine("hgx_h100_4gpu", 4), ShippedMachine("dgx_h100", 8)),
    "h100-sxm-96gb-500w": (ShippedMachine("grand_teton_h100", 8),),
    "h20-sxm-96gb": (ShippedMachine("dgx_h100", 8),),
    "h200-sxm-141gb": (ShippedMachine("hgx_h200_4gpu", 4), ShippedMachine("dgx_h200", 8)),
    "l4-24gb": (ShippedMachine("gcp_g2_4gpu", 4),),
    "l40s-48gb": (ShippedMachine("pcie_l40s", 8, tree=True),),
    "mi300x-192gb": (ShippedMachine("mi300x", 8),),
    "mi325x-256gb": (ShippedMachine("mi325x", 8),),
    "mi355x-288gb": (ShippedMachine("mi355x", 8),),
    "rtx-3090-24gb": (ShippedMachine("one_rtx3090", 1, network=False), *_DESKTOP[1:]),
    "t4-16gb": (ShippedMachine("colab_t4", 1, network=False),),
    "v100-sxm-32gb": (ShippedMachine("dgx1_v100", 8), ShippedMachine("dgx2_v100", 16)),
    **dict.fromkeys(
        (
            "rtx-3080-10gb",
            "rtx-4090-24gb",
            "rtx-5090-32gb",
            "rtx-6000-ada-48gb",
            "rtx-a6000-48gb",
            "rtx-pro-6000-96gb",
        ),
        _DESKTOP,
    ),
}


def machine_with(gpu: str, count: int) -> ShippedMachine | None:
    """Return the smallest machine that has ``count`` GPUs of a type in a node; None where none has.

    >>> machine_with("h100-sxm-80gb", 8).name, machine_with("rtx-4090-24gb", 3).name, machine_with("t4-16gb", 2)
    ('dgx_h100', 'pcie_rtx4090_8gpu', None)
    """
    return next((machine for machine in MACHINES.get(gpu, ()) if machine.gpus >= count), None)


def machines_for(gpu: str, count: int) -> tuple[ShippedMachine, int] | None:
    """Return the machine for ``count`` GPUs of a type, and how many of it; None where none of the type is shipped.

    >>> [(machine.name, nodes) for machine, nodes in [machines_for("h100-sxm-80gb", 64), machines_for("l4-24gb", 2)]]
    [('dgx_h100', 8), ('gcp_g2_4gpu', 1)]
    """
    machine = machine_with(gpu, count) or (MACHINES[gpu][-1] if gpu in MACHINES else None)
    return None if machine is None else (machine, math.ceil(count / machine.gpus))

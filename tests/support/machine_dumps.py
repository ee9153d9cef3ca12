"""Outputs of nvidia-smi -q and of ibstat, written by hand."""

from __future__ import annotations

#: Device numbers of an RTX 4090, an RTX 3090 and an H100 SXM (pci.ids), as the command writes them.
RTX4090, RTX3090, H100 = "0x268410DE", "0x220410DE", "0x233010DE"


def query(*devices: str, attached: int | None = None, generation: int = 4, limit_W: float = 450.0) -> str:
    """Output of nvidia-smi -q for GPUs of these device numbers."""
    gpus = [
        f"GPU 00000000:{position:02X}:00.0\n"
        "    Product Name                          : NVIDIA Something\n"
        "    MIG Mode\n        Current                           : N/A\n"
        "    PCI\n"
        f"        Device Id                         : {device}\n"
        "        GPU Link Info\n"
        "            PCIe Generation\n"
        f"                Max                       : {generation}\n"
        "                Current                   : 1\n"
        "            Link Width\n                Max                       : 8x\n"
        "    GPU Power Readings\n"
        f"        Current Power Limit               : {limit_W:.2f} W\n"
        "        Default Power Limit               : 450.00 W\n"
        for position, device in enumerate(devices)
    ]
    count = len(devices) if attached is None else attached
    return f"Attached GPUs                             : {count}\n" + "\n".join(gpus)


def card(name: str, rate: int = 400, state: str = "Active", layer: str = "InfiniBand") -> str:
    """One card of the output of ibstat."""
    port = f"\tPort 1:\n\t\tState: {state}\n\t\tRate: {rate}\n\t\tLink layer: {layer}\n"
    return f"CA '{name}'\n\tCA type: MT4129\n\tNumber of ports: 1\n{port}"

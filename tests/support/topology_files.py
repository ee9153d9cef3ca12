"""Files of other tools that say how a node is wired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.cluster import Cluster, build_cluster
from simulator.config.cluster import load_cluster
from simulator.importers.imported import Imported
from simulator.importers.reading import read_topology

#: Two sockets. On the first a switch with two GPUs, a NIC of two ports and a drive; on the second a GPU and a NIC in
#: slots of their own, and a bridge with nothing behind it. Two of the three GPUs have three NVLinks.
XML = """<system version="1">
  <cpu numaid="1" affinity="ff00" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:b0:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16"/>
    <pci busid="0000:a0:00.0" class="0x030200" vendor="0x10de" device="0x2331" link_speed="16.0 GT/s PCIe" link_width="8">
      <gpu dev="2" sm="90" rank="2" gdr="1"/>
    </pci>
    <pci busid="0000:c0:00.0" class="0x020000" link_speed="5 GT/s" link_width="4">
      <nic><net name="mlx5_2" dev="2" speed="200000" latency="2.5"/></nic>
    </pci>
  </cpu>
  <cpu numaid="0" affinity="00000000,000000ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:12:00.0" class="0x030200" vendor="0x10de" device="0x2331" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="1" gdr="1"><nvlink target="0000:11:00.0" count="3" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0000:11:00.0" class="0x030200" vendor="0x10de" device="0x2331" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:12:00.0" count="3" tclass="0x030200"/></gpu>
      </pci>
      <pci busid="0000:13:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="200000"/><net name="mlx5_1" dev="1" speed="200000"/></nic>
      </pci>
      <pci busid="0000:14:00.0" class="0x010802" link_speed="16.0 GT/s PCIe" link_width="4"/>
    </pci>
  </cpu>
</system>
"""  # noqa: E501

MATRIX = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tPXB\tSYS\tPIX\tSYS\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tPXB\tSYS\tPIX\tSYS\t0-31\t0\t\tN/A
GPU2\tPXB\tPXB\t X \tSYS\tPXB\tSYS\t0-31\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\tPHB\t32-63\t1\t\tN/A
NIC0\tPIX\tPIX\tPXB\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tSYS\tPHB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""


def read(tmp_path: Path, text: str, name: str = "topo.xml") -> tuple[Imported, Cluster]:
    path = tmp_path / name
    path.write_text(text)
    return read_topology(path), build_cluster(load_cluster(str(path)))


def places(imported: Imported) -> dict[str, Any]:
    tree: dict[str, Any] = imported.cluster["node"]["pcie"]["tree"]
    return tree

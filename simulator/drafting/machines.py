"""Machines of a job: a shipped cluster, a cluster file, a type of GPU, or what commands print on a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.importers import is_foreign
from simulator.importers.imported import Imported
from simulator.importers.machines import MACHINES, machines_for
from simulator.importers.pci_ids import type_of_product
from simulator.importers.reading import read_machine
from simulator.input_files import as_path, closest
from simulator.units import counted


@dataclass(frozen=True)
class JobMachines:
    """Machines that a job runs on.

    ``reference``: what the workload file says of them, but for the number of nodes. ``gpu``: the type of GPU where the
    answer names no more. ``imported``: what was read from
    ``files`` that commands wrote, which goes into a cluster file of its own; None where there is nothing to write.
    """

    reference: dict[str, Any]
    gpu: str | None = None
    imported: Imported | None = None
    files: tuple[Path, ...] = ()

    @property
    def unsized(self) -> dict[str, Any]:
        """The cluster without its number of nodes, which the number of GPUs gives."""
        if self.imported is None:
            return self.reference
        cluster = {key: value for key, value in self.imported.cluster.items() if key != "nodes"}
        return {**cluster, "assumed": list(self.imported.assumed)}

    def for_gpus(self, gpus: int) -> JobMachines:
        """Return the machines for so many GPUs, where only their type is known."""
        return self if self.gpu is None else JobMachines(_usual_machine(self.gpu, gpus), self.gpu)

    def spec(self, gpus: int | None = None) -> ClusterSpec:
        """Return the cluster with the nodes that so many GPUs need; None: as many as it has. Raises `InputError`."""
        cluster = load_cluster(self.imported.cluster if self.imported else self.reference)
        if gpus is None or cluster.fixed_nodes:
            return cluster
        nodes, node = max(cluster.nodes_for(gpus), 1), cluster.node_at(0)
        if nodes > 1 and not node.nics.count:
            raise InputError(
                f"are more than the {counted(node.gpus.count, 'GPU')} of {cluster.name}, whose nodes have no network "
                "cards to be joined by",
                file="--gpus",
                found=gpus,
                allowed=f"<= {node.gpus.count}, or a larger machine: llmsim list topologies",
            )
        return load_cluster(self.unsized, nodes=nodes)


def job_machines(answers: Sequence[str], gpus: int | None) -> JobMachines:
    """Return the machines that ``answers`` mean: one name or path, or several outputs of commands.

    ``gpus``: how many are needed, which a type of GPU alone does not say. Raises `InputError`.
    """
    paths = [as_path(text, file="cluster") for text in answers]
    if len(paths) > 1 or is_foreign(paths[0]):
        imported = read_machine(paths)
        if imported.hosts:
            fix = f"llmsim import {paths[0]} --node dgx_h100 --out cluster.yaml, then that file"
            raise InputError("says nothing of the nodes themselves", file=paths[0], fix=fix)
        return JobMachines({}, imported=imported, files=tuple(paths))
    text = answers[0]
    if catalog.is_shipped("cluster", text) or Path(text).suffix in (".yaml", ".yml"):
        return JobMachines({"name": text})
    gpu = _gpu_type(text)
    return JobMachines(_usual_machine(gpu, gpus), gpu)


def _gpu_type(text: str) -> str:
    """Return the one shipped type of GPU that has all words of a text, or that nvidia-smi calls so.

    Raises `InputError`.

    >>> _gpu_type("4090"), _gpu_type("H100 SXM 80GB"), _gpu_type("NVIDIA A100-SXM4-80GB")
    ('rtx-4090-24gb', 'h100-sxm-80gb', 'a100-sxm-80gb')
    """
    product = type_of_product(text)
    if product is not None and catalog.is_shipped("profile", product):
        return product
    words = set(re.findall(r"[a-z0-9]+", text.lower())) - {"nvidia", "amd", "geforce", "gb"}
    types = [kind for kind in catalog.names("profile") if words and words <= set(kind.split("-"))]
    if text in types or len(types) == 1:
        return text if text in types else types[0]
    if types:
        raise InputError("may be several types of GPU", file="cluster", found=text, allowed=", ".join(types))
    names = [*catalog.names("cluster"), *catalog.names("profile")]
    allowed = "a name of llmsim list topologies or list gpus, a cluster file, or files that commands of a machine wrote"
    raise InputError(
        "is no cluster and no type of GPU", file="cluster", found=text, allowed=allowed, fix=closest(text, names)
    )


def _usual_machine(gpu: str, gpus: int | None) -> dict[str, Any]:
    """Return the shipped cluster in which so many GPUs of a type are usual. Raises `InputError` where there is none."""
    usual = machines_for(gpu, gpus or (MACHINES[gpu][-1].gpus if gpu in MACHINES else 1))
    if usual is None:
        fix = f"a cluster file: like: dgx_h100, node: {{gpus: {{type: {gpu}}}}}, with its own links"
        raise InputError("is in no shipped cluster", file="cluster", found=gpu, fix=fix)
    machine, nodes = usual
    reference: dict[str, Any] = {"name": machine.name}
    differing: dict[str, Any] = {}
    if load_cluster(machine.name).gpu_types != (gpu,):
        differing["type"] = gpu
    if nodes == 1 and gpus is not None and gpus < machine.gpus:
        differing["count"] = gpus
    return reference | ({"node": {"gpus": differing}} if differing else {})

"""Topologies in the files of other tools, read as cluster files: NCCL's and RCCL's XML, the matrix of nvidia-smi, and
Slurm's topology.conf.

A file is told by what is in it, whatever it is called. What it does not say is filled in with figures that are named in
`Imported.assumed`; a cluster file that names it, or ``--set``, replaces them.
"""

from __future__ import annotations

from pathlib import Path

from simulator.errors import InputError
from simulator.importers import nccl_xml, slurm_conf, smi_matrix
from simulator.importers.imported import Device, Imported, unanswered
from simulator.input_files import read_text

__all__ = ["SUFFIXES", "Device", "Imported", "is_foreign", "read_topology", "unanswered"]

_FOREIGN = (".xml", ".txt", ".conf")
#: Endings of names that are files.
SUFFIXES = (".yaml", ".yml", *_FOREIGN)


def is_foreign(path: Path) -> bool:
    """Return whether a file that stands for a cluster is another tool's, by its name."""
    return path.suffix.lower() in _FOREIGN


def read_topology(path: Path) -> Imported:
    """Return the cluster of a file. Raises `InputError` with file and line where it is of none of these tools, or
    contradicts itself."""
    text = read_text(path)
    if text.lstrip().startswith("<"):
        return nccl_xml.read(text, path)
    if smi_matrix.is_matrix(text):
        return smi_matrix.read(text, path)
    if slurm_conf.is_conf(text):
        return slurm_conf.read(text, path)
    raise InputError(
        "is no topology that is known here",
        file=path,
        allowed="NCCL or RCCL topology XML (NCCL_TOPO_DUMP_FILE), nvidia-smi topo -m, Slurm's topology.conf",
    )

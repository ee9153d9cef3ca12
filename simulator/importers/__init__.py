"""Topologies in the files of other tools, read as cluster files.

Topologies are NCCL's and RCCL's XML, the matrix of nvidia-smi, and Slurm's topology.conf. What other commands print on
a machine completes them: ``nvidia-smi -q``, ``ibstat``, ``squeue``.

A file is told by what is in it, whatever it is called. What no file says is filled in with figures that are named in
`Imported.assumed`; a cluster file that names it, or ``--set``, replaces them.

This module itself tells files by their names alone, as every job asks that of its cluster. `reading` has the readers.
"""

from __future__ import annotations

from pathlib import Path

_FOREIGN = (".xml", ".txt", ".conf")
#: Endings of names that are files.
SUFFIXES = (".yaml", ".yml", *_FOREIGN)


def is_foreign(path: Path) -> bool:
    """Return whether a file that stands for a cluster is another tool's, by its name."""
    return path.suffix.lower() in _FOREIGN

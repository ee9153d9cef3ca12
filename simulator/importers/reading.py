"""Files and commands' output of other tools, told by what is in them, read as cluster files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from simulator.errors import InputError
from simulator.importers import ibstat, nccl_xml, slurm_conf, smi_matrix, smi_query, squeue
from simulator.importers.imported import Imported
from simulator.importers.machine_facts import MachineFacts
from simulator.importers.pci_ids import WITHOUT_PROFILE
from simulator.importers.whole_machine import completed, merged_facts, with_facts
from simulator.input_files import read_text

#: Commands whose output completes a topology: whether a text is of it, and its reader.
_COMMANDS = (
    (smi_query.is_query, smi_query.read),
    (ibstat.is_ibstat, ibstat.read),
    (squeue.is_queue, squeue.read),
)


def is_topology(text: str) -> bool:
    """Return whether a text is of a kind that is read here."""
    return text.lstrip().startswith("<") or any(
        matches(text) for matches in (smi_matrix.is_matrix, slurm_conf.is_conf, *(one for one, _ in _COMMANDS))
    )


def read_topology(path: Path) -> Imported:
    """Return the cluster of one file. Raises `InputError` as `read_machine`."""
    return read_machine([path])


def read_machine(paths: Sequence[Path]) -> Imported:
    """Return the cluster of one or several files on one machine.

    Raises `InputError` with file and line where one is of no tool that is known here, or files contradict themselves or
    each other.
    """
    imported = _read(paths)
    gpus = imported.cluster.get("node", {}).get("gpus", [])
    types = [section["type"] for section in (gpus if isinstance(gpus, list) else [gpus])]
    lacking = [
        f"node.gpus.type: {kind}, for which no profile is shipped; a run needs one of your own, or another type"
        for kind in types
        if kind in WITHOUT_PROFILE
    ]
    return replace(imported, assumed=(*imported.assumed, *lacking))


def _read(paths: Sequence[Path]) -> Imported:
    texts = {path: read_text(path) for path in paths}
    read = {path: _facts(text, path) for path, text in texts.items()}
    facts = merged_facts(
        [one for one in read.values() if one is not None], [path for path, one in read.items() if one is not None]
    )
    topologies = [path for path, one in read.items() if one is None]
    if len(topologies) > 1:
        raise InputError(f"is a topology, as is {topologies[0]}", file=topologies[1], fix="one of them")
    if not topologies:
        return completed(facts, paths[0])
    path = topologies[0]
    topology = _topology(texts[path], path, facts.nics.unused if facts.nics else ())
    return with_facts(topology, facts, path) if len(paths) > 1 else topology


def _facts(text: str, path: Path) -> MachineFacts | None:
    """Return the facts of a command's output; None for any other text."""
    return next((reader(text, path) for matches, reader in _COMMANDS if matches(text)), None)


def _topology(text: str, path: Path, slow_cards: Sequence[str]) -> Imported:
    """Return a topology, of a matrix without the network cards that training does not use."""
    if text.lstrip().startswith("<"):
        return nccl_xml.read(text, path)
    if smi_matrix.is_matrix(text):
        return smi_matrix.read(text, path, slow_cards)
    if slurm_conf.is_conf(text):
        return slurm_conf.read(text, path)
    raise InputError(
        "is no topology that is known here",
        file=path,
        allowed="NCCL or RCCL topology XML (NCCL_TOPO_DUMP_FILE), Slurm's topology.conf, or the output of nvidia-smi "
        "topo -m, nvidia-smi -q, ibstat, squeue",
    )

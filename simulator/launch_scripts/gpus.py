"""How many GPUs a command runs on, by options of what launches it and by those of Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulator.bounds import is_digits
from simulator.launch_scripts.shell import Word, options_of, split_words

#: Short options of sbatch and srun (slurm.schedmd.com/sbatch.html).
_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
#: What starts a process per GPU on each node by itself, whatever Slurm starts there.
_STARTS_PROCESSES = re.compile(r"(torchrun|accelerate|deepspeed|torch\.distributed\.(run|launch))")


def gpus_of(options: Mapping[str, Any], launcher: Sequence[Word], text: str) -> int | None:
    """Return how many GPUs a command runs on; None where nothing says it.

    ``options``: all of the command. ``launcher``: words before those of the program. ``text``: the script, whose
    ``#SBATCH`` lines count where the command says nothing.
    """
    if (processes := _whole(options.get("num_processes"))) is not None:
        return processes
    slurm = _SlurmJob.for_command(launcher, text)
    nodes = next(filter(None, (_whole(options.get(name)) for name in ("nnodes", "num_nodes", "num_machines"))), None)
    nodes = nodes or slurm.nodes or 1
    each = _whole(options.get("nproc_per_node")) or _whole(options.get("num_gpus"))
    if each is not None:
        return nodes * each
    by_itself = any(_STARTS_PROCESSES.fullmatch(Path(word.text).name) for word in launcher)
    counts = (slurm.gpus(nodes), slurm.tasks(nodes))
    return next(filter(None, counts if by_itself else reversed(counts)), None)


class _SlurmJob:
    """The size of a job as srun says it, or lines of a batch script where srun does not."""

    def __init__(self, *sources: Mapping[str, Any]) -> None:
        self._sources = sources

    @classmethod
    def for_command(cls, launcher: Sequence[Word], text: str) -> _SlurmJob:
        lines: list[str] = re.findall(r"^#SBATCH\s+(.*)$", text, flags=re.MULTILINE)
        batch = options_of(Word(word) for line in lines for word in split_words(line))
        by_srun = any(Path(word.text).name == "srun" for word in launcher)
        return cls(_long(options_of(launcher), short=by_srun), _long(batch, short=True))

    @property
    def nodes(self) -> int | None:
        """Nodes, which all tasks and those of a node may say too."""
        tasks, each = self._number("ntasks"), self._number("ntasks_per_node")
        return self._number("nodes") or (tasks // each if tasks and each else None)

    def tasks(self, nodes: int) -> int | None:
        """Processes that Slurm starts on so many nodes."""
        each = self._number("ntasks_per_node")
        return nodes * each if each else self._number("ntasks")

    def gpus(self, nodes: int) -> int | None:
        """GPUs of the job on so many nodes."""
        each, for_task = self._number("gpus_per_node"), self._number("gpus_per_task")
        if each:
            return nodes * each
        return self._number("gpus") or ((self.tasks(nodes) or nodes) * for_task if for_task else None)

    def _number(self, name: str) -> int | None:
        return next(filter(None, (_whole(source.get(name)) for source in self._sources)), None)


def _long(options: Mapping[str, Any], *, short: bool) -> dict[str, Any]:
    """Return options under their long names, and resources that are GPUs under that of GPUs of a node.

    ``short``: letters are Slurm's, which may have their number written onto them.

    >>> _long({"N2": True, "n": "16", "gres": "nvme:1,gpu:a100:8"}, short=True)
    {'nodes': '2', 'ntasks': '16', 'gpus_per_node': 'a100:8'}
    """
    long: dict[str, Any] = {}
    for name, value in options.items():
        letter, number = name[0], name[1:]
        if short and letter in _SHORT and (not number or is_digits(number)):
            long[_SHORT[letter]] = number or value
        elif name != "gres":
            long[name] = value
        elif gpus := re.search(r"\bgpu\b:?([\w.:-]*)", str(value)):
            long["gpus_per_node"] = gpus[1] or "1"
    return long


def _whole(value: object) -> int | None:
    """Return the number of a count, which may stand behind the type of a GPU; the least of a range; None without one.

    >>> _whole("8"), _whole("h100:2"), _whole("2-4"), _whole("1:4"), _whole(True)
    (8, 2, 2, None, None)
    """
    match = re.match(r"(?:[A-Za-z][\w.-]*:)?([0-9]{1,9})(?![\d.:])", value) if isinstance(value, str) else None
    return int(match[1]) if match else None

"""Launch scripts of other tools as workload files, with what is understood, assumed and ignored.

A script is told by the keys in it. Nothing of it is run. What no script says, such as the machines, is asked for.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.bounds import is_digits
from simulator.config import script_kinds
from simulator.config.misplaced_file import refuse_misplaced
from simulator.errors import InputError
from simulator.input_files import parse_yaml, read_json, read_text
from simulator.launch_scripts import (
    accelerate,
    axolotl,
    deepspeed,
    hugging_face,
    llama_factory,
    megatron,
    nemo,
    recipes,
    shell,
    torchtitan,
)
from simulator.launch_scripts.script import LaunchScript, UnderstoodOption

__all__ = ["SUFFIXES", "LaunchScript", "UnderstoodOption", "is_launch_script", "read_script"]

#: Endings of names of launch scripts.
SUFFIXES = (*script_kinds.COMMANDS, *script_kinds.KEYED)
#: Kinds of YAML and JSON, and their reader.
_KEYED: Mapping[script_kinds.ScriptKind, Callable[[Mapping[str, Any], Path], LaunchScript]] = {
    script_kinds.AXOLOTL: axolotl.read,
    script_kinds.LLAMA_FACTORY: llama_factory.read,
    script_kinds.ACCELERATE: accelerate.read,
    script_kinds.DEEPSPEED: deepspeed.read,
}
_COMMANDS: tuple[tuple[frozenset[str], Callable[[Mapping[str, Any], Path, int | None], LaunchScript]], ...] = (
    (megatron.MARKS, megatron.read),
    (hugging_face.MARKS, hugging_face.read),
)
#: Options of accelerate's launcher that say where processes run, and how many; others say how a model is trained.
_OF_PROCESSES = frozenset(
    [
        "debug",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "multi_gpu",
        "num_machines",
        "num_processes",
        "quiet",
        "rdzv_backend",
        "rdzv_conf",
        "same_network",
    ]
)
KINDS = ", ".join(
    one.FORMAT
    for one in (megatron, nemo, recipes, torchtitan, deepspeed, accelerate, hugging_face, axolotl, llama_factory)
)


def is_launch_script(path: Path) -> bool:
    """Return whether a file is a launch script, by its name."""
    return path.suffix.lower() in SUFFIXES


def read_script(path: Path) -> LaunchScript:
    """Return the job of a launch script.

    Raises `InputError` where it is of none of the kinds that are known here, or says what is not simulated.
    """
    suffix = path.suffix.lower()
    if suffix == ".toml":
        return torchtitan.read(read_text(path), path)
    if suffix in script_kinds.KEYED:
        return _keyed(path)
    text = read_text(path)
    if recipes.is_recipe(path):
        return recipes.read(text, path)
    command = shell.launch_command(text, path)
    start = shell.program_at(command.words)
    options, launcher = shell.options_of(command.words[start:]), shell.options_of(command.words[:start])
    by_accelerate = any(Path(word.text).name.startswith("accelerate") for word in command.words[:start])
    for marks, reader in _COMMANDS:
        if marks & options.keys():
            script = reader(options, path, _gpus({**options, **launcher}, text))
            skipped = tuple(f"not followed: {part}" for part in command.skipped)
            repeated = shell.repeated_options(command.words[start:])
            skipped += tuple(f"said twice: {textwrap.shorten(text, 80)}, of which the last counts" for text in repeated)
            if by_accelerate:
                skipped += tuple(f"accelerate launch's {name}" for name in launcher if name not in _OF_PROCESSES)
            return replace(script, ignored=(*script.ignored, *skipped))
    raise InputError("starts a training that is not known here", file=path, allowed=KINDS)


def _keyed(path: Path) -> LaunchScript:
    data = read_json(path) if path.suffix.lower() == ".json" else parse_yaml(read_text(path), path)
    if not isinstance(data, Mapping):
        raise InputError("must hold keys and values at its top level", file=path)
    keys = frozenset(map(str, data))
    if "architectures" in keys or {"model_type", "hidden_size"} <= keys:
        fix = f"model: {{hf_config: {path}}} in a workload file"
        raise InputError("is a model of Hugging Face, which a workload names", file=path, fix=fix)
    for kind in script_kinds.SCRIPT_KINDS:
        if kind.matches(keys):
            return _KEYED[kind]({str(key): value for key, value in data.items()}, path)
    if nemo.is_nemo(data):
        return nemo.read(data, path)
    options = megatron.yaml_options(data)
    if options.keys() >= megatron.MARKS:
        return megatron.read(options, path, None)
    refuse_misplaced(path, "a launch script")
    raise InputError("is no launch script that is known here", file=path, allowed=KINDS)


def _gpus(options: Mapping[str, Any], text: str) -> int | None:
    """Return how many GPUs a command runs on, by its launcher's options or Slurm's; None where nothing says it."""

    def number(*names: str) -> int | None:
        for name in names:
            if is_digits(str(options.get(name, ""))):
                return int(str(options[name]))
        return None

    def slurm_number(name: str) -> int | None:
        match = re.search(rf"^#SBATCH\s.*--{name}[= ](?:\w+:)*(\d+)", text, flags=re.MULTILINE)
        return int(match[1]) if match else None

    if (processes := number("num_processes")) is not None:
        return processes
    nodes = number("nnodes", "num_nodes", "num_machines") or slurm_number("nodes") or number("nodes")
    each = number("nproc_per_node", "num_gpus", "ntasks_per_node", "gpus_per_node")
    each = each or slurm_number("ntasks-per-node") or slurm_number("gpus-per-node") or slurm_number("gres")
    return None if each is None else (nodes or 1) * each

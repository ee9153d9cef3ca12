"""``import`` of a launch script: a workload file, and what was understood, assumed and ignored."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.errors import InputError
from simulator.output.envelope import envelope
from simulator.output.files import writing
from simulator.units import counted

if TYPE_CHECKING:
    from simulator.launch_scripts import LaunchScript


def import_script(
    file: Path,
    *,
    out: Path | None,
    changes: Mapping[str, Any],
    cluster: str | None,
    gpus: int | None,
    json: Path | None,
    quiet: bool,
) -> None:
    """Read a launch script, check the workload that it makes, and write it."""
    from simulator.config import load_workload
    from simulator.launch_scripts import read_script
    from simulator.launch_scripts.completion import settled, workload_data

    if gpus is not None and gpus < 1:
        raise InputError("is out of range", file="--gpus", found=gpus, allowed=">= 1")
    script = settled(read_script(file), changes)
    data = workload_data(script, file.stem, file, cluster, gpus, changes)
    load_workload(data)
    check_outputs({"--out": out, "--json": json}, {"--out": (".yaml", ".yml")})
    if out is not None:
        with writing(out) as target:
            target.write(workload_file(_as_seen_from(out.parent, data), script, file).encode())
    write_json(
        json,
        envelope(
            "import",
            file=str(file),
            format=script.format,
            workload=data,
            understood=[asdict(option) for option in script.understood],
            assumed=list(script.assumed),
            neutral=list(script.neutral),
            ignored=list(script.ignored),
        ),
    )
    if not shows_summary(json, quiet):
        return
    _show(script)
    print(f"written: {out}" if out is not None else "\n" + _dumped(data), end="\n" if out is not None else "")


def _as_seen_from(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a workload file in ``folder``, from where a relative path of its model starts."""
    from simulator.config.catalog import seen_from

    model = data["model"]
    path = model.get("hf_config") if isinstance(model, Mapping) else None
    return dict(data) if path is None else {**data, "model": {**model, "hf_config": seen_from(folder, path)}}


def workload_file(data: Mapping[str, Any], script: LaunchScript, source: Path) -> str:
    """Return the text of a workload file, with what is assumed and ignored above it."""
    lines = [f"Read by llmsim import from {source.name} ({script.format})."]
    for title, texts in (("Assumed", script.assumed), ("Not simulated", script.ignored)):
        lines += [f"{title}: {text}." for text in texts]
    wrapped = [textwrap.fill(line, 118, initial_indent="# ", subsequent_indent="#   ") for line in lines]
    return "\n".join(wrapped) + "\n" + _dumped(data)


def _dumped(data: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None, width=118)


def _shown(value: object) -> str:
    """Return a value as text, a large number without its zeros.

    >>> _shown(1048576000000.0), _shown(4096), _shown("bf16")
    ('1.048576e12', '4096', 'bf16')
    """
    return f"{value:.12g}".replace("e+", "e") if isinstance(value, float) else str(value)


def _show(script: LaunchScript) -> None:
    from simulator.cli.terminal import show, table

    rows = [{"in the script": one.option, "key": one.key, "value": _shown(one.value)} for one in script.understood]
    machines = f", {counted(script.gpus, 'GPU')}" if script.gpus else ""
    show(f"{script.format}: {counted(len(rows), 'option')} understood{machines}", table(rows, "Understood"))
    for title, texts in (
        ("Assumed, as the script does not say it:", script.assumed),
        ("Not simulated, or not known here:", script.ignored),
    ):
        if texts:
            print("\n".join([title, *(f"  {text}" for text in texts)]))
    if script.neutral:
        text = "Of no influence on time or memory: " + ", ".join(script.neutral)
        print(textwrap.fill(text, 118, subsequent_indent="  "))

"""``import``: a file of another tool as a file of ours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from simulator.cli.import_script import import_script
from simulator.cli.options import Json, Quiet
from simulator.cli.outputs import check_outputs, shows_summary, write_json
from simulator.errors import InputError
from simulator.output.envelope import envelope
from simulator.output.files import writing
from simulator.units import counted

if TYPE_CHECKING:
    from simulator.cluster.relations import DeviceRelations
    from simulator.hardware.node import NodeSpec
    from simulator.importers.imported import Imported

#: Letters before the number in the name of a device: of ``gpu`` or ``nic``.
_KIND_LETTERS = 3


ForeignFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="NCCL's XML, nvidia-smi topo -m or -q, ibstat, squeue, topology.conf: one or several of a machine; or a "
        "launch script.",
    ),
]
WrittenFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write a cluster or workload file (.yaml, .yml).")
]
SetOfFile = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key, such as node.gpus.type or training.seq; repeatable."
    ),
]
NodesOfCluster = Annotated[
    str | None, typer.Option("--node", metavar="CLUSTER", help="Whose nodes they are, where the file has none.")
]
ClusterOfScript = Annotated[
    str | None, typer.Option("--cluster", metavar="CLUSTER", help="The machines that a launch script runs on.")
]
GpusOfScript = Annotated[
    int | None, typer.Option("--gpus", metavar="N", help="How many GPUs a launch script uses [as it says].")
]


def command(
    files: ForeignFiles,
    out: WrittenFile = None,
    set_: SetOfFile = None,
    node: NodesOfCluster = None,
    cluster: ClusterOfScript = None,
    gpus: GpusOfScript = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Read another tool's topology or launch script.

    A topology becomes a cluster file; its GPUs, NICs, links and affinity are printed. What nvidia-smi -q, ibstat and
    squeue print completes it, or stands alone. A launch script becomes a workload file; what is understood and what is
    ignored is printed. Scripts are Megatron-LM's, NeMo's (also recipes in Python), Megatron-Bridge's, torchtitan's,
    DeepSpeed's, accelerate's, axolotl's, LLaMA-Factory's, and such as start Hugging Face's Trainer.

    What the files lack is assumed and named, or asked for. --set changes it.

    \b
    Example:
      llmsim import topo.xml --set node.gpus.type=a100-sxm-80gb --out mine.yaml
      llmsim import topo.txt smi-q.txt ibstat.txt squeue.txt --out mine.yaml
      llmsim import train.sh --cluster dgx_h100 --gpus 64 --out job.yaml
    """
    from simulator.config.misplaced_file import TOPOLOGY, refuse_misplaced
    from simulator.input_files import as_path, parse_changes
    from simulator.launch_scripts import SUFFIXES, is_launch_script

    changes = parse_changes(set_ or ())
    file = next((one for one in files if is_launch_script(one)), files[0])
    if is_launch_script(file):
        if len(files) > 1:
            raise InputError("is a launch script, and is read by itself", file=file, fix=f"llmsim import {file}")
        if node is not None:
            raise InputError("is of topologies", file="--node", found=node, fix=f"--cluster {node}")
        import_script(as_path(file), out=out, changes=changes, cluster=cluster, gpus=gpus, json=json, quiet=quiet)
        return
    for one in files:
        refuse_misplaced(one, "a topology or a launch script", accepted=TOPOLOGY)
    if cluster is not None or gpus is not None:
        option = "--gpus" if cluster is None else "--cluster"
        raise InputError("is of launch scripts", file=option, found=str(file), allowed=", ".join(SUFFIXES))
    _import_topology(files, out, changes, node, json, quiet)


def _import_topology(
    files: Sequence[Path],
    out: Path | None,
    changes: Mapping[str, Any],
    node: str | None,
    json: Path | None,
    quiet: bool,
) -> None:
    """Read a machine's topology, and write a cluster file."""
    from simulator.config.cluster import load_cluster
    from simulator.importers.imported import unanswered
    from simulator.importers.reading import read_machine
    from simulator.input_files import as_path, parse_yaml, with_changes

    file = files[0]
    imported = read_machine([as_path(one) for one in files])
    topology = with_changes(_with_node(imported, node, file), changes, {})
    if assumed := unanswered(imported.assumed, changes):
        topology["assumed"] = assumed
    spec = load_cluster({**topology, "name": str(topology["name"])})
    check_outputs({"--out": out, "--json": json}, {"--out": (".yaml", ".yml")})
    if out is not None:
        text = cluster_file(topology, files, imported.format)
        parse_yaml(text, out)  # what is refused here could not be read either
        with writing(out) as target:
            target.write(text.encode())
    write_json(
        json,
        envelope(
            "import",
            file=str(file),
            files=[str(one) for one in files],
            format=imported.format,
            cluster=topology,
            devices=[asdict(device) for device in imported.devices],
            assumed=assumed,
            left_out=list(imported.left_out),
        ),
    )
    if not shows_summary(json, quiet):
        return
    if imported.hosts:
        _show_switches(imported)
    else:
        _show_devices(imported, spec.node_at(0))
    _show_gaps(imported, assumed)
    if out is not None:
        print(f"written: {out}")


def cluster_file(cluster: Mapping[str, Any], sources: Sequence[Path], format: str) -> str:
    """The text of a cluster file."""
    line = f"Read by llmsim import from {', '.join(source.name for source in sources)} ({format})."
    if "assumed" in cluster:
        line += " What it does not say stands under assumed; runs warn of it until a line is deleted."
    comment = textwrap.fill(line, 118, initial_indent="# ", subsequent_indent="# ") + "\n"
    parts: list[tuple[Mapping[str, Any], bool | None, int]] = [
        ({key: value for key, value in cluster.items() if key != "assumed"}, None, 118),
        ({"assumed": list(cluster.get("assumed", ()))}, False, 1000),  # a line each
    ]
    return comment + "".join(
        yaml.dump(part, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, width=width)
        for part, flow, width in parts
        if any(part.values())
    )


class _Dumper(yaml.SafeDumper):
    """Numbers as people write them: ``13.1e9``, not ``13100000000.0``."""


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    for scale in (9, -6):
        if 1e-2 <= value / 10**scale < 1e5 and float(short := f"{value / 10**scale:.6g}e{scale}") == value:
            # PyYAML, of YAML 1.1, takes 13e9 for text; plain it is a number in YAML 1.2.
            tag = dumper.resolve(yaml.ScalarNode, short, (True, False))  # type: ignore[no-untyped-call]
            return dumper.represent_scalar(tag, short)
    return dumper.represent_scalar("tag:yaml.org,2002:float", repr(value))


_Dumper.add_representer(float, _number)


def _with_node(imported: Imported, node: str | None, file: Path) -> dict[str, Any]:
    """The cluster, its nodes taken from the cluster ``node`` where the file is of a fabric."""
    from simulator.config.cluster import cluster_data

    if bool(imported.hosts) is (node is None):
        message = "says nothing of the nodes themselves" if node is None else "is of a machine, and says what it is"
        raise InputError(message, file=file, fix="leave --node out" if node else "--node dgx_h100, or another cluster")
    if node is None:
        return imported.cluster
    data, _, _ = cluster_data(node, file="--node")
    if "node" not in data:
        raise InputError("has no one kind of node", file="--node", found=node)
    name, nodes, *rest = imported.cluster.items()
    return dict([name, nodes, ("node", data["node"]), *rest])


def _show_switches(imported: Imported) -> None:
    from simulator.cli.terminal import show, table

    first, rows = 0, []
    for name, switch in imported.cluster["fabric"]["switches"].items():
        last = first + switch.get("nodes", 0)
        nodes = imported.hosts[first:last]
        rows.append(
            {
                "switch": name,
                "above it": switch.get("at", "-"),
                "nodes": f"node{first} to node{last - 1}" if nodes else "-",
                "in the file": f"{nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else "".join(nodes) or "-",
            }
        )
        first = last
    show(f"{imported.format}: {counted(len(imported.hosts), 'node')}, {len(rows):,} switches", table(rows, "Switches"))


def _show_gaps(imported: Imported, assumed: list[str]) -> None:
    for title, texts in (("Assumed, as the file does not say it:", assumed), ("Left out:", imported.left_out)):
        if texts:
            print("\n".join([title, *(f"  {text}" for text in texts)]))


def _show_devices(imported: Imported, node: NodeSpec) -> None:
    from simulator.cli.device_table import show_joined
    from simulator.cli.terminal import show, table
    from simulator.cluster.relations import DeviceRelations, device_names

    joined, names = DeviceRelations(node), device_names(node)
    gpus, nics = names[: node.gpus.count], names[node.gpus.count :]
    rows = [
        {
            "device": device.name,
            "in the file": device.label,
            "socket": f"cpu{device.socket}",
            "CPUs": device.cpus or "-",
            "NICs or GPUs nearby": _nearest(device.name, nics if device.name in gpus else gpus, joined),
            "NVLink to": _with_nvlink(device.name, gpus, joined),
        }
        for device in imported.devices
    ]
    show(f"{imported.format}: GPUs {len(gpus)}, NICs {len(nics)}, sockets {node.sockets.count}")
    if rows:
        show(table(rows, "Devices"))
    show_joined(node, "Joined by")


def _nearest(device: str, devices: list[str], joined: DeviceRelations) -> str:
    relations = ["PIX", "PXB", "PHB", "SYS"]
    least = min((relations.index(joined[device, candidate]) for candidate in devices), default=0)
    return _ranges(candidate for candidate in devices if relations.index(joined[device, candidate]) == least) or "-"


def _with_nvlink(device: str, gpus: list[str], joined: DeviceRelations) -> str:
    joined_by: dict[str, list[str]] = {}
    for gpu in gpus:
        if gpu != device and (relation := joined[device, gpu]).startswith(("NV", "XG")):
            joined_by.setdefault(relation, []).append(gpu)
    return ", ".join(f"{_ranges(peers)} ({relation})" for relation, peers in joined_by.items()) or "-"


def _ranges(devices: Iterable[str]) -> str:
    """Names of devices of one kind, those with numbers in a row as a range.

    >>> _ranges(["gpu0", "gpu1", "gpu2", "gpu5"]), _ranges([])
    ('gpu0-2,5', '')
    """
    from simulator.importers.imported import numbers

    names = list(devices)
    return names[0][:_KIND_LETTERS] + numbers(int(name[_KIND_LETTERS:]) for name in names) if names else ""

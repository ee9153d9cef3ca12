"""Cluster files: read, laid over one another, and described in a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.config import catalog
from simulator.config.misplaced_file import CLUSTER, expecting, refuse_misplaced
from simulator.config.section import is_whole
from simulator.config.validation import validated
from simulator.errors import InputError, located
from simulator.fabrics import FABRICS, Fabric, keys_of_kinds, ports_down
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.node import count_types
from simulator.importers import SUFFIXES, is_foreign
from simulator.importers.imported import unanswered
from simulator.input_files import brief, read_yaml
from simulator.units import counted, in_brackets


def describe_nodes(spec: ClusterSpec) -> str:
    """Return text such as ``4 nodes x 8 h100-sxm-80gb + 2 nodes x 8 a100-sxm-80gb``."""
    counts = [(group.count, group.node) for group in spec.groups]
    if spec.node is not None:
        counts = [(spec.n_nodes, spec.node)]
    return " + ".join(
        f"{counted(count, 'node')} x {in_brackets(count_types(node.gpus.by_number))}" for count, node in counts
    )


def describe_fabric(fabric: Fabric) -> str:
    """Return text such as ``fat_tree, at most 3 tiers of 63 ports, 2:1`` or ``torus, 4 x 4``.

    It names the number of sites, and the oversubscription in whole ports where ports do not divide by it."""
    used, parts = FABRICS[fabric.kind].keys, [fabric.kind]
    if "tiers" in used:
        parts.append(f"at most {fabric.tiers} tiers of {fabric.radix} ports")
    elif "radix" in used:
        parts.append(f"routers of {fabric.radix} ports")
    if fabric.shape:
        parts.append(" x ".join(map(str, fabric.shape)))
    if fabric.oversubscription > 1:
        parts.append(f"{fabric.oversubscription:g}:1")
        down = ports_down(fabric)
        up = fabric.radix - down
        if "tiers" in used and up and abs(down / up - fabric.oversubscription) > 1e-9:
            parts[-1] += f" (in whole ports {down}:{up}, which is {down / up:.3g}:1)"
    if fabric.sites:
        parts.append(f"{fabric.sites.count} sites")
    return ", ".join(parts)


def load_cluster(
    reference: str | Path | Mapping[str, Any], *, nodes: int | None = None, base: Path | None = None
) -> ClusterSpec:
    """Return a cluster by shipped name, by path, or from a mapping.

    A mapping whose ``name`` is a shipped cluster or a path starts from that file. Its other keys replace or add to the
    file's. Any other mapping is a whole cluster. A file may also be another tool's topology (`importers`).
    ``nodes`` fixes the size. ``base`` is the folder that relative paths start from.

    Raises `InputError`.
    """
    data, file, _ = cluster_data(reference, base=base)
    if nodes is not None:
        data["nodes"] = nodes

    def place(key: str) -> tuple[object, str]:
        return ("--nodes" if nodes is not None and key == "nodes" else file), key

    spec = validated(ClusterSpec, data, file, place=place)
    with located(place):
        return replace(spec, nodes=spec.n_nodes)


def cluster_data(
    reference: object,
    *,
    base: Path | None = None,
    file: object = None,
    key: str | None = None,
    behind: tuple[Path, ...] = (),
) -> tuple[dict[str, Any], Path | None, Mapping[str, Any]]:
    """Return the unchecked data of a reference: the mapping, the file it starts from, and the keys laid over it.

    ``file`` and ``key``: where the reference itself stands. A file without nodes starts from the cluster that it
    names, as a mapping does, and so does one that is ``like`` another. ``behind``: files that have led here so. Raises
    `InputError` where it names nothing.
    """
    over: Mapping[str, Any] = reference if isinstance(reference, Mapping) else {}
    if isinstance(reference, Mapping):
        if reference.get("like") is not None:
            _refuse_relabelled(reference, behind, file, key)
            data, path, _ = cluster_data(
                _named(reference, base, file, key), base=base, file=file, key=key, behind=behind
            )
            return {**data, "name": reference.get("name", data["name"])}, path, over
        name = reference.get("name")
        shipped = isinstance(name, str) and _names_cluster(name)
        if not shipped and ("node" in reference or "groups" in reference or not isinstance(name, str)):
            return _with_open_latencies(_with_nodes({"name": "inline", **over}, base, file, key)), None, over
        reference, over = name, {key: value for key, value in over.items() if key != "name"}
        key = f"{key}.name" if key else "name"
    if not isinstance(reference, str | Path):
        raise InputError("must be a name, a path or a mapping", file=file, key=key, found=brief(reference))
    path = catalog.find("cluster", str(reference), base=base, file=file, key=key)
    if is_foreign(path):
        from simulator.importers.reading import read_topology

        imported = read_topology(path)
        data = _started({**imported.cluster, "assumed": list(imported.assumed)}, path, behind)
    else:
        data = _started(_cluster_file(path), path, behind)
    laid = _with_gpus_of(data, over)
    kept = _with_fewer_parts(_without_replaced({"name": path.stem, **data}, laid), laid)
    assumed = data.get("assumed")
    if isinstance(assumed, list) and all(isinstance(text, str) for text in assumed):
        kept["assumed"] = unanswered(assumed, [*_figures(over), *(data.keys() - kept.keys())])
    data = merged(kept, laid)
    if is_foreign(path) and not {"node", "groups"} & set(data):
        fix = f"llmsim import {path} --node dgx_h100 --out mine.yaml, or another cluster that its nodes are of"
        raise InputError("says nothing of the nodes themselves", file=path, key="node", fix=fix)
    return _with_open_latencies(_with_nodes(data, path.parent, path, None)), path, over


def _cluster_file(path: Path) -> dict[str, Any]:
    """Return the mapping of a cluster file. Raises `InputError`, of files of other kinds too."""
    with expecting(CLUSTER, path):
        data = read_yaml(path)
    if not {"node", "groups", "like"} & data.keys():
        refuse_misplaced(path, CLUSTER.kind, accepted=CLUSTER)
    return data


def _started(data: dict[str, Any], path: Path, behind: tuple[Path, ...]) -> dict[str, Any]:
    """Return the data of a file laid over the cluster that it starts from, if it does.

    ``behind``: files that have led here. Raises `InputError` where it starts from itself.
    """
    key = "like" if data.get("like") is not None else "name"
    named = data.get(key)
    if key == "name" and ({"node", "groups"} & set(data) or not (isinstance(named, str) and _names_cluster(named))):
        return data
    if path in behind:
        raise InputError("starts from itself", file=path, key=key, found=named)
    data = {"name": path.stem, **data} if key == "like" else data
    return cluster_data(data, base=path.parent, file=path, behind=(*behind, path))[0]


def _named(data: Mapping[str, Any], base: Path | None, file: object, key: str | None) -> dict[str, Any]:
    """Return a mapping that is ``like`` a cluster as one that names that cluster. Raises `InputError`."""
    like, here = data["like"], f"{key}.like" if key else "like"
    if not isinstance(like, str):
        message, shipped = "must be the name or path of a cluster", ", ".join(catalog.names("cluster"))
        raise InputError(message, file=file, key=here, found=brief(like), allowed=f"a path, or one of {shipped}")
    whole = like if _names_cluster(like) else str(catalog.find("cluster", like, base=base, file=file, key=here))
    return {**{name: value for name, value in data.items() if name != "like"}, "name": whole}


def _refuse_relabelled(data: Mapping[str, Any], behind: tuple[Path, ...], file: object, key: str | None) -> None:
    """Raise `InputError` where a mapping ``like`` one cluster has the name of another one that is shipped.

    A shipped file has its own name. ``behind``: the files that have led here."""
    name, like = data.get("name"), data["like"]
    if name == like or not catalog.is_shipped("cluster", name) or (behind and behind[-1].stem == name):
        return
    raise InputError(
        f"is the name of a shipped cluster, but the machines are like {like}",
        file=file,
        key=f"{key}.name" if key else "name",
        found=name,
        allowed="any name that no shipped cluster has",
        fix=f"like: {name}, for the machines of {name}",
    )


def _names_cluster(name: str) -> bool:
    """Return whether a name is that of a shipped cluster, or the path of a file."""
    return catalog.is_shipped("cluster", name) or name.endswith(SUFFIXES)


def _figures(data: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the dotted keys of a mapping's values, which are no mappings themselves."""
    for name, value in data.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping):
            yield from _figures(value, f"{key}.")
        else:
            yield key


def _without_replaced(data: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's mapping without the keys that ``over`` replaces.

    Groups stand in place of its node, a shape in place of its nodes. Another kind of fabric has no use for some keys,
    and without NVLinks there are no figures of them.
    """
    data = _without_nvlinks(data) if _section(_section(over, "node"), "nvlink").get("kind") == "none" else data
    fabric, other = data.get("fabric"), over.get("fabric")
    replaced: tuple[str, ...] = ("node", "nodes") if "groups" in over else ()
    if isinstance(fabric, Mapping) and isinstance(other, Mapping):
        replaced += ("nodes",) if "shape" in other else ()
        if "kind" in other:
            kind = FABRICS.get(str(other["kind"]))  # an unknown one is refused later
            unused = keys_of_kinds() - set(kind.keys) if kind else set()
            data = {**data, "fabric": {name: value for name, value in fabric.items() if name not in unused}}
    return {name: value for name, value in data.items() if name not in replaced}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a mapping; an empty one where it has none."""
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _without_nvlinks(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's mapping without the figures of its NVLinks."""
    node = {name: value for name, value in _section(data, "node").items() if name != "nvlink"}
    return {**data, "node": node} if node else dict(data)


def _count(parts: object) -> object:
    """Return how many GPUs or NICs a section holds, or a list of such sections; None where it does not say."""
    if isinstance(parts, list):
        counts = [part.get("count") if isinstance(part, Mapping) else None for part in parts]
        return sum(count for count in counts if is_whole(count)) if all(map(is_whole, counts)) else None
    return parts.get("count") if isinstance(parts, Mapping) else None


def _with_gpus_of(data: Mapping[str, Any], over: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``over`` with GPUs of one type or number laid over a list of several types in ``data``.

    A number alone keeps the first so many GPUs. A type makes all of them of that type.
    """
    node, other = data.get("node"), over.get("node")
    if not (isinstance(node, Mapping) and isinstance(other, Mapping)):
        return over
    listed, wanted = node.get("gpus"), other.get("gpus")
    total = _count(listed)
    if not (isinstance(listed, list) and isinstance(wanted, Mapping) and is_whole(total)):
        return over
    gpus: object = {"count": total, **wanted}
    count = wanted.get("count")
    if set(wanted) == {"count"} and is_whole(count) and 1 <= count <= total:
        first, left = [], count
        for part in listed:
            first.append({**part, "count": min(part["count"], left)})
            left -= first[-1]["count"]
        gpus = [part for part in first if part["count"]]
    return {**over, "node": {**other, "gpus": gpus}}


def _with_fewer_parts(data: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's mapping without places and links of GPUs and NICs beyond the counts in ``over``."""
    node, other = data.get("node"), over.get("node")
    if not (isinstance(node, Mapping) and isinstance(other, Mapping)):
        return data
    counts = {}
    for family, section in (("gpu", "gpus"), ("nic", "nics")):
        count = _count(other.get(section))
        if is_whole(count):
            counts[family] = count
    pcie, nvlink = node.get("pcie"), node.get("nvlink")
    fewer = dict(node)
    if isinstance(pcie, Mapping) and isinstance(pcie.get("tree"), Mapping):
        fewer["pcie"] = {**pcie, "tree": {name: slot for name, slot in pcie["tree"].items() if _stays(name, counts)}}
    if isinstance(nvlink, Mapping) and "gpu" in counts:
        fewer["nvlink"] = _with_fewer_links(nvlink, _count(node.get("gpus")), counts)
    return {**data, "node": fewer}


def _stays(name: object, counts: Mapping[str, int]) -> bool:
    """Return whether ``gpu3`` or ``nic3`` is below the count of its family, or is no name of a GPU or NIC."""
    match = re.fullmatch(r"(gpu|nic)(\d{1,9})", str(name))
    return match is None or match[1] not in counts or int(match[2]) < counts[match[1]]


def _with_fewer_links(nvlink: Mapping[str, Any], before: object, counts: Mapping[str, int]) -> Mapping[str, Any]:
    """Return the section of NVLinks without those of GPUs that are not there.

    None is left of a GPU alone. A link of a mesh is as fast as ``before``, when there were so many GPUs.
    """
    count, kind, bandwidth_Bps = counts["gpu"], nvlink.get("kind"), nvlink.get("bandwidth_Bps")
    if count == 1 and kind in ("pairs", "mesh"):
        return {"kind": "none"}
    if kind == "mesh" and is_whole(before) and count < before and isinstance(bandwidth_Bps, int | float):
        return {**nvlink, "bandwidth_Bps": bandwidth_Bps * (count - 1) / (before - 1)}
    if not isinstance(nvlink.get("links"), list):
        return nvlink
    links = [
        link
        for link in nvlink["links"]
        if not (isinstance(link, Mapping) and isinstance(link.get("gpus"), list))
        or all(_stays(f"gpu{gpu}", counts) for gpu in link["gpus"])
    ]
    return {**nvlink, "links": links} if links or not nvlink["links"] else {"kind": "none"}


def _with_nodes(data: dict[str, Any], base: Path | None, file: object, key: str | None) -> dict[str, Any]:
    """Return a cluster's data with the nodes of groups that name a cluster: those of that cluster."""
    groups = data.get("groups")
    if not isinstance(groups, list):
        return data
    whole = []
    for index, group in enumerate(groups):
        if isinstance(group, Mapping) and isinstance(group.get("node"), str):
            here = f"{key}.groups[{index}].node" if key else f"groups[{index}].node"
            other, _, _ = cluster_data(group["node"], base=base, file=file, key=here)
            if "node" not in other:
                raise InputError("has no one kind of node", file=file, key=here, found=group["node"])
            group = {**group, "node": other["node"]}
        whole.append(group)
    return {**data, "groups": whole}


def _with_open_latencies(data: dict[str, Any]) -> dict[str, Any]:
    """Return a cluster's data in which latencies that nobody gives are among what is assumed: they count as 0."""
    told = data.get("assumed", [])
    if not isinstance(told, list):
        return data
    keys = {str(text).split(":")[0] for text in told}
    texts = [f"{key}: 0 s, as nobody gives one" for key in _open_latencies(data) if key not in keys]
    return {**data, "assumed": [*told, *texts]} if texts else data


def _open_latencies(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of latencies that the links of some node lack."""
    groups = data.get("groups")
    nodes = {"node": _section(data, "node")}
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        nodes[f"groups[{index}].node"] = _section(group, "node") if isinstance(group, Mapping) else {}
    for place, node in nodes.items():
        has_links = {
            "nvlink": _section(node, "nvlink").get("kind", "none") != "none",
            "nics": _section(node, "nics").get("count", 0) != 0,
            "sockets": _section(node, "sockets").get("count", 1) != 1,
        }
        for name, has in has_links.items():
            if has and _section(node, name).get("latency_s") is None:
                yield f"{place}.{name}.latency_s"


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data`` with ``changes`` laid over it, mapping by mapping.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    result = dict(data)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result

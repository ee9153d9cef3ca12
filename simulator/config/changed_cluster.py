"""Keys of a job's cluster that differ from the shipped file of its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from simulator.config import catalog
from simulator.config.cluster import load_cluster
from simulator.hardware.cluster_spec import ClusterSpec

#: Keys that are no part of the machines: how many a job has, what they cost, and remarks.
_NOT_MACHINES = ("name", "nodes", "price_per_gpu_hour", "assumed")


def changed_cluster_keys(cluster: ClusterSpec) -> list[str]:
    """Return the dotted keys in which a cluster differs from the shipped one of its name; none where none has it."""
    if not catalog.is_shipped("cluster", cluster.name):
        return []
    here, shipped = (dict(_figures(spec)) for spec in (cluster, _shipped(cluster.name)))
    keys = dict.fromkeys([*here, *shipped])
    return [key for key in keys if key not in _NOT_MACHINES and here.get(key) != shipped.get(key)]


@lru_cache(maxsize=8)
def _shipped(name: str) -> ClusterSpec:
    return load_cluster(name)


def _figures(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of all that is no section itself."""
    if is_dataclass(value):
        sections = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Mapping):
        sections = dict(value)
    else:
        yield key, value
        return
    for name, section in sections.items():
        yield from _figures(section, f"{key}.{name}" if key else str(name))

"""Clusters: GPUs, switches and NICs as a graph of links, and the routes between GPUs."""

from simulator.cluster.build import build_cluster
from simulator.cluster.cluster import Cluster
from simulator.cluster.gpu import Gpu
from simulator.cluster.link import Link
from simulator.cluster.recent import recent_cluster

__all__ = ["Cluster", "Gpu", "Link", "build_cluster", "recent_cluster"]

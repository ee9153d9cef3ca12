"""Files that users write: workloads, clusters, profiles and stacks, their names, presets and checks.

Imports neither SimPy, matplotlib nor networkx: the calibration package reads workload files on bare GPU machines.
"""

from simulator.config.cluster import load_cluster
from simulator.config.loading import altered, load_workload
from simulator.config.model import Model
from simulator.config.parallelism import Parallelism
from simulator.config.presets import presets
from simulator.config.rules import warnings
from simulator.config.training import Training
from simulator.config.workload import Workload
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import parse_changes

__all__ = [
    "ClusterSpec",
    "Model",
    "Parallelism",
    "Training",
    "Workload",
    "altered",
    "load_cluster",
    "load_workload",
    "parse_changes",
    "presets",
    "warnings",
]

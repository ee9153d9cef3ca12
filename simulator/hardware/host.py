"""Section `host` of a calibration profile: what the CPU that feeds a GPU takes to issue its work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from simulator.bounds import NotNegative, Positive
from simulator.frameworks.framework import LaunchSection
from simulator.hardware.figures import Cited, need_all

#: What the host issues, as far as it takes differently long; other: elementwise, copies, reductions.
LaunchClass = Literal["matmul", "attention", "norm", "other"]
#: What the host does around several ops.
AroundOps = Literal[
    "autograd",
    "split",
    "weights",
    "checkpoint",
    "forward_grouped",
    "backward_grouped",
    "tp_all_reduce",
    "exchange",
    "expert",
    "forward_part",
    "backward_part",
    "bucket",
    "gather",
    "reduce",
    "gradient",
    "graph",
    "hook",
    "update",
    "dtensor",
    "dtensor_update",
    "dequantize",
]


@dataclass(frozen=True, kw_only=True)
class LaunchCosts(Cited):
    """Seconds that the host takes to issue one op, autograd's and the modules' part of it included."""

    forward_s: dict[LaunchClass, Positive]
    backward_s: dict[LaunchClass, Positive]
    """per kernel: a linear layer launches two products"""
    optimizer_s: Positive
    """a step of a fused optimizer"""
    collective_s: Positive
    p2p_s: Positive
    """a send or a receive, with what a pipeline's runtime does for it"""
    around_s: dict[AroundOps, NotNegative] = field(default_factory=dict)
    """the start of a backward pass; per product of one that is split in two, to find where to cut it; per module
    whose weights' gradients are computed apart; per recomputed layer; a grouped product of experts, with the
    sorting of tokens around it; an all-reduce of tensor parallelism, with the two linear layers written by hand
    that it stands for; a collective of experts; a further product that a call launches from C++, of an expert or of a
    ring; a part of the tokens that experts get or give, which the host cuts
    from the rest for a kernel to join; a bucket of DDP; a unit of FSDP that is gathered, one whose gradients are
    reduced; a kernel that adds a gradient to a buffer, with the hooks that call for it; a layer of compiled code, each
    way: the guards, wrappers and weights of its graph; a call of DeepSpeed's hooks around a module; a kernel of an
    optimizer on one tensor; a product, norm or collective of a layer that is split as DTensors, and clipping and update
    of one such weight; a call of bitsandbytes that makes a weight of 4 bits whole. Not listed: nothing, or what other
    products, kernels and collectives take"""

    def __post_init__(self) -> None:
        for key, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            need_all(f"host.launch_s.{key}", seconds, get_args(LaunchClass))


@dataclass(frozen=True, kw_only=True)
class Host:
    """The CPU that feeds the GPU."""

    launch_s: dict[LaunchSection, LaunchCosts]

    def __post_init__(self) -> None:
        need_all("host.launch_s", self.launch_s, get_args(LaunchSection))

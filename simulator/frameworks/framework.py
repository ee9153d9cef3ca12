"""Everything that a software stack decides of a training step, as one object: facts, and hooks that return operations.

Hooks are plain functions of the shapes that an operation works on. What they return has no weights: models add those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Ops, Tensor
from simulator.operations.shapes import Shapes


class Traffic(NamedTuple):
    """A memory-bound kernel: what its name ends in, the class it is priced as, and the tensors it reads and writes."""

    suffix: str
    op: str
    read: float
    written: float


@dataclass(frozen=True)
class ActivationKernels:
    """Kernels of the function between the two products of an MLP, in tensors of its output's size. ``keeps_gate``: the
    activated half is kept for the product with the other one."""

    forward: tuple[Traffic, ...]
    backward: tuple[Traffic, ...]
    keeps_gate: bool = False


@dataclass(frozen=True)
class ExpertHooks:
    """Operations around the products of experts.

    ``permute`` and ``unpermute`` return the kernels of the forward and of the backward pass. ``sort`` puts the choices
    of tokens in order before anything is sent. ``weighs_in_activation``: outputs are weighed by their probabilities
    before the second product, which needs the probabilities only. ``host_waits_for_counts``: the host reads how many
    tokens come before it issues the next kernel.
    """

    router: Callable[[Shapes, Experts], Node]
    sort: Callable[[Experts], Ops]
    permute: Callable[[Shapes, Experts], tuple[Ops, Ops]]
    unpermute: Callable[[Shapes, Experts], tuple[Ops, Ops]]
    kept_by_dispatch: Callable[[Shapes, Experts], tuple[Tensor, ...]]
    kept_by_combine: Callable[[Shapes, Experts], tuple[Tensor, ...]]
    weighs_in_activation: bool
    host_waits_for_counts: bool


@dataclass(frozen=True)
class JobTraits:
    """Facts of a job that decide how a framework runs it.

    ``reduces_beside``: replicas all-reduce gradients while the backward pass goes on. ``updates_on_gpu``: the optimizer
    is neither on the host nor on parameter servers. ``stages``: of the model.
    """

    norm: str
    precision: str
    grad_dtype: str
    master_weights: bool
    keeps_gradients: bool
    zero: int
    stages: int
    reduces_beside: bool
    updates_on_gpu: bool


@dataclass(frozen=True)
class Replication:
    """How gradients are kept, and how replicas share them.

    ``fully_sharded``: parameters are sharded by torch's ``fully_shard``. ``shards_are_masters``: what it shards are the
    master weights, which are cast where they are gathered; there are no other shards. ``in_ddp``: gradients go into the
    buckets of torch's ``DistributedDataParallel``. ``hands_over_gradients``: they are what autograd has made, from
    their first backward pass to the optimizer's step, and no parts of a buffer that is always there.
    ``adds_first_gradients`` and ``adds_later_gradients``: those of a step's first micro-batch, and of others, are added
    to a buffer. ``clears_buffers``: the optimizer's step sets buffers to zero.
    """

    fully_sharded: bool = False
    shards_are_masters: bool = False
    in_ddp: bool = False
    hands_over_gradients: bool = False
    adds_first_gradients: bool = True
    adds_later_gradients: bool = True
    clears_buffers: bool = True


@dataclass(frozen=True)
class StageRuntime:
    """How pipeline stages run, where they differ from those of Megatron-Core.

    ``buffers_each_microbatch``: a stage receives every micro-batch into a buffer of its own. ``keeps_last_outputs``:
    the last stage keeps what it returns. ``keeps_graphs``: a split backward pass leaves the graph between its halves.
    ``first_backward_whole``: the first stage, whose input has no gradient, does not split its backward pass.
    ``awaits_apart``: of a forward and a backward pass in one slot each waits for its own input.
    """

    buffers_each_microbatch: bool = False
    keeps_last_outputs: bool = False
    keeps_graphs: bool = False
    first_backward_whole: bool = False
    awaits_apart: bool = False


class Before(NamedTuple):
    """Defaults of workload keys that hold before a ``version``."""

    version: tuple[int, ...]
    defaults: Callable[[JobTraits], Mapping[str, object]]


@dataclass(frozen=True, eq=False)
class Framework:
    """One software stack, in one of its versions, compiled or not.

    ``launch_section``: of ``host.launch_s`` in a profile, what its host takes. ``memory_sections``: of
    ``kernels.memory``, whose kernels it launches; a later one replaces classes of an earlier one.
    ``defaults``: dotted key of a workload -> its value where the file leaves it open. ``before``: other defaults of
    early versions. ``compiled``: the stack under torch.compile, where that is modelled.
    ``losses``: those of ``training.loss`` that it can run. ``adds_in_products``: a product that makes a weight gradient
    can add it to the buffer.

    Facts and hooks of layers: ``activation``; ``rotation``, kernels that turn queries, or keys, by their positions;
    ``joined_qkv_width``, elements of a token that are copied to join the gradients of queries, keys and values;
    ``softmax``, of scores, and the dropout after it; ``residual``, dropout of a block's output and the sum with its
    input; ``embedding_mask``, kernels of both passes that hide words of other ranks, from the bytes of all rows;
    ``rms_norm_by_operations``, RMSNorm without a kernel of its own, where there is such; ``fuses_residual_and_norm``,
    one kernel for a sum and the norm after it, each way; ``adds_bias_after_sums``, in a kernel of its own, where a bias
    waits for a sum over ranks.
    Of the loss that is not compiled: ``keeps_log_softmax`` of a whole vocabulary, ``keeps_split_log_softmax`` of one
    that is split over ranks, where it is not the softmax, worked on in place, and ``by_row``, the class of kernels that
    take the same number for a whole row.
    ``recompute_ends_before``: operations of a layer without dropout before which running it again ends, of a layer that
    is whole and of one that is split over ranks; none where all of it runs again.
    """

    name: str
    about: str
    launch_section: str
    memory_sections: tuple[str, ...]
    defaults: Callable[[JobTraits], Mapping[str, object]]
    losses: tuple[str, ...]
    adds_in_products: bool
    activation: Callable[[Shapes], ActivationKernels]
    rotation: tuple[Traffic, ...]
    joined_qkv_width: Callable[[Shapes], int]
    softmax: Callable[[Shapes, int], tuple[Node, Node]]
    residual: Callable[[Shapes, str], Node]
    embedding_mask: Callable[[Shapes, float], tuple[Ops, Ops]]
    experts: ExpertHooks
    replication: Callable[[JobTraits], Replication]
    by_row: str
    keeps_log_softmax: bool = False
    keeps_split_log_softmax: bool = False
    rms_norm_by_operations: Callable[[Shapes, str], Node] | None = None
    fuses_residual_and_norm: bool = False
    adds_bias_after_sums: bool = False
    recompute_ends_before: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    stages: StageRuntime = StageRuntime()
    before: tuple[Before, ...] = ()
    compiled: Framework | None = None

    @property
    def rotates_by_operations(self) -> bool:
        """Whether positions are applied by several operations, not by a kernel."""
        return len(self.rotation) > 1

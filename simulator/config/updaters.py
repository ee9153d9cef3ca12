"""The section ``training.optimizer`` of a workload file: the optimizers of weights, by library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from simulator.config.section import AsTuple, Section
from simulator.optimizers import OPTIMIZERS

Dtype = Literal["fp32", "bf16", "fp16"]
if TYPE_CHECKING:
    OptimizerName = str
    ImplementationName = str
else:
    # What is listed, so that a new optimizer needs no line here.
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    ImplementationName = Literal[
        tuple(dict.fromkeys(name for optimizer in OPTIMIZERS.values() for name in optimizer.implementations))
    ]
#: Kinds of weights that an optimizer can be chosen for.
WeightKind = Literal["embedding", "head", "norms", "biases", "experts", "router", "matrices", "vectors"]


class Updater(Section):
    """An optimizer, and how it is run."""

    name: OptimizerName = "adamw"
    """muon updates the matrices of layers, and AdamW the rest [adamw]"""
    implementation: ImplementationName | None = None
    """foreach: a multi-tensor kernel per operation, as PyTorch's AdamW by default; fused: one kernel; for_loop: a
    kernel per operation and tensor; apex: one kernel, as Transformer Engine has; bitsandbytes; torchao; cpu:
    DeepSpeed's CPU Adam [cpu where optimizer states are offloaded, or on parameter servers; else the framework's,
    foreach for pytorch and fused for others; of an optimizer that has no such its first]"""
    state_dtype: Dtype = "fp32"
    """of the states [fp32; of hugging_face the precision, but for master_weights; of libraries that have one type only,
    that]"""
    paged: bool = False
    """large states lie in memory that pages to the host; how long pages take is not simulated [false]"""


class UpdaterOfWeights(Updater):
    """The optimizer of one kind of weights."""

    weights: WeightKind
    """matrices: those of layers, experts' among them; vectors: norms and biases"""


class Optimizer(Updater):
    """The optimizer of the weights, and of kinds that have one of their own."""

    master_weights: bool = True
    """an fp32 copy of 16-bit weights; of hugging_face weights in fp32 alone, cast where fully_shard gathers them (zero
    3) or products read them (zero 0, torch.autocast) [true; false where precision is fp32, and of hugging_face]"""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """cpu: threads of each rank's process [the framework's: 1, as torchrun sets OMP_NUM_THREADS for several processes
    of a node; null, as many as keep the host's memory busy, for deepspeed]"""
    groups: Annotated[tuple[UpdaterOfWeights, ...], AsTuple] = ()
    """kinds of weights that have an optimizer of their own; a weight of several kinds goes with the first [none]"""

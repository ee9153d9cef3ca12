"""The section ``training.optimizer`` of a workload file: what updates which weights, by which library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from simulator.config.section import AsTuple, Section
from simulator.optimizers import OPTIMIZERS, Implementation, UpdateRule

if TYPE_CHECKING:
    from simulator.config.workload import Workload

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
#: The optimizer of weights that another one cannot update.
FALLBACK = "adamw"


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
    """of the states [fp32; of libraries that have one type only, that]"""
    paged: bool = False
    """large states lie in memory that pages to the host; how long pages take is not simulated [false]"""


class UpdaterOfWeights(Updater):
    """The optimizer of one kind of weights."""

    weights: WeightKind
    """matrices: those of layers, experts' among them; vectors: norms and biases"""


class Optimizer(Updater):
    """The optimizer of all weights, or of those without one of their own."""

    master_weights: bool = True
    """an fp32 copy of 16-bit weights [true; false where precision is fp32]"""
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """cpu: threads of each rank's process [the framework's: 1, as torchrun sets OMP_NUM_THREADS for several processes
    of a node; null, as many as keep the host's memory busy, for deepspeed]"""
    groups: Annotated[tuple[UpdaterOfWeights, ...], AsTuple] = ()
    """kinds of weights that have an optimizer of their own; a weight of several kinds goes with the first [none]"""


class Choice(NamedTuple):
    """An optimizer of some weights, with nothing left open.

    ``weights`` is their kind, and empty for all that no choice before it has. ``key`` is where the file says so.
    """

    weights: str
    rule: UpdateRule
    implementation: Implementation
    state_dtype: str
    paged: bool
    key: str


def choices(workload: Workload) -> tuple[Choice, ...]:
    """Return the optimizers of all weights, in the order in which they take theirs."""
    optimizer, key = workload.training.optimizer, "training.optimizer"
    chosen = [
        _choice(workload, group, group.weights, f"{key}.groups.{number}")
        for number, group in enumerate(optimizer.groups)
    ]
    limited = OPTIMIZERS[optimizer.name].matrices_only
    chosen.append(_choice(workload, optimizer, "matrices" if limited else "", key))
    if limited:
        chosen.append(_choice(workload, Updater(name=FALLBACK, state_dtype=optimizer.state_dtype), "", key))
    return tuple(chosen)


def usual_library(workload: Workload, updater: Updater) -> str:
    """Return the implementation of ``updater`` where the file leaves it open.

    It is the framework's, on hosts ``cpu``, and the first of an optimizer without either.
    """
    traits, rule = workload.traits, OPTIMIZERS[updater.name]
    usual = workload.software.defaults(traits).get("training.optimizer.implementation", "fused")
    if not traits.updates_on_gpu:
        usual = "cpu"
    return str(usual) if usual in rule.implementations else next(iter(rule.implementations))


def _choice(workload: Workload, updater: Updater, weights: str, key: str) -> Choice:
    rule = OPTIMIZERS[updater.name]
    implementation = rule.implementations[updater.implementation or usual_library(workload, updater)]
    types = implementation.state_dtypes
    state = updater.state_dtype if updater.state_dtype in types else types[0]
    return Choice(weights, rule, implementation, state, updater.paged, key)

"""Optimizers of a workload's weights, with nothing left open."""

from __future__ import annotations

from typing import NamedTuple

from simulator.config.updaters import Updater
from simulator.config.workload import Workload
from simulator.optimizers import OPTIMIZERS, Implementation, UpdateRule

#: The optimizer of weights that another one cannot update.
FALLBACK = "adamw"


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

    It is the framework's, or on hosts ``cpu``, where the optimizer has that. Else it is the optimizer's first.
    """
    traits, rule = workload.traits, OPTIMIZERS[updater.name]
    usual = workload.software.defaults(traits).get("training.optimizer.implementation", "fused")
    if not traits.updates_on_gpu:
        usual = "cpu"
    return str(usual) if usual in rule.implementations else next(iter(rule.implementations))


def usual_state_dtype(workload: Workload, updater: Updater) -> str:
    """Return the type of an updater's states where the file leaves it open: the framework's, if the library has it."""
    implementation = OPTIMIZERS[updater.name].implementations[
        updater.implementation or usual_library(workload, updater)
    ]
    default = str(Updater.model_fields["state_dtype"].default)
    return updater.state_dtype if updater.state_dtype in implementation.state_dtypes else default


def _choice(workload: Workload, updater: Updater, weights: str, key: str) -> Choice:
    rule = OPTIMIZERS[updater.name]
    implementation = rule.implementations[updater.implementation or usual_library(workload, updater)]
    types = implementation.state_dtypes
    state = updater.state_dtype if updater.state_dtype in types else types[0]
    return Choice(weights, rule, implementation, state, updater.paged, key)

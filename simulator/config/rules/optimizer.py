"""Optimizers: what libraries run, where states live, and which weights an optimizer can update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.optimizer_choices import usual_library
from simulator.config.updaters import Updater, UpdaterOfWeights
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from simulator.config.workload import Workload

KEY = "training.optimizer"
#: Kinds of weights that hold no matrices.
VECTORS = ("norms", "biases", "vectors")


def problems(workload: Workload) -> Iterator[InputError]:
    """Optimizers that do not do what the file says of them, or do not go with how states are kept."""
    optimizer = workload.training.optimizer
    on_host = not workload.traits.updates_on_gpu
    for key, updater in updaters(workload):
        rule = OPTIMIZERS[updater.name]
        if updater.implementation is not None and updater.implementation not in rule.implementations:
            yield InputError(
                f"{updater.name} has no such implementation",
                key=f"{key}.implementation",
                found=updater.implementation,
                allowed=", ".join(rule.implementations),
            )
            continue
        yield from _place_problems(key, updater, on_host)
        if not on_host:
            yield from _library_problems(workload, key, updater)
            yield from _sharding_problems(workload, key, updater)
    if on_host and optimizer.groups:
        yield InputError(
            "what is updated on hosts has one optimizer",
            key=f"{KEY}.groups",
            found=brief([group.weights for group in optimizer.groups]),
            allowed="no groups, or offload.optimizer: none",
        )
    offloaded = on_host and not workload.parallelism.server_count
    if optimizer.threads is not None and not offloaded:
        yield InputError(
            "says how many threads of a rank's process update weights on its host, and none does",
            key=f"{KEY}.threads",
            found=optimizer.threads,
            allowed="null, or parallelism.offload.optimizer: cpu",
        )
    yield from _group_problems(workload)


def updaters(workload: Workload) -> Iterator[tuple[str, Updater]]:
    """Yield every optimizer of the file with its key."""
    optimizer = workload.training.optimizer
    yield KEY, optimizer
    for number, group in enumerate(optimizer.groups):
        yield f"{KEY}.groups.{number}", group


def _place_problems(key: str, updater: Updater, on_host: bool) -> Iterator[InputError]:
    """Optimizers that run elsewhere than states are."""
    able = [name for name, rule in OPTIMIZERS.items() if "cpu" in rule.implementations]
    if on_host and updater.name not in able:
        yield InputError(
            "is not simulated on hosts, where the states are",
            key=f"{key}.name",
            found=updater.name,
            allowed=" or ".join(able),
        )
    elif on_host and updater.implementation not in (None, "cpu"):
        yield InputError(
            "runs on GPUs, and the states are on hosts",
            key=f"{key}.implementation",
            found=updater.implementation,
            allowed="cpu",
        )
    elif not on_host and updater.implementation == "cpu":
        yield InputError(
            "runs on hosts, and the states are on GPUs",
            key=f"{key}.implementation",
            found="cpu",
            allowed="another, or parallelism.offload.optimizer: cpu",
        )


def _library_problems(workload: Workload, key: str, updater: Updater) -> Iterator[InputError]:
    """Yield types of states and paging that the library does not have."""
    rule = OPTIMIZERS[updater.name]
    library = updater.implementation or usual_library(workload, updater)
    implementation = rule.implementations[library]
    default = type(updater).model_fields["state_dtype"].default
    if updater.state_dtype not in (*implementation.state_dtypes, default):
        yield InputError(
            f"states of {updater.name} by {library} have another type",
            key=f"{key}.state_dtype",
            found=updater.state_dtype,
            allowed=", ".join(implementation.state_dtypes),
        )
    if updater.paged and not implementation.pages:
        able = [name for name, one in rule.implementations.items() if one.pages]
        yield InputError(
            f"states of {updater.name} do not page to the host with implementation {library}",
            key=f"{key}.paged",
            found=brief(True),
            allowed=f"false, or implementation: {' or '.join(able)}" if able else "false",
        )


def _sharding_problems(workload: Workload, key: str, updater: Updater) -> Iterator[InputError]:
    """Optimizers whose states are not simulated in shards, or compressed."""
    rule, layout = OPTIMIZERS[updater.name], workload.parallelism
    exchanges = any(len(one.rounds) > 1 for one in rule.implementations.values())
    if rule.needs_whole and not exchanges and layout.zero:
        yield InputError(
            f"{updater.name} works on whole matrices, which shards are not",
            key="parallelism.zero",
            found=layout.zero,
            allowed=f"0, or another {key}.name",
        )
    if layout.grad_compression == "1bit" and updater.name not in ("adam", "adamw"):
        yield InputError(
            "1-bit compression is Adam's (arXiv 2102.02888)",
            key=f"{key}.name",
            found=updater.name,
            allowed="adam, adamw, or another grad_compression",
        )


def _group_problems(workload: Workload) -> Iterator[InputError]:
    """Groups of weights that there are none of, or that their optimizer cannot update."""
    model, seen = workload.model, set[str]()
    for number, group in enumerate(workload.training.optimizer.groups):
        key = f"{KEY}.groups.{number}"
        if group.weights in seen:
            yield InputError("has an optimizer already", key=f"{key}.weights", found=group.weights)
        seen.add(group.weights)
        absent = (group.weights in ("experts", "router") and model.moe is None) or (
            group.weights == "head" and model.tied_embeddings
        )
        if absent:
            yield InputError("the model has no such weights", key=f"{key}.weights", found=group.weights)
        if OPTIMIZERS[group.name].matrices_only and group.weights in VECTORS:
            yield _no_matrices(key, group)


def _no_matrices(key: str, group: UpdaterOfWeights) -> InputError:
    return InputError(
        f"{group.name} updates matrices, and {group.weights} have none",
        key=f"{key}.name",
        found=group.name,
        allowed=", ".join(name for name, rule in OPTIMIZERS.items() if not rule.matrices_only),
    )


def warnings(workload: Workload) -> Iterator[str]:
    """States that page, which is not timed."""
    for key, updater in updaters(workload):
        if updater.paged:
            yield (
                f"{key}.paged: states of large tensors count as the host's, as if all had left the GPU; how long pages "
                "take between the two is not simulated"
            )

"""The workload file: a model, how it is trained, how it is laid out, and the cluster that it runs on.

`load_workload` is the way in. A `Workload` is complete: presets are expanded, every default has its value, and what it
says has been checked (see `rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

from pydantic import Field, GetJsonSchemaHandler, ModelWrapValidatorHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from simulator.bounds import Text
from simulator.config import catalog, rules
from simulator.config.cluster import cluster_data
from simulator.config.framework import FrameworkChoice
from simulator.config.model import Model
from simulator.config.parallelism import Parallelism
from simulator.config.pipelines import find_schedule, is_file
from simulator.config.presets import expand_model
from simulator.config.profile import check_gpu, check_one_vendor, check_precision, load_profile
from simulator.config.section import AsSection, AsTuple, Integral, Section, as_data
from simulator.config.stack import check_stack, load_stack
from simulator.config.training import Training
from simulator.config.updaters import usual_library
from simulator.config.validation import validated
from simulator.errors import InputError, PlaceOfKey, each, located, raise_all
from simulator.frameworks import Framework, JobTraits, Replication, StageRuntime, find_framework
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.input_files import as_path, read_yaml, with_changes

#: Dotted path of a section -> the key of it that a plain text in its place means.
SHORTHANDS = {"cluster": "name", "framework": "name", "training.recompute": "granularity", "training.loss": "name"}


S = TypeVar("S", bound=Section)


class Simulation(Section):
    """Exact shortcuts: the same timeline, sooner."""

    fold: bool = True
    """ranks that do the same at the same time are simulated once [true]"""
    coalesce: bool = True
    """operations that nothing can interrupt are advanced together [true]"""


class Workload(Section):
    """One training job, complete and legal."""

    name: Text
    """[the file's name]"""
    note: Text = ""
    """what `list workloads` says of it, such as that it does not fit [none]"""
    model: Model
    training: Training
    framework: FrameworkChoice = FrameworkChoice()
    """a name, or {name, version, compile}: whose kernels, gradient buffers, sends, host costs and defaults
    [megatron_core]"""
    parallelism: Parallelism = Parallelism()
    cluster: Annotated[ClusterSpec, AsSection()]
    """a name in topologies/, a path, or a mapping; {name: dgx_a100, nodes: 128} also fixes the size
    [nodes: as many as the cluster's file says where that is more than one, else the fewest that hold the ranks]"""
    calibration: str | dict[str, str] = ""
    """a profile's name or path [the shipped profile of the GPU]; of a job on several types of GPU a mapping, type ->
    profile"""
    stack: str = ""
    """what carries collectives: a name in calibration/stacks/ or a path [the profile's own transports]"""
    placement: Literal["packed", "interleaved"] | Annotated[tuple[Annotated[int, Field(ge=0)], ...], AsTuple] = "packed"
    """which nodes of the cluster the job takes: packed (the first that are free), interleaved (in turn with the other
    interleaved jobs that share the cluster), or a list of their numbers, ranks node by node [packed]"""
    seed: Annotated[int, Field(ge=0, le=2**63), Integral] = 0
    """of everything random: which experts a skewed distribution prefers [0]"""
    simulation: Simulation = Simulation()

    @property
    def n_ranks(self) -> int:
        return self.parallelism.model_parallel * self.parallelism.dp

    @property
    def microbatches(self) -> int:
        """Micro-batches of one step, per data-parallel replica."""
        return self.training.global_batch // (self.training.micro_batch * self.parallelism.dp)

    @property
    def software(self) -> Framework:
        """The framework with its version: facts, and hooks that return operations."""
        return find_framework(self.framework.name, self.framework.version, self.framework.compile)

    @property
    def traits(self) -> JobTraits:
        """The facts by which a framework decides how to run the job."""
        training, layout = self.training, self.parallelism
        together = layout.data_parallel == "allreduce"
        return JobTraits(
            norm=self.model.norm,
            precision=training.trained_dtype,
            grad_dtype=training.grad_dtype,
            master_weights=training.optimizer.master_weights,
            keeps_gradients=training.keep_gradients,
            zero=layout.zero,
            stages=layout.n_stages,
            reduces_beside=together and layout.overlap.grad_reduce,
            updates_on_gpu=together and layout.offload.optimizer == "none",
            shares_cpus=together
            and layout.offload.optimizer != "none"
            and min(self.n_ranks, max(node.gpus.count for node in self.cluster.kinds)) > 1,
        )

    @property
    def replication(self) -> Replication:
        """How gradients are kept, and how replicas share them."""
        return self.software.replication(self.traits)

    @property
    def stage_runtime(self) -> StageRuntime:
        """How the stages of a pipeline run; without a pipeline there is nothing to differ."""
        return self.software.stages if self.parallelism.pp > 1 else StageRuntime()

    @property
    def calibrations(self) -> Mapping[str, str]:
        """Type of GPU of the ranks -> its profile's name or path."""
        given = self.calibration
        return {gpu: given[gpu] if isinstance(given, dict) else given for gpu in self.gpu_types}

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """The nodes of the cluster that the job lists, in the order of its ranks; None: it takes the first."""
        return None if isinstance(self.placement, str) else self.placement

    @property
    def own_nodes(self) -> tuple[int, ...]:
        """The nodes of the cluster that the job takes: its workers', in the order of ranks, then one per parameter
        server."""
        if self.nodes is not None:
            return self.nodes
        return tuple(range(self.cluster.nodes_for(self.n_ranks) + self.parallelism.server_count))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU of the ranks."""
        if len(self.cluster.gpu_types) == 1:  # with no look at every node
            return self.cluster.gpu_types
        workers = self.own_nodes[: len(self.own_nodes) - self.parallelism.server_count]
        return tuple(dict.fromkeys(self.cluster.node_at(node).gpus.type for node in workers))

    @property
    def server_nodes(self) -> tuple[int, ...]:
        """Nodes on whose hosts parameter servers run."""
        return self.own_nodes[len(self.own_nodes) - self.parallelism.server_count :]

    @property
    def rank_tokens(self) -> int:
        """Tokens of one micro-batch that a rank works on: a context-parallel rank has its share of each sequence."""
        return self.training.micro_batch * self.training.seq // self.parallelism.cp

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, data: Any, handler: ModelWrapValidatorHandler[Workload]) -> Workload:
        """Fill in the defaults that lie across sections, and check. Raises `InputError`."""
        workload = handler(data)
        raise_all(rules.problems(workload))
        workload = _resolved(workload)
        raise_all(rules.layout_problems(workload))
        return workload

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of what stands in a file, where the cluster can be a name and the workload need have none."""
        schema = handler.resolve_ref_schema(handler(core))
        schema["required"].remove("name")
        cluster = schema["properties"]["cluster"]
        description = cluster.pop("description", "")
        schema["properties"]["cluster"] = {
            "description": description,
            "anyOf": [{"type": "string"}, cluster, {"type": "object", "required": ["name"]}],
        }
        return schema


def _resolved(workload: Workload) -> Workload:
    layout, cluster, training = workload.parallelism, workload.cluster, workload.training
    if "dp" not in layout.model_fields_set and cluster.nodes is not None:
        layout = layout.model_copy(update={"dp": rules.replicas(layout, cluster, workload.nodes)})
    if not layout.layers_per_stage:
        layout = layout.model_copy(update={"layers_per_stage": rules.even_split(workload.model.layers, layout)})
    ranks = layout.model_parallel * layout.dp
    rules.check_scale(ranks)
    if cluster.nodes is None:
        nodes = cluster.nodes_for(ranks) + layout.server_count
        if workload.nodes is not None:
            nodes = max(workload.nodes, default=0) + 1
        raise_all(rules.placement.layout_problems(workload))  # before what the number of nodes is wrong for
        with located(lambda key: (None, f"cluster.{key}")):
            cluster = replace(cluster, nodes=nodes)
    if training.trained_dtype == "fp32" and "master_weights" not in training.optimizer.model_fields_set:
        optimizer = training.optimizer.model_copy(update={"master_weights": False})
        training = training.model_copy(update={"optimizer": optimizer})
    workload = workload.model_copy(update={"parallelism": layout, "cluster": cluster, "training": training})
    for key, value in workload.software.defaults(workload.traits).items():
        workload = _left_open(workload, key, value)
    workload = _left_open(workload, "training.optimizer.implementation", usual_library(workload, training.optimizer))
    calibration = _calibrations(workload.calibration, workload.gpu_types, cluster.gpu_types)
    return workload.model_copy(update={"calibration": calibration})


def _left_open(section: S, key: str, value: object) -> S:
    """Return ``section`` with ``value`` at a dotted ``key`` that the file leaves open, and which stays so."""
    name, _, rest = key.partition(".")
    if rest:
        value = _left_open(getattr(section, name), rest, value)
    elif name in section.model_fields_set:
        return section
    values = {**dict(section), name: value}
    return cast(S, section.model_construct(_fields_set=set(section.model_fields_set), **values))


def _calibrations(given: str | dict[str, str], own: tuple[str, ...], types: tuple[str, ...]) -> str | dict[str, str]:
    """The profile of the cluster's type of GPU, or of every one of several ``types``, of which the ranks are on
    ``own``. Raises `InputError` where types are unknown, or one profile is given for several."""
    if isinstance(given, str):
        if given and len(own) > 1:
            raise InputError(
                "the ranks are on several types of GPU, each with a profile of its own",
                key="calibration",
                found=given,
                allowed=f"a mapping with keys {', '.join(own)}",
            )
        given = dict.fromkeys(own, given) if given else {}
    for gpu in given:
        if gpu not in types:
            allowed = ", ".join(types)
            raise InputError("the cluster has no such GPU", key=f"calibration.{gpu}", found=given[gpu], allowed=allowed)
    return given.get(types[0], types[0]) if len(types) == 1 else {gpu: given.get(gpu, gpu) for gpu in types}


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_workload(
    source: str | Path | Mapping[str, Any] | Workload, set: Mapping[str, Any] = _NOTHING, *, by: str = "--set"
) -> Workload:
    """A workload by shipped name, by path, or from a mapping such as the file holds; ``set`` changes dotted keys first.

    ``by``: where ``set`` stands, for errors. A `Workload` is returned as it is.
    Raises `InputError` that lists what is wrong: the file, the dotted key, what was found, what is allowed.
    """
    if isinstance(source, Workload):
        if set:
            raise InputError("a loaded workload is complete; give its file, name or mapping to change keys", file="set")
        return source
    if isinstance(source, Mapping):
        data, file, base = dict(source), None, None
    else:
        file = catalog.find("workload", str(source))
        data, base = read_yaml(file), file.parent
    written = data
    data = {key: value for key, value in with_changes(data, set, SHORTHANDS, by).items() if value is not None}

    def origin(key: str) -> tuple[object, str]:
        return (by if _under(key, set) or _only_in(key, set, written) else file), key

    data.setdefault("name", file.stem if file else "workload")
    refused: dict[str, InputError] = {}
    for name, expanded in (
        ("model", lambda section: expand_model(section, base=base, origin=origin)),
        ("parallelism", lambda section: _with_schedule_file(section, base, origin("parallelism.schedule"))),
        ("cluster", lambda reference: _cluster(reference, base, file, set, by)),
    ):
        if name in data and (name == "cluster" or isinstance(data[name], Mapping)):
            try:
                data[name] = expanded(data[name])
            except InputError as error:
                refused[name] = error
    if refused:
        _refuse(data, refused, file, origin)
    workload = validated(Workload, data, file, place=origin)
    return _with_stack(_with_profiles(workload, base, origin), base, origin)


def _refuse(data: Mapping[str, Any], refused: Mapping[str, InputError], file: object, origin: PlaceOfKey) -> NoReturn:
    """Raise `InputError` of the sections that are ``refused`` and of what is wrong in each of the others; without a
    cluster nothing is said of one against another."""
    left = {key: value for key, value in data.items() if key not in refused and key != "cluster"}
    try:
        validated(Workload, left, file, place=origin)
    except InputError as error:
        said, more = each(error)
        raise_all([*refused.values(), *(one for one in said if one.key not in data.keys() - left.keys())], more)
    raise AssertionError("a workload without a cluster")


def _with_profiles(workload: Workload, base: Path | None, origin: PlaceOfKey) -> Workload:
    """Return the workload with the whole paths of profiles that are not shipped. Raises `InputError` where one does not
    exist, is of another GPU or lacks the precision, and where ranks are on GPUs of several vendors."""
    given, profiles = workload.calibration, {}
    several = isinstance(given, dict)
    found = dict(given if isinstance(given, dict) else workload.calibrations)
    for gpu, name in found.items():
        if gpu not in workload.gpu_types and name == gpu:
            continue  # nobody has asked for it
        key = f"calibration.{gpu}" if several else "calibration"
        file, shipped = origin(key)[0], name in catalog.names("profile")
        profile = catalog.find("profile", name, base=base, file=file, key=key)
        profiles[gpu] = load_profile(profile)
        check_gpu(profiles[gpu], gpu, file=file, key=key)
        found[gpu] = name if shipped else str(profile)
    own = {gpu: profiles[gpu] for gpu in workload.gpu_types}
    for calibration in own.values():
        check_precision(calibration, workload.training.precision, file=origin("training.precision")[0])
    check_one_vendor(own, file=origin("cluster")[0], key="cluster.groups")
    return workload.model_copy(update={"calibration": found if several else found[workload.cluster.gpu_types[0]]})


def _with_stack(workload: Workload, base: Path | None, origin: PlaceOfKey) -> Workload:
    """Return the workload with the whole path of a stack that is not shipped. Raises `InputError` where it does not
    exist, or is of another GPU."""
    if not workload.stack:
        return workload
    file, shipped = origin("stack")[0], workload.stack in catalog.names("stack")
    path = catalog.find("stack", workload.stack, base=base, file=file, key="stack")
    for gpu in workload.gpu_types:
        check_stack(load_stack(path), gpu, file=file, key="stack")
    return workload if shipped else workload.model_copy(update={"stack": str(path)})


def altered(workload: Workload, changes: Mapping[str, Any]) -> Workload:
    """A copy of a loaded workload with dotted keys changed; defaults that follow from other keys follow again, the
    layers per stage too where their number changes. Raises `InputError` where the copy is not legal."""
    data = {name: getattr(workload, name) for name in type(workload).model_fields}
    for name in ("model", "training", "framework", "parallelism", "simulation"):
        data[name] = data[name].model_dump(exclude_unset=True)
    data["cluster"] = as_data(workload.cluster, defaults=False)
    if "dp" not in workload.parallelism.model_fields_set:  # nor have nodes been given, from which it would follow
        data["cluster"].pop("nodes", None)
    data = with_changes(data, changes, SHORTHANDS)
    stages = len(workload.parallelism.layers_per_stage)
    if data["parallelism"].get("pp", 1) * data["parallelism"].get("vpp", 1) != stages:
        data["parallelism"].pop("layers_per_stage", None)
    return load_workload(data)


def _with_schedule_file(section: Mapping[str, Any], base: Path | None, place: tuple[object, str]) -> Mapping[str, Any]:
    """Return the section with the whole path of a schedule's file: beside the workload, or else in the current
    directory."""
    reference = section.get("schedule")
    if not isinstance(reference, str) or not is_file(reference):
        return section
    found = str(as_path(reference, base=base, file=place[0], key=place[1]).absolute())
    find_schedule(found, file=place[0], key=place[1])
    return {**section, "schedule": found}


def _cluster(reference: object, base: Path | None, file: object, changes: Mapping[str, Any], by: str) -> ClusterSpec:
    """The cluster that the workload names; a file of one node says what nodes are, not how many the job has."""
    if isinstance(reference, ClusterSpec):
        return reference
    written_in = by if "cluster" in changes or "cluster.name" in changes else file
    data, cluster_file, over = cluster_data(reference, base=base, file=written_in, key="cluster")
    if cluster_file is not None and "nodes" not in over and data.get("nodes") == 1:
        del data["nodes"]

    def origin(key: str) -> tuple[object, str]:
        here = f"cluster.{key}"
        if _under(here, changes):
            return by, here
        inside: Any = over
        for part in key.replace("[", ".").split("."):
            inside = inside.get(part) if isinstance(inside, Mapping) else None
            if isinstance(inside, list):
                break
        return (file, here) if cluster_file is None or inside is not None else (cluster_file, key)

    return validated(ClusterSpec, data, file, place=origin)


def _only_in(key: str, changes: Mapping[str, Any], written: Any) -> bool:
    """Return whether ``key`` is a section that only ``changes`` have, not the ``written`` data."""
    if not any(changed.startswith(f"{key}.") for changed in changes):
        return False
    for part in key.split("."):
        if not isinstance(written, Mapping) or part not in written:
            return True
        written = written[part]
    return False


def written_in(source: object, changes: Mapping[str, Any], by: str = "--set") -> PlaceOfKey:
    """Return the place of the keys of a loaded workload: its ``source``, or ``changes``."""
    return lambda key: (by if _under(key, changes) else source, key)


def _under(key: str, changes: Mapping[str, Any]) -> bool:
    return any(key == changed or key.startswith((f"{changed}.", f"{changed}[")) for changed in changes)

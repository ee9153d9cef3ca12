"""Workload files: read, completed with the defaults that lie across sections, and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, cast

from simulator.config import catalog, rules
from simulator.config.captured_file import read_captured
from simulator.config.cluster import cluster_data
from simulator.config.misplaced_file import SCHEDULE, expecting, read_workload, refuse_misplaced
from simulator.config.optimizer_choices import usual_library, usual_state_dtype
from simulator.config.parallelism import with_split
from simulator.config.pipelines import find_schedule, is_file
from simulator.config.presets import config_path, expand_model, inherited_keys
from simulator.config.profile import (
    check_attention,
    check_gpu,
    check_one_vendor,
    check_precision,
    check_recipe,
    check_steps,
    check_tf32,
    check_updater,
    load_profile,
)
from simulator.config.section import Section, as_data
from simulator.config.stack import check_stack, load_stack
from simulator.config.tried_fixes import keep_what_works
from simulator.config.validation import validated
from simulator.config.workload import Workload
from simulator.errors import InputError, PlaceOfKey, amended, each, located, nearest_names, raise_all
from simulator.frameworks import FRAMEWORKS
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.hardware.profile import Profile
from simulator.input_files import as_path, brief, with_changes
from simulator.optimizers import OPTIMIZERS
from simulator.precisions import FP8_RECIPES
from simulator.schedules import SCHEDULES

#: Dotted path of a section -> the key of it that a plain text in its place means.
SHORTHANDS = {"cluster": "name", "framework": "name", "training.recompute": "granularity", "training.loss": "name"}

S = TypeVar("S", bound=Section)


def _completed(data: Mapping[str, Any], file: object, place: PlaceOfKey) -> Workload:
    """Return the workload of a file's data, with every default, and checked. Raises `InputError`."""
    workload = validated(Workload, data, file, place=place)
    with located(lambda key: place(key) if key else (file, key)):
        return complete(workload)


def complete(workload: Workload) -> Workload:
    """Return a workload whose sections are valid with the defaults that lie across them, held against all rules.

    Raises `InputError`."""
    raise_all(rules.problems(workload))
    workload = _resolved(workload)
    raise_all(rules.layout_problems(workload))
    return workload


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
    copied = workload.software.master_weights and training.trained_dtype != "fp32"
    if not copied and "master_weights" not in training.optimizer.model_fields_set:
        optimizer = training.optimizer.model_copy(update={"master_weights": False})
        training = training.model_copy(update={"optimizer": optimizer})
    workload = workload.model_copy(update={"parallelism": layout, "cluster": cluster, "training": training})
    for key, value in workload.software.defaults(workload.traits).items():
        workload = _left_open(workload, key, value)
    workload = _left_open(workload, "training.optimizer.implementation", usual_library(workload, training.optimizer))
    updater = workload.training.optimizer
    workload = _left_open(workload, "training.optimizer.state_dtype", usual_state_dtype(workload, updater))
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


def _calibrations(
    calibration: str | dict[str, str], rank_types: tuple[str, ...], types: tuple[str, ...]
) -> str | dict[str, str]:
    """Return the profile of the cluster's type of GPU, or of every one of several ``types``.

    ``rank_types``: those that ranks are on. Raises `InputError` where types are unknown, or one profile is given for
    several."""
    if isinstance(calibration, str):
        if calibration and len(rank_types) > 1:
            raise InputError(
                "the ranks are on several types of GPU, each with a profile of its own",
                key="calibration",
                found=calibration,
                allowed=f"a mapping with keys {', '.join(rank_types)}",
            )
        calibration = dict.fromkeys(rank_types, calibration) if calibration else {}
    for gpu in calibration:
        if gpu not in types:
            allowed = ", ".join(types)
            raise InputError(
                "the cluster has no such GPU", key=f"calibration.{gpu}", found=calibration[gpu], allowed=allowed
            )
    return calibration.get(types[0], types[0]) if len(types) == 1 else {gpu: calibration.get(gpu, gpu) for gpu in types}


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_workload(
    source: str | Path | Mapping[str, Any] | Workload, set: Mapping[str, Any] = _NOTHING, *, by: str = "--set"
) -> Workload:
    """Return a workload by shipped name, by path, or from a mapping such as the file holds.

    ``set`` changes dotted keys first.

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
        data, base = read_workload(file), file.parent
    written = data
    data = {key: value for key, value in with_changes(data, set, SHORTHANDS, by).items() if value is not None}

    def origin(key: str) -> tuple[object, str]:
        return (by if _under(key, set) or _only_in(key, set, written) else file), key

    data.setdefault("name", file.stem if file else "workload")
    section, refused = data.get("model"), dict[str, InputError]()
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
    if lost := _lost_nodes(written, data, set):
        data["cluster"] = replace(data["cluster"], assumed=(*data["cluster"].assumed, lost))
    _fill_from_capture(data)
    with amended(lambda error: keep_what_works(error, partial(_tried, data))):
        workload = _completed(data, file, origin)
    if isinstance(section, Mapping):
        model = workload.model.inheriting(inherited_keys(section, data["model"]), config_path(section, base))
        workload = workload.model_copy(update={"model": model})
    return _with_stack(_with_profiles(workload, base, origin), base, origin)


def _lost_nodes(written: Mapping[str, Any], data: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return what to say of a number of nodes that was ``written``, where ``changes`` replace the cluster as a whole.

    Empty where nothing is lost, where the cluster of ``data`` has a number of nodes itself, or where the number of
    replicas says how many there are."""
    before, layout = written.get("cluster"), data.get("parallelism")
    nodes = before.get("nodes") if isinstance(before, Mapping) else None
    replicas = layout.get("dp") if isinstance(layout, Mapping) else None
    if nodes is None or replicas is not None or not isinstance(changes.get("cluster"), str):
        return ""
    if data["cluster"].nodes is not None:
        return ""
    return (
        f"cluster.nodes: as the job needs; cluster={changes['cluster']} replaces nodes: {nodes} too, which can be set"
    )


def _tried(data: Mapping[str, Any], changes: Mapping[str, Any]) -> Workload:
    """Return the workload of ``data`` with dotted keys changed. Raises `InputError`."""
    return _completed(with_changes(data, changes, SHORTHANDS, "fix"), None, lambda key: (None, key))


def _fill_from_capture(data: dict[str, Any]) -> None:
    """Set keys of ``data`` that are left open to what a captured model was recorded with."""
    model = data.get("model")
    if not isinstance(model, Mapping) or not model.get("captured"):
        return
    captured = read_captured(model["captured"])
    for section, keys in (("training", captured.recorded), ("parallelism", {"sequence_parallel": False})):
        if isinstance(data.setdefault(section, {}), Mapping):
            data[section] = {**keys, **data[section]}
    usual = next(name for name, one in FRAMEWORKS.items() if one.runs_captured)
    section = data.setdefault("framework", usual)
    if isinstance(section, Mapping):
        data["framework"] = {"name": usual, **section}


def _refuse(data: Mapping[str, Any], refused: Mapping[str, InputError], file: object, origin: PlaceOfKey) -> NoReturn:
    """Raise `InputError` of the sections that are ``refused`` and of errors in each of the others.

    Without a cluster nothing is said of one against another."""
    left = {key: value for key, value in data.items() if key not in refused and key != "cluster"}
    if "model" in refused and isinstance(data["model"], Mapping) and data["model"].get("captured"):
        left.pop("training", None)  # which would have been filled from the captured model
    try:
        validated(Workload, left, file, place=origin)
    except InputError as error:
        errors, more = each(error)
    else:
        raise AssertionError("a workload without a cluster")
    absent = data.keys() - left.keys()
    raise_all([*refused.values(), *(one for one in errors if one.key not in absent)], more)
    raise AssertionError("a workload without errors")


def _with_profiles(workload: Workload, base: Path | None, origin: PlaceOfKey) -> Workload:
    """Return the workload with the whole paths of profiles that are not shipped. Raises `InputError` where one does not
    exist, is of another GPU or lacks the precision, and where ranks are on GPUs of several vendors."""
    calibration, profiles = workload.calibration, {}
    several = isinstance(calibration, dict)
    names = dict(calibration if isinstance(calibration, dict) else workload.calibrations)
    for gpu, name in names.items():
        if gpu not in workload.gpu_types and name == gpu:
            continue  # nobody has asked for it
        key = f"calibration.{gpu}" if several else "calibration"
        file, shipped = origin(key)[0], catalog.is_shipped("profile", name)
        try:
            path = catalog.find("profile", name, base=base, file=file, key=key)
        except InputError:
            if name != gpu:
                raise
            raise _no_such_gpu(gpu, workload.cluster, origin) from None
        profiles[gpu] = load_profile(path)
        check_gpu(profiles[gpu], gpu, file=file, key=key)
        names[gpu] = name if shipped else str(path)
    rank_profiles = {gpu: profiles[gpu] for gpu in workload.gpu_types}
    for profile in rank_profiles.values():
        check_products(profile, workload, origin)
    check_one_vendor(rank_profiles, file=origin("cluster")[0], key="cluster.groups")
    return workload.model_copy(update={"calibration": names if several else names[workload.cluster.gpu_types[0]]})


def check_products(profile: Profile, workload: Workload, origin: PlaceOfKey) -> None:
    """Raise `InputError` where a profile prices no products or attention of a kind that passes or updates have."""
    check_precision(profile, workload.training.precision, file=origin("training.precision")[0])
    check_attention(profile, workload.training.attention_kernel, file=origin("training.attention_kernel")[0])
    if not workload.training.tf32:
        check_tf32(profile, file=origin("training.tf32")[0])
    if workload.has_unfused_kernels and "transformers" in workload.software.memory_sections:
        check_steps(profile, file=origin("calibration")[0])
    if recipe := workload.training.product_recipe:
        check_recipe(profile, recipe, key=recipe.key, file=origin(recipe.key)[0])
    if (captured := workload.model.captured_model) and (scales := captured.scales_of_8_bits):
        converted = FP8_RECIPES["torchao_rowwise" if "rows" in scales else "torchao_tensorwise"]
        check_recipe(profile, converted, key="model.captured", file=origin("model.captured")[0])
    for key, updater in rules.optimizer.updaters(workload):
        check_updater(profile, OPTIMIZERS[updater.name], key=key, file=origin(key)[0])


def _no_such_gpu(gpu: str, cluster: ClusterSpec, origin: PlaceOfKey) -> InputError:
    """Return the error of a type of GPU that no profile is of, where the workload names no profile itself."""
    file, key = origin("cluster.groups" if cluster.groups else "cluster.node.gpus.type")
    shipped, words = catalog.names("profile"), gpu.lower().split("-")
    near = [name for name in shipped if set(words) <= set(name.split("-"))]
    return InputError(
        "is a type of GPU without a profile",
        file=file,
        key=key,
        found=brief(gpu),
        allowed=f"{nearest_names(gpu, shipped, 'llmsim list gpus')}; or any, with calibration: FILE",
        fix=f"type: {' or '.join(near)}" if near else None,
    )


def _with_stack(workload: Workload, base: Path | None, origin: PlaceOfKey) -> Workload:
    """Return the workload with the whole path of a stack that is not shipped. Raises `InputError` where it does not
    exist, or is of another GPU."""
    if not workload.stack:
        return workload
    file, shipped = origin("stack")[0], catalog.is_shipped("stack", workload.stack)
    path = catalog.find("stack", workload.stack, base=base, file=file, key="stack")
    for gpu in workload.gpu_types:
        check_stack(load_stack(path), gpu, file=file, key="stack")
    return workload if shipped else workload.model_copy(update={"stack": str(path)})


def altered(workload: Workload, changes: Mapping[str, Any]) -> Workload:
    """Return a copy of a loaded workload with dotted keys changed.

    Defaults that follow from other keys follow again, the layers per stage too where their number changes. Raises
    `InputError` where the copy is not legal."""
    data = {name: getattr(workload, name) for name in type(workload).model_fields}
    for name in ("model", "training", "framework", "parallelism", "simulation"):
        data[name] = data[name].model_dump(exclude_unset=True)
    data["cluster"] = as_data(workload.cluster, defaults=False)
    if "dp" not in workload.parallelism.model_fields_set:  # nor have nodes been given, from which it would follow
        data["cluster"].pop("nodes", None)
    data = with_changes(data, changes, SHORTHANDS)
    data["parallelism"] = with_split(data["parallelism"], workload.parallelism).model_dump(exclude_unset=True)
    result = load_workload(data)
    kept = [key for key in workload.model.inherited if not _under(f"model.{key}", changes)]
    return result.model_copy(update={"model": result.model.inheriting(kept, workload.model.inherited.config)})


def _with_schedule_file(section: Mapping[str, Any], base: Path | None, place: tuple[object, str]) -> Mapping[str, Any]:
    """Return the section with the whole path of a schedule's file: beside the workload, or else in the current
    directory."""
    reference = section.get("schedule")
    if not isinstance(reference, str):
        return section
    if not is_file(reference):
        if reference not in SCHEDULES:
            refuse_misplaced(as_path(reference, base=base, file=place[0], key=place[1]), f"{SCHEDULE.kind} (a .csv)")
        return section
    path = str(as_path(reference, base=base, file=place[0], key=place[1]).absolute())
    with expecting(SCHEDULE, Path(path)):
        find_schedule(path, file=place[0], key=place[1])
    return {**section, "schedule": path}


def _cluster(reference: object, base: Path | None, file: object, changes: Mapping[str, Any], by: str) -> ClusterSpec:
    """Return the cluster that the workload names; a file of one node says what nodes are, not how many the job has."""
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

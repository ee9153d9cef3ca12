"""Python entry point of a first workload file: `draft`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.config import catalog, load_workload
from simulator.drafting.job_file import job_text, layout_keys
from simulator.drafting.layouts import ProposedLayout, proposed_layout
from simulator.drafting.machines import JobMachines
from simulator.drafting.methods import METHODS, adapter_keys, framework_section, training_keys
from simulator.drafting.model_names import model_section
from simulator.errors import InputError, MissingKeyError, each
from simulator.frameworks import FRAMEWORKS
from simulator.searching.layout_search import SearchWatch
from simulator.units import counted


@dataclass(frozen=True)
class JobAnswers:
    """Answers that describe a first job.

    ``model``: a shipped name, an id of Hugging Face or a path. ``method``: one of `simulator.drafting.methods`.
    ``seq``: tokens per sequence. ``global_batch``: sequences of a step.
    """

    model: str
    machines: JobMachines
    gpus: int
    method: str
    framework: str
    seq: int
    global_batch: int


@dataclass(frozen=True)
class Draft:
    """A workload file. ``data``: its keys. ``text``: as it is written. ``layout``: what was found to fit.

    ``idle_gpus``: those of its nodes that do not train. ``without_encoder``: why the model goes without its encoder of
    images, empty where it does not.
    """

    data: Mapping[str, Any]
    text: str
    layout: ProposedLayout
    idle_gpus: int
    without_encoder: str


def draft(
    answers: JobAnswers,
    name: str,
    cluster_file: Path | None = None,
    folder: Path = Path(),
    *,
    budget_s: float = 60.0,
    jobs: int | None = None,
    watch: SearchWatch | None = None,
) -> Draft:
    """Return the workload file of a job, with a layout that fits.

    ``cluster_file``: where machines that were read from outputs of commands are to stand; the caller writes it.
    ``folder``: where the workload file will lie, from where its paths start.
    ``budget_s``, ``jobs`` and ``watch``: as of `simulator.search`. Raises `InputError` where the job cannot be, or no
    layout fits.
    """
    machines, gpus = answers.machines, answers.gpus
    spec = machines.spec(gpus)
    data: dict[str, Any] = {
        "name": name,
        "model": model_section(answers.model),
        "framework": framework_section(answers.method, answers.framework),
        "training": {"seq": answers.seq, "global_batch": answers.global_batch},
        "parallelism": {},
        "cluster": machines.unsized,
    }
    habits = FRAMEWORKS[answers.framework].habits
    if habits.begins_sharded and gpus > 1:
        data["parallelism"] |= {"zero": habits.zero[-1], "dp": gpus}
    without_encoder = _why_no_encoder(data, answers.method)
    if without_encoder:
        data["model"]["encoder"] = None
    data["training"] |= training_keys(answers.method, answers.framework, spec.gpu_types[0])
    if METHODS[answers.method].adapters:
        data["training"] |= adapter_keys(answers.method, load_workload(data).model)
    if not habits.one_stage:
        data["parallelism"] |= _counted_ends(data)
    layout = proposed_layout(data, gpus, budget_s, jobs, watch)
    sections = layout_keys(layout.changes)
    cluster = {"name": str(cluster_file)} if cluster_file else _seen_from(folder, machines.unsized, "name")
    written = {
        **data,
        "model": _seen_from(folder, data["model"], "hf_config"),
        "training": {**data["training"], **sections.get("training", {})},
        "parallelism": {**data["parallelism"], **sections.get("parallelism", {})},
        "cluster": cluster if spec.fixed_nodes else {**cluster, "nodes": spec.n_nodes},
    }
    machines_name = cluster_file.stem if cluster_file else machines.unsized["name"]
    heading = f"{name}.yaml: {answers.model} on {counted(gpus, 'GPU')} of {machines_name}, by llmsim init."
    return Draft(written, job_text(written, layout, heading), layout, spec.n_gpus - gpus, without_encoder)


def _seen_from(folder: Path, section: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a section in which a path under ``key`` starts from ``folder``; a shipped cluster is no path."""
    reference = section.get(key)
    if reference is None or (key == "name" and catalog.is_shipped("cluster", reference)):
        return dict(section)
    return {**section, key: catalog.seen_from(folder, reference)}


def _why_no_encoder(data: Mapping[str, Any], method: str) -> str:
    """Return why a model goes without its encoder of images, empty where it does not, or has none."""
    try:
        has_encoder, is_open = load_workload(data).model.encoder is not None, False
    except InputError as error:
        lacking = [one.key or "" for one in each(error)[0] if isinstance(one, MissingKeyError)]
        has_encoder = is_open = any(key.startswith("model.encoder.") for key in lacking)
    if has_encoder and METHODS[method].adapters:
        return "adapters stand in text models alone"
    return "its file leaves open how large images are (model.encoder.patches_per_image)" if is_open else ""


def _counted_ends(data: Mapping[str, Any]) -> dict[str, bool]:
    """Return that embedding and loss count as layers, as with Llama 3 405B, where stages divide only so.

    Its 126 layers are no multiple of 4, and 128 are (arXiv 2407.21783, section 3.3.2).
    """
    layers = load_workload(data).model.layers
    return {"account_for_embedding": True, "account_for_loss": True} if layers > 64 and layers % 4 == 2 else {}

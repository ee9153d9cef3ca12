"""The workload file: a model, how it is trained, how it is laid out, and the cluster that it runs on.

`load_workload` is the way in. A `Workload` is complete: presets are expanded, every default has its value, and what it
says has been checked (see `legality`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from simulator.config import catalog, legality
from simulator.config.cluster import ClusterSpec, Count, cluster_data
from simulator.config.files import AsTuple, Integral, Section, Text, raise_all, read_yaml, validated, with_changes
from simulator.config.pipelines import find_schedule, is_file
from simulator.config.presets import expand_model, presets
from simulator.config.profile import check_gpu, load_profile
from simulator.errors import InputError
from simulator.schedules import SCHEDULES
from simulator.schedules import Schedule as Plan

Size = Annotated[int, Field(ge=1, le=1_000_000_000), Integral]
Dtype = Literal["fp32", "bf16", "fp16"]
#: Dotted path of a section -> the key of it that a plain text in its place means.
SHORTHANDS = {"cluster": "name", "training.recompute": "granularity"}

if TYPE_CHECKING:
    Schedule = str
else:
    # What is registered, so that a new schedule needs no line here; or the path of a file, read when it is loaded.
    Schedule = Annotated[
        Literal[tuple(SCHEDULES)],
        WrapValidator(lambda text, known: text if isinstance(text, str) and is_file(text) else known(text)),
        WithJsonSchema({"anyOf": [{"enum": list(SCHEDULES)}, {"pattern": r"\.csv$"}], "type": "string"}),
    ]


class Model(Section):
    """A dense transformer. `preset` or `hf_config` may stand in a file for these keys; keys beside them win."""

    layers: Annotated[int, Field(ge=1, le=10_000), Integral]
    """transformer layers"""
    hidden: Size
    """width of the residual stream"""
    heads: Size
    """query heads"""
    kv_heads: Size = Field(default_factory=lambda known: known["heads"])
    """key and value heads [heads]"""
    head_dim: Size = Field(default_factory=lambda known: max(1, known["hidden"] // known["heads"]))
    """width of a head [hidden / heads]"""
    ffn_hidden: Size = Field(default_factory=lambda known: 4 * known["hidden"])
    """width inside the MLP [4 * hidden]"""
    vocab: Size
    """tokens of the vocabulary"""
    vocab_multiple: Size = 128
    """the vocabulary is padded to a multiple of this times tp [128]"""
    activation: Literal["gelu", "swiglu", "geglu", "relu"] = "gelu"
    """of the MLP; swiglu and geglu have a third matrix [gelu]"""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """[layernorm]"""
    position: Literal["learned", "rope", "none"] = "learned"
    """position embedding [learned]"""
    bias: bool = True
    """whether linear layers have biases [true]"""
    tied_embeddings: bool = True
    """whether the vocabulary projection shares the embedding's weight [true]"""
    attention: Literal["flash", "unfused"] = "flash"
    """one fused kernel, or batched products with the s x s scores in memory [flash]"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """probability, of attention and of both residual branches [0]"""

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding table: `vocab`, padded once to a multiple of `vocab_multiple` * tp.

        >>> sizes = dict(layers=1, hidden=8, heads=1)
        >>> Model(vocab=151552, **sizes).padded_vocab(6), Model(vocab=32000, **sizes).padded_vocab(2)
        (152064, 32000)
        """
        multiple = self.vocab_multiple * tp
        return math.ceil(self.vocab / multiple) * multiple

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of what stands in a file, where a preset or a config.json can give the sizes."""
        schema = handler.resolve_ref_schema(handler(core))
        sizes = schema.pop("required")
        schema["properties"] |= {
            "preset": {"enum": list(presets()), "description": "a shipped model"},
            "hf_config": {"type": "string", "description": "path of a Hugging Face config.json"},
        }
        schema["oneOf"] = [{"required": ["preset"]}, {"required": ["hf_config"]}, {"required": sizes}]
        schema["oneOf"][2] |= {"not": {"anyOf": schema["oneOf"][:2]}}
        return schema


class Optimizer(Section):
    """What updates the weights."""

    name: Literal["adamw", "adam"] = "adamw"
    """[adamw]"""
    master_weights: bool = True
    """an fp32 copy of 16-bit weights [true; false where precision is fp32]"""
    state_dtype: Dtype = "fp32"
    """of both moments [fp32]"""


class Recompute(Section):
    """Which activations are computed again in the backward pass. A plain text means `granularity`."""

    granularity: Literal["none", "selective", "full"] = "none"
    """selective: what lies between the attention's two products; full: whole layers [none]"""
    layers: Size | None = None
    """full: only the first so many layers of each stage [null: all]"""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, data: object) -> object:
        return {SHORTHANDS["training.recompute"]: data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of what stands in a file, where a plain text may stand for the section."""
        schema = handler.resolve_ref_schema(handler(core))
        mapping = dict(schema)
        schema.clear()
        schema["anyOf"] = [{"enum": mapping["properties"]["granularity"]["enum"]}, mapping]
        return schema


class Training(Section):
    """How the model is trained."""

    seq: Size
    """tokens per sequence"""
    micro_batch: Size = 1
    """sequences per micro-batch per data-parallel replica [1]"""
    global_batch: Size
    """sequences per step; micro-batches = global_batch / (micro_batch * dp)"""
    precision: Dtype = "bf16"
    """of weights and activations [bf16]"""
    optimizer: Optimizer = Optimizer()
    grad_dtype: Dtype = "fp32"
    """what gradients are accumulated and reduced in [fp32]"""
    grad_clip: float | None = Field(default=None, gt=0)
    """norm clipping: a small all-reduce over all model-parallel ranks [null: none]"""
    recompute: Recompute = Recompute()
    """none, selective, full, or {granularity, layers} [none]"""
    implementation: Literal["eager", "fused", "compiled"] = "fused"
    """eager: plain PyTorch ops; fused: as Megatron and TransformerEngine; compiled: torch.compile [fused]"""
    gradient_accumulation_fusion: bool = Field(default_factory=lambda known: known["implementation"] == "fused")
    """the product that makes a weight gradient adds it to the buffer, as Megatron-LM does with Apex of March 2022 and
    later; false: one more pass over the gradients per micro-batch [true where implementation is fused]"""
    total_tokens: float | None = Field(default=None, gt=0, le=1e18)
    """of the whole run; gives days, GPU-hours and, with a price, cost [null]"""


class Overlap(Section):
    """Which communication runs beside compute."""

    grad_reduce: bool = True
    """gradients reduce while the backward pass goes on [true]"""
    param_gather: bool = True
    """zero 1: parameters gather while the next forward pass begins [true]"""
    p2p: bool = True
    """pipeline sends and receives run beside compute; false: a stage waits for them [true]"""


class Parallelism(Section):
    """The layout."""

    tp: Count = 1
    """tensor parallelism [1]"""
    pp: Count = 1
    """pipeline parallelism [1]"""
    dp: Count = 1
    """data parallelism [GPUs of the cluster / (tp * pp) where its nodes are given, else 1]"""
    sequence_parallel: bool = Field(default_factory=lambda known: known["tp"] > 1)
    """norms, dropout and residuals split over tp along the sequence [true when tp > 1]"""
    vocab_parallel: bool = True
    """embedding, projection and loss split over tp; false: each tp rank does all of it [true]"""
    schedule: Schedule = "1f1b"
    """a name, or the path of a schedule as CSV in the text form of torch.distributed.pipelining [1f1b]"""
    vpp: Count = Field(default_factory=lambda known: _chunks(known))
    """model chunks per pipeline rank [1; 2 for schedules with a V of stages]"""
    layers_per_stage: Annotated[tuple[Annotated[int, Field(ge=1), Integral], ...], AsTuple] = ()
    """transformer layers of each of the pp * vpp model stages, in the model's order [even split]"""
    zero: Annotated[int, Field(ge=0, le=1), Integral] = 0
    """1: the optimizer state is sharded over dp [0]"""
    overlap: Overlap = Overlap()
    bucket_bytes: Annotated[int, Field(ge=1, le=10**15), Integral] = 25_000_000
    """gradients are reduced in buckets of about this size [25e6]"""
    scatter_gather_p2p: bool = False
    """without sequence parallelism, each tp rank sends 1/tp of the activation to the next stage, which all-gathers it
    (arXiv 2104.04473, section 4.1) [false]"""
    rank_order: str = "tp-cp-ep-dp-pp"
    """axes of the rank grid, innermost first; cp and ep have size 1 and may be left out [tp-cp-ep-dp-pp]"""
    collective_algorithm: Literal["auto", "ring", "tree"] = "auto"
    """of all-reduces; auto takes the fastest on an idle network, as NCCL does [auto]"""

    @property
    def plan(self) -> Plan:
        """The pipeline schedule."""
        return find_schedule(self.schedule)

    @property
    def n_stages(self) -> int:
        """Stages of the model."""
        return self.pp * self.vpp

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages on a pipeline rank; those of a second copy of the model are numbered from ``n_stages`` on."""
        plan = self.plan
        stages = range(self.n_stages * plan.copies)
        return tuple(stage for stage in stages if plan.rank_of(stage, self.pp) == pipeline_rank)

    @property
    def ends(self) -> tuple[int, int]:
        """The pipeline ranks of the first and the last stage."""
        return self.plan.rank_of(0, self.pp), self.plan.rank_of(self.n_stages - 1, self.pp)

    @property
    def table_in_place(self) -> bool:
        """Whether the rank of the last stage also holds a first stage, so that tied embeddings are one table there."""
        return any(stage % self.n_stages == 0 for stage in self.stages_of(self.ends[1]))


def _chunks(known: dict[str, Any]) -> int:
    """Chunks per rank where the schedule leaves no choice."""
    return (find_schedule(known["schedule"]).chunks or 1) if "schedule" in known else 1


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
    model: Model
    training: Training
    parallelism: Parallelism = Parallelism()
    cluster: ClusterSpec
    """a name in topologies/, a path, or a mapping; {name: dgx_a100, nodes: 128} also fixes the size
    [nodes: the fewest that hold the ranks]"""
    calibration: str = ""
    """a profile's name or path [the shipped profile of the cluster's GPU]"""
    simulation: Simulation = Simulation()

    @property
    def n_ranks(self) -> int:
        return self.parallelism.tp * self.parallelism.pp * self.parallelism.dp

    @property
    def microbatches(self) -> int:
        """Micro-batches of one step, per data-parallel replica."""
        return self.training.global_batch // (self.training.micro_batch * self.parallelism.dp)

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, data: Any, handler: ModelWrapValidatorHandler[Workload]) -> Workload:
        """Fill in the defaults that lie across sections, and check. Raises `InputError`."""
        workload = handler(data)
        raise_all(legality.model_problems(workload))
        workload = _resolved(workload)
        raise_all(legality.layout_problems(workload))
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
    if "dp" not in layout.model_fields_set and "nodes" in cluster.model_fields_set:
        layout = layout.model_copy(update={"dp": legality.replicas(layout, cluster)})
    if not layout.layers_per_stage:
        layout = layout.model_copy(update={"layers_per_stage": legality.even_split(workload.model.layers, layout)})
    ranks = layout.tp * layout.pp * layout.dp
    legality.check_scale(ranks)
    if "nodes" not in cluster.model_fields_set:
        cluster = cluster.model_copy(update={"nodes": math.ceil(ranks / cluster.node.gpus.count)})
    if training.precision == "fp32" and "master_weights" not in training.optimizer.model_fields_set:
        optimizer = training.optimizer.model_copy(update={"master_weights": False})
        training = training.model_copy(update={"optimizer": optimizer})
    update = {
        "parallelism": layout,
        "cluster": cluster,
        "training": training,
        "calibration": workload.calibration or cluster.node.gpus.type,
    }
    return workload.model_copy(update=update)


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_workload(source: str | Path | Mapping[str, Any] | Workload, set: Mapping[str, Any] = _NOTHING) -> Workload:
    """A workload by shipped name, by path, or from a mapping such as the file holds; ``set`` changes dotted keys first.

    A `Workload` is returned as it is.
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
    data = {key: value for key, value in with_changes(data, set, SHORTHANDS).items() if value is not None}

    def origin(key: str) -> tuple[object, str]:
        return ("--set" if _under(key, set) or _only_in(key, set, written) else file), key

    if isinstance(data.get("model"), Mapping):
        data["model"] = expand_model(data["model"], base=base, origin=origin)
    if "cluster" in data:
        data["cluster"] = _cluster(data["cluster"], base, file, set)
    if isinstance(data.get("parallelism"), Mapping):
        data["parallelism"] = _with_schedule_file(data["parallelism"], base, origin("parallelism.schedule"))
    data.setdefault("name", file.stem if file else "workload")
    workload = validated(Workload, data, file, origin=origin)
    profile = catalog.find("profile", workload.calibration, base=base, file=origin("calibration")[0], key="calibration")
    gpu = workload.cluster.node.gpus.type
    if workload.calibration != gpu or workload.calibration not in catalog.names("profile"):  # else of that very GPU
        check_gpu(load_profile(profile), gpu, file=origin("calibration")[0], key="calibration")
    if workload.calibration not in catalog.names("profile"):
        workload = workload.model_copy(update={"calibration": str(profile)})
    return workload


def altered(workload: Workload, changes: Mapping[str, Any]) -> Workload:
    """A copy of a loaded workload with dotted keys changed; defaults that follow from other keys follow again, the
    layers per stage too where their number changes. Raises `InputError` where the copy is not legal."""
    data = {name: getattr(workload, name) for name in type(workload).model_fields}
    for name in ("model", "training", "parallelism", "cluster", "simulation"):
        data[name] = data[name].model_dump(exclude_unset=True)
    data = with_changes(data, changes, SHORTHANDS)
    stages = len(workload.parallelism.layers_per_stage)
    if data["parallelism"].get("pp", 1) * data["parallelism"].get("vpp", 1) != stages:
        data["parallelism"].pop("layers_per_stage", None)
    return load_workload(data)


def _with_schedule_file(section: Mapping[str, Any], base: Path | None, place: tuple[object, str]) -> Mapping[str, Any]:
    """With the whole path of a schedule's file: beside the workload, or else in the current directory."""
    reference = section.get("schedule")
    if not isinstance(reference, str) or not is_file(reference):
        return section
    path = Path(reference).expanduser()
    beside = base / path if base else path
    found = str((beside if beside.exists() else path).absolute())
    find_schedule(found, file=place[0], key=place[1])
    return {**section, "schedule": found}


def _cluster(reference: object, base: Path | None, file: object, changes: Mapping[str, Any]) -> ClusterSpec:
    """The cluster that the workload names; its own file's number of nodes does not count, only the workload's."""
    if isinstance(reference, ClusterSpec):
        return reference
    written_in = "--set" if "cluster" in changes or "cluster.name" in changes else file
    data, cluster_file, over = cluster_data(reference, base=base, file=written_in, key="cluster")
    if cluster_file is not None and "nodes" not in over:
        data.pop("nodes", None)

    def origin(key: str) -> tuple[object, str]:
        here = f"cluster.{key}"
        if _under(here, changes):
            return "--set", here
        inside: Any = over
        for part in key.replace("[", ".").split("."):
            inside = inside.get(part) if isinstance(inside, Mapping) else None
            if isinstance(inside, list):
                break
        return (file, here) if cluster_file is None or inside is not None else (cluster_file, key)

    return validated(ClusterSpec, data, file, origin=origin)


def _only_in(key: str, changes: Mapping[str, Any], written: Any) -> bool:
    """Whether ``key`` is a section that is made by ``changes`` and is not ``written``."""
    if not any(changed.startswith(f"{key}.") for changed in changes):
        return False
    for part in key.split("."):
        if not isinstance(written, Mapping) or part not in written:
            return True
        written = written[part]
    return False


def _under(key: str, changes: Mapping[str, Any]) -> bool:
    return any(key == changed or key.startswith((f"{changed}.", f"{changed}[")) for changed in changes)

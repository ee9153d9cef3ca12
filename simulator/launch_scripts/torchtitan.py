"""torchtitan's job files in TOML (`torchtitan/config/job_config.py` names their keys)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from simulator.errors import InputError
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened, words_of

FORMAT = "torchtitan job"
_NEUTRAL_PREFIXES = (
    "job.",
    "profiling.",
    "metrics.",
    "checkpoint.",
    "lr_scheduler.",
    "dataset.",
    "validation.",
    "comm.",
)
_NEUTRAL = frozenset(
    [
        "model.tokenizer_path",
        "model.hf_assets_path",
        "training.dataset",
        "training.dataset_path",
        "training.seed",
        "training.warmup_steps",
        "optimizer.lr",
        "optimizer.eps",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.weight_decay",
    ]
)
#: ``recipe_name`` -> ours.
_FP8_RECIPES = {"tensorwise": "torchao_tensorwise", "rowwise": "torchao_rowwise"}
#: Classes of torch.distributed.pipelining, in small letters -> ours.
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb_v"}


def read(text: str, path: Path) -> LaunchScript:
    """Return the job of a file. Raises `InputError` where it is no TOML, or no job."""
    try:
        options = flattened(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", file=path) from None
    reading = ScriptReading(FORMAT, path, options)
    reading.workload["framework"] = {"name": "torchtitan"}
    compiled = reading.first_on("compile.enable", "training.compile")
    written = compiled or next((one for one in ("compile.enable", "training.compile") if one in options), None)
    if written is not None:
        reading.put("framework.compile", compiled is not None, written)
        components = reading.look("compile.components")
        if compiled is None or (isinstance(components, list) and {*components} == {"model", "loss"}):
            reading.leave("compile.components")
    else:
        reading.assume("framework.compile", False, "torchtitan's default of compile.enable")
    if hint := re.search(r"^[ \t]*#.*?(\d+)\s+(?:[A-Z]\w+\s+)?GPUs", text, flags=re.MULTILINE):
        reading.gpus = int(hint[1])
        reading.assumed.append(f"GPUs: {hint[1]}, as a comment of the file says")
    name, flavor = reading.look("model.name"), reading.look("model.flavor")
    if name and flavor:
        put_model(reading, f"{name}-{flavor}", "model.name", "model.flavor")
    reading.leave_where("model.norm_type", "rmsnorm")
    _batch(reading)
    _precision(reading)
    _recompute(reading)
    _optimizer(reading)
    _degrees(reading)
    _loss(reading)
    _sharding(reading)
    _schedule(reading)
    reading.sort_rest(_NEUTRAL, _NEUTRAL_PREFIXES)
    return reading.script


def _loss(reading: ScriptReading) -> None:
    """Put the loss of all logits on each rank; a compiled one is left alone, which is not simulated so."""
    option = reading.first_on(*_older("disable_loss_parallel"))
    split = reading.workload.get("parallelism", {}).get("tp", 1) > 1
    if option is not None and split and not reading.workload["framework"].get("compile"):
        reading.put("training.loss", "eager", option)


def _batch(reading: ScriptReading) -> None:
    reading.take("training.seq_len", "training.seq")
    option, local = reading.first_number("training.local_batch_size", "training.batch_size")
    if local:
        pipelined = (_degree(reading, "pipeline_parallel_degree")[1] or 1) > 1
        split, size = reading.first_number(*_older("pipeline_parallel_microbatch_size"))
        if not pipelined:
            reading.put("training.micro_batch", local, option)
            reading.leave(split)
            reading.accumulation = 1
        else:
            reading.put("training.micro_batch", size or 1, *([split] if size else []))
            reading.accumulation = local // (size or 1)
            reading.understand(option, "micro-batches of a step", reading.accumulation)
    total = reading.number("training.global_batch_size")
    if total is not None and total > 0:
        reading.put("training.global_batch", total, "training.global_batch_size")
    reading.leave_where("training.global_batch_size", "-1")
    reading.take_steps("training.steps")


def _precision(reading: ScriptReading) -> None:
    parameter = "training.mixed_precision_param"
    dtype = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}.get(str(reading.look(parameter)))
    if dtype is not None:
        reading.put("training.precision", dtype, parameter)
    else:
        reading.assume("training.precision", "bf16", "torchtitan's default of mixed_precision_param")
    converters = words_of(reading.look("model.converters"))
    switch = "model.converters" if any(word.endswith("float8") for word in converters) else None
    switch = switch or reading.first_on("float8.enable_float8_linear", "training.enable_float8_linear")
    if switch is not None:
        _eight_bits(reading, switch)


def _eight_bits(reading: ScriptReading, switch: str) -> None:
    """Put torchao's recipe of products in 8 bits, with one scale for a tensor unless the file names another."""
    sections = ("float8", "quantize.linear.float8")
    option, recipe = reading.first_of(*(f"{section}.recipe_name" for section in sections))
    name = _FP8_RECIPES.get(str(recipe or "tensorwise"))
    if name is None:
        reading.ignore(switch, f"its recipe is none of {', '.join(_FP8_RECIPES)}")
        return
    gathers = reading.first_on(*(f"{section}.enable_fsdp_float8_all_gather" for section in sections))
    if name != "torchao_tensorwise":  # torchao gathers in 8 bits with one scale for a tensor alone
        gathers = None
    options = [switch, *([option] if recipe else []), *([gathers] if gathers else [])]
    reading.put("training.fp8", {"recipe": name, "gather": "fp8"} if gathers else name, *options)
    for section in sections:
        filters = reading.look(f"{section}.filter_fqns")
        if filters in (["output"], "output", []):  # the projection to the vocabulary stays in the precision
            reading.leave(f"{section}.filter_fqns")


def _recompute(reading: ScriptReading) -> None:
    option, mode = reading.first_of("activation_checkpoint.mode")
    select, kind = reading.first_of("activation_checkpoint.selective_ac_option")
    if mode in ("full", "none"):
        reading.put("training.recompute", mode, option)
        reading.leave(select)
    elif mode == "selective" and kind == "op":
        reading.put("training.recompute", "ops", option, select)
    elif str(kind) == "1":
        reading.put("training.recompute", "full", select, *([option] if mode else []))
    else:
        reading.assume("training.recompute", "ops", f"the nearest to one whole layer of every {kind or 2}")


def _optimizer(reading: ScriptReading) -> None:
    norm = reading.fraction("training.max_norm")
    if norm is None:
        reading.assume("training.grad_clip", 1.0, "torchtitan's default of max_norm")
    else:
        reading.put("training.grad_clip", norm if norm > 0 else None, "training.max_norm")
    name = str(reading.look("optimizer.name", "")).lower()
    if name in ("adam", "adamw"):
        reading.put("training.optimizer.name", name, "optimizer.name")
    option, implementation = reading.first_of("optimizer.implementation")
    text = str(implementation).replace("-", "_")
    if text in ("foreach", "fused", "for_loop"):
        reading.put("training.optimizer.implementation", text, option)
    elif implementation is None and reading.flag("optimizer.fused"):
        reading.put("training.optimizer.implementation", "fused", "optimizer.fused")


def _older(name: str) -> tuple[str, ...]:
    """Return the options that a key of parallelism has had, which older files have under other sections."""
    return tuple(f"{section}.{name}" for section in ("parallelism", "training", "experimental"))


def _degree(reading: ScriptReading, name: str) -> tuple[str, int | None]:
    return reading.first_number(*_older(name))


def _degrees(reading: ScriptReading) -> None:
    for name, key in (
        ("tensor_parallel_degree", "tp"),
        ("pipeline_parallel_degree", "pp"),
        ("context_parallel_degree", "cp"),
        ("expert_parallel_degree", "ep"),
    ):
        option, degree = _degree(reading, name)
        if degree is not None:
            reading.put(f"parallelism.{key}", degree, option)


def _sharding(reading: ScriptReading) -> None:
    each, replicas = _degree(reading, "data_parallel_replicate_degree")
    option, shards = reading.first_number(*_older("data_parallel_shard_degree"), *_older("data_parallel_degree"))
    if replicas is not None and replicas > 1 and shards in (None, -1):
        reading.copies = replicas
        reading.understand(each, "copies of the sharded model", replicas)
        if shards is None:
            reading.assumed.append("shards: as many as GPUs allow, torchtitan's default of data_parallel_shard_degree")
        else:
            reading.understand(option, "shards", "as many as GPUs allow")
        return
    zero = 0 if shards == 1 else 3
    if shards is None:
        reading.assume("parallelism.zero", zero, "torchtitan's default of data_parallel_shard_degree")
    else:
        reading.put("parallelism.zero", zero, option)
    if replicas == 1:
        reading.leave(each)
    elif replicas is not None and replicas > 1 and shards == 1:
        reading.put("parallelism.dp", replicas, each)
    elif replicas is not None and replicas > 1 and shards is not None and shards > 1:
        reading.put("parallelism.hsdp", shards, option)
        reading.put("parallelism.dp", replicas * shards, each)


def _schedule(reading: ScriptReading) -> None:
    option, schedule = reading.first_of(*_older("pipeline_parallel_schedule"))
    if reading.workload.get("parallelism", {}).get("pp", 1) == 1:
        reading.leave(option)
    elif name := _SCHEDULES.get(str(schedule).lower()):
        reading.put("parallelism.schedule", name, option)

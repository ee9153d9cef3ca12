"""torchtitan's job files in TOML (`torchtitan/config/job_config.py` names their keys)."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from simulator.errors import InputError
from simulator.launch_scripts.models import put_model
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened

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
        "training.steps",
        "training.dataset",
        "training.dataset_path",
        "training.seed",
        "training.warmup_steps",
        "optimizer.lr",
        "optimizer.eps",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.weight_decay",
        "model.norm_type",
    ]
)


def read(text: str, path: Path) -> LaunchScript:
    """Return the job of a file. Raises `InputError` where it is no TOML, or no job."""
    try:
        options = flattened(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"is not TOML: {error}", file=path) from None
    reading = ScriptReading(FORMAT, path, options)
    reading.workload["framework"] = {"name": "torchtitan"}
    compiled = reading.flag("training.compile") or reading.flag("compile.enable")
    reading.put("framework.compile", compiled, "compile")
    if hint := re.search(r"(\d+)\s+(?:[A-Z]\w+\s+)?GPUs", text):
        reading.gpus = int(hint[1])
        reading.assumed.append(f"GPUs: {hint[1]}, as a comment of the file says")
    name, flavor = reading.get("model.name"), reading.get("model.flavor")
    if name and flavor:
        put_model(reading, "model", f"{name}-{flavor}")
    _training(reading)
    _parallelism(reading)
    reading.sort_rest(_NEUTRAL, _NEUTRAL_PREFIXES)
    return reading.script


def _training(reading: ScriptReading) -> None:
    reading.take("training.seq_len", "training.seq")
    local = reading.number("training.local_batch_size") or reading.number("training.batch_size")
    total = reading.number("training.global_batch_size")
    if local:
        option = "batch_size" if "training.batch_size" in reading.options else "local_batch_size"
        microbatch = reading.number("parallelism.pipeline_parallel_microbatch_size")
        pipelined = (_degree(reading, "pipeline_parallel_degree") or 1) > 1
        reading.put("training.micro_batch", (microbatch or 1) if pipelined else local, f"training.{option}")
        reading.accumulation = local // (microbatch or 1) if pipelined else 1
    if total and total > 0:
        reading.put("training.global_batch", total, "training.global_batch_size")
    norm = reading.get("training.max_norm")
    reading.put("training.grad_clip", float(norm if norm is not None else 1.0), "training.max_norm")
    converters = str(reading.get("model.converters", ""))
    eight = "float8" in converters or reading.flag("float8.enable_float8_linear")
    if eight or "mx" in converters:
        reading.put("training.precision", "fp8", "model.converters")
    else:
        dtype = {"float32": "fp32", "float16": "fp16"}.get(str(reading.get("training.mixed_precision_param")), "bf16")
        if "training.mixed_precision_param" in reading.options:
            reading.put("training.precision", dtype, "training.mixed_precision_param")
        else:
            reading.assume("training.precision", dtype, "torchtitan's default of mixed_precision_param")
    mode = reading.get("activation_checkpoint.mode", "selective")
    kind = str(reading.get("activation_checkpoint.selective_ac_option", "2"))
    recompute = {"full": "full", "none": "none"}.get(str(mode), "ops")
    if recompute == "ops" and kind != "op":
        reading.assume("training.recompute", "ops", f"the nearest to every {kind}nd layer whole")
    else:
        reading.put("training.recompute", recompute, "activation_checkpoint.mode")
    if name := reading.get("optimizer.name"):
        reading.put("training.optimizer.name", str(name).lower(), "optimizer.name")
    implementation = reading.get("optimizer.implementation") or ("fused" if reading.flag("optimizer.fused") else None)
    if implementation:
        reading.put("training.optimizer.implementation", str(implementation).replace("-", "_"), "optimizer")


def _degree(reading: ScriptReading, name: str) -> int | None:
    """Return a degree, which older files have under other sections."""
    degrees = [reading.number(f"{section}.{name}") for section in ("parallelism", "training", "experimental")]
    return next((degree for degree in degrees if degree is not None), None)


def _parallelism(reading: ScriptReading) -> None:
    for name, key in (
        ("tensor_parallel_degree", "tp"),
        ("pipeline_parallel_degree", "pp"),
        ("context_parallel_degree", "cp"),
        ("expert_parallel_degree", "ep"),
    ):
        if (degree := _degree(reading, name)) is not None:
            reading.put(f"parallelism.{key}", degree, name)
    replicas = _degree(reading, "data_parallel_replicate_degree") or 1
    shards = _degree(reading, "data_parallel_shard_degree")
    _degree(reading, "data_parallel_degree")
    if shards == 1:
        reading.put("parallelism.zero", 0, "data_parallel_shard_degree")
    else:
        reading.put("parallelism.zero", 3, "data_parallel_shard_degree")
    if replicas > 1 and shards and shards > 1:
        reading.put("parallelism.hsdp", shards, "data_parallel_shard_degree")
        reading.put("parallelism.dp", replicas * shards, "data_parallel_replicate_degree")
    asynchronous = any(
        reading.flag(f"{section}.enable_async_tensor_parallel") for section in ("parallelism", "experimental")
    )
    if asynchronous:
        reading.ignored.append("enable_async_tensor_parallel")
    schedule = reading.get("parallelism.pipeline_parallel_schedule") or reading.get(
        "experimental.pipeline_parallel_schedule"
    )
    if schedule and reading.workload["parallelism"].get("pp", 1) > 1:
        names = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb_v"}
        ours = names.get(str(schedule).lower())
        if ours:
            reading.put("parallelism.schedule", ours, "pipeline_parallel_schedule")
        else:
            reading.ignored.append(f"pipeline_parallel_schedule {schedule}")

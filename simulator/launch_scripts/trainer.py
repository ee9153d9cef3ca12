"""Arguments of Hugging Face's `Trainer` that several launchers share, and files that they name."""

from __future__ import annotations

from typing import Any

from simulator.errors import InputError
from simulator.input_files import read_json, read_yaml
from simulator.launch_scripts import deepspeed
from simulator.launch_scripts.script import ScriptReading, UnderstoodOption, flattened

#: Options that change neither time nor memory of a step, or by less than is simulated.
NEUTRAL = frozenset(
    [
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "bf16_full_eval",
        "ddp_timeout",
        "do_eval",
        "do_train",
        "eval_strategy",
        "evaluation_strategy",
        "group_by_length",
        "greater_is_better",
        "hub_model_id",
        "label_smoothing",
        "learning_rate",
        "logging_strategy",
        "lr_scheduler",
        "lr_scheduler_type",
        "max_samples",
        "num_epochs",
        "num_train_epochs",
        "output_dir",
        "overwrite_cache",
        "overwrite_output_dir",
        "plot_loss",
        "push_to_hub",
        "report_to",
        "remove_unused_columns",
        "resume_from_checkpoint",
        "run_name",
        "save_strategy",
        "save_steps",
        "seed",
        "special_tokens",
        "strict",
        "template",
        "tokenizer_name",
        "trust_remote_code",
        "val_set_size",
        "weight_decay",
        "debug",
    ]
)
NEUTRAL_PREFIXES = (
    "chat_template", "comet", "data", "ddp_", "early_stopping", "eval", "gradient_checkpointing_kwargs", "hub_",
    "load_best", "logging", "lora_alpha", "lora_fan", "lora_model_dir", "loraplus", "lr_", "metric_for",
    "mlflow", "per_device_eval", "preprocessing", "save", "special_tokens", "tokenizer", "train_on", "wandb", "warmup",
)  # fmt: skip
#: PEFT's names of products -> ours.
_TARGETS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_EVERY = ["q", "k", "v", "o", "gate", "up", "down"]
_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion": "lion",
    "muon": "muon",
}


def put_precision(reading: ScriptReading, *, unsaid: str) -> None:
    """Put bf16, fp16 or what stands for it where the script says neither."""
    for dtype in ("bf16", "fp16"):
        value = reading.get(dtype)
        if str(value).lower() in ("true", "auto", "full", "1", "yes"):
            reading.put("training.precision", dtype, dtype)
            reading.used |= {"bf16", "fp16"}
            return
    reading.assume("training.precision", unsaid, "neither bf16 nor fp16 is said")


def put_batch(reading: ScriptReading, micro: str, accumulation: str) -> None:
    """Put the micro-batch, and how many a step has."""
    reading.take(micro, "training.micro_batch")
    steps = reading.number(accumulation)
    if steps is not None:
        reading.accumulation = steps
        reading.understood.append(UnderstoodOption(accumulation, "micro-batches of a step", steps))
    elif reading.accumulation is None:
        reading.accumulation = 1
        reading.assumed.append(f"{accumulation}: 1, its default")


def put_optimizer(reading: ScriptReading, option: str) -> None:
    """Put the optimizer by transformers' name of it, such as adamw_torch_fused."""
    value = reading.get(option)
    if value is None:
        return
    name = str(value).lower()
    family = next((ours for theirs, ours in _OPTIMIZERS.items() if name.startswith(theirs)), None)
    if family is None or any(word in name for word in ("8bit", "4bit", "paged", "anyprecision")):
        reading.ignored.append(f"{option} {value}")
        return
    reading.put("training.optimizer.name", family, option)
    if family == "adamw" and "fused" in name:
        reading.put("training.optimizer.implementation", "fused", option)


def put_clipping(reading: ScriptReading, option: str = "max_grad_norm") -> None:
    """Put the norm to which gradients are clipped; transformers' default is 1."""
    norm = reading.get(option)
    if norm is None:
        reading.assume("training.grad_clip", 1.0, f"transformers' default of {option}")
    elif float(norm) > 0:
        reading.put("training.grad_clip", float(norm), option)


def put_adapters(reading: ScriptReading, rank: str, targets: str, *, every: bool, usual_rank: int) -> None:
    """Put adapters of PEFT. ``every``: all products have one, whatever ``targets`` says."""
    size = reading.number(rank, usual_rank)
    if rank not in reading.options:
        reading.assumed.append(f"training.adapters.rank: {usual_rank}, the default of {rank}")
    named = reading.get(targets)
    names = named.replace(",", " ").split() if isinstance(named, str) else list(named or ())
    unknown = [name for name in names if name not in (*_TARGETS, "all", "all-linear")]
    if every or not names or {"all", "all-linear"} & set(names):
        chosen = _EVERY
    else:
        chosen = [_TARGETS[name] for name in names if name in _TARGETS]
    reading.ignored += [f"{targets} {name}" for name in unknown]
    adapters: dict[str, Any] = {"rank": size, "targets": chosen or _EVERY}
    if rate := float(reading.get("lora_dropout") or 0.0):
        adapters["dropout"] = rate
    reading.put("training.adapters", adapters, rank)


def assume_wide_weights(reading: ScriptReading, why: str) -> None:
    """Put weights in fp32 under mixed precision, of which products take casts; not beside adapters."""
    training = reading.workload.get("training", {})
    if training.get("precision") in ("bf16", "fp16") and "adapters" not in training:
        reading.assume("training.optimizer.master_weights", True, why)


def put_fsdp(reading: ScriptReading, prefix: str) -> None:
    """Put what accelerate's ``fsdp_config`` says, whose keys stand under ``prefix`` with fsdp_ before them or not."""

    def either(name: str) -> Any:
        first, second = reading.get(f"{prefix}fsdp_{name}"), reading.get(f"{prefix}{name}")
        return second if first is None else first

    strategy = str(either("sharding_strategy") or either("reshard_after_forward") or "FULL_SHARD").upper()
    stage = {"NO_SHARD": 0, "3": 0, "SHARD_GRAD_OP": 3, "2": 3}.get(strategy, 3)
    reading.put("parallelism.zero", stage, f"{prefix}fsdp_sharding_strategy {strategy}")
    if strategy in ("SHARD_GRAD_OP", "2", "FALSE", "_HYBRID_SHARD_ZERO2"):
        reading.put("parallelism.reshard_after_forward", False, f"{prefix}fsdp_sharding_strategy")
    if "HYBRID" in strategy:
        reading.ignored.append(f"{prefix}fsdp_sharding_strategy {strategy}: set parallelism.hsdp to the GPUs of a node")
    if str(either("offload_params")).lower() == "true":
        reading.put("parallelism.offload.parameters", "cpu", f"{prefix}fsdp_offload_params")
        reading.put("parallelism.offload.optimizer", "cpu", f"{prefix}fsdp_offload_params")
        if reading.workload.get("training", {}).get("optimizer", {}).pop("implementation", None):
            reading.ignored.append("the fused optimizer: offloaded states are updated by the host")
    if str(either("activation_checkpointing")).lower() == "true":
        reading.put("training.recompute", "full", f"{prefix}fsdp_activation_checkpointing")
    if stage == 3:
        assume_wide_weights(reading, "accelerate keeps the weights of FSDP in fp32 under mixed precision")
    reading.neutral += [name for name in reading.options if name.startswith(prefix) and name not in reading.used]
    reading.used |= {name for name in reading.options if name.startswith(prefix)}


def put_deepspeed(reading: ScriptReading, option: str) -> None:
    """Put what the DeepSpeed configuration says that ``option`` names, from a file beside the script or under it.

    The file's own folder and those above it are tried. A file that is not there is told.
    """
    named = reading.get(option)
    if not isinstance(named, str) or not named:
        return
    folders = (reading.path.parent, *reading.path.resolve().parents)
    file = next((folder / named for folder in folders if (folder / named).is_file()), None)
    reading.workload["framework"] = "hugging_face_deepspeed"
    if file is None:
        stage = next((number for number in "123" if f"z{number}" in named or f"zero{number}" in named), None)
        if stage is None:
            raise InputError(
                "names a DeepSpeed configuration that is not there",
                file=reading.path,
                key=option,
                found=named,
                fix="the file beside the script, at the path that it names",
            )
        reading.assume("parallelism.zero", int(stage), f"by the name of {named}, which is not there")
        return
    data = read_json(file) if file.suffix == ".json" else read_yaml(file)
    prefix = f"{option}: "
    reading.options = {**reading.options, **{prefix + key: value for key, value in flattened(data).items()}}
    deepspeed.apply(reading, prefix)
    reading.neutral += [key for key in reading.options if key.startswith(prefix) and key not in reading.used]
    reading.used |= {key for key in reading.options if key.startswith(prefix)}

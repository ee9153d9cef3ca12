"""Arguments of Hugging Face's `Trainer` that several launchers share, and files that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from simulator.errors import InputError
from simulator.input_files import read_json, read_yaml
from simulator.launch_scripts import deepspeed
from simulator.launch_scripts.script import ScriptReading, flattened, words_of

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
        "template",
        "tokenizer_name",
        "trust_remote_code",
        "val_set_size",
        "weight_decay",
        "debug",
    ]
)
NEUTRAL_PREFIXES = (
    "chat_template", "comet", "data_output", "data_path", "data_seed", "data_split", "dataloader", "dataset",
    "early_stopping", "eval", "gradient_checkpointing_kwargs", "hub_", "load_best", "logging", "lora_alpha",
    "lora_fan", "lora_model_dir", "loraplus", "lr_", "metric_for", "mlflow", "per_device_eval", "preprocessing", "save",
    "special_tokens", "tokenizer", "train_on", "wandb", "warmup",
)  # fmt: skip
#: Neutral keys of the section ``fsdp_config``, which may have fsdp_ before them.
_FSDP_NEUTRAL = (
    "cpu_ram_efficient_loading",
    "state_dict_type",
    "sync_module_states",
    "transformer_layer_cls_to_wrap",
    "use_orig_params",
    "version",
)
#: Keys of that section -> values, in small letters, that are what is simulated.
_FSDP_USUAL = {
    "auto_wrap_policy": "transformer_based_wrap",
    "backward_prefetch": "backward_pre",
}


class _Sharding(NamedTuple):
    """A strategy of FSDP: its stage of ZeRO, whether layers are dropped after use, whether nodes hold copies."""

    zero: int
    reshard: bool = True
    hybrid: bool = False


#: Strategies of FSDP by name, by number of ``ShardingStrategy``, or by whether layers are dropped after use.
_STRATEGIES = {
    "FULL_SHARD": _Sharding(3),
    "SHARD_GRAD_OP": _Sharding(3, reshard=False),
    "NO_SHARD": _Sharding(0),
    "HYBRID_SHARD": _Sharding(3, hybrid=True),
    "HYBRID_SHARD_ZERO2": _Sharding(3, reshard=False, hybrid=True),
}
_STRATEGIES |= {str(number): strategy for number, strategy in enumerate(_STRATEGIES.values(), start=1)}
_STRATEGIES |= {
    "TRUE": _STRATEGIES["FULL_SHARD"],
    "FALSE": _STRATEGIES["SHARD_GRAD_OP"],
    "_HYBRID_SHARD_ZERO2": _STRATEGIES["HYBRID_SHARD_ZERO2"],
}
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
#: Products beside which PEFT puts adapters where nobody names some, in models of Llama's kind and in GPT-2, whose one
#: product makes queries, keys and values (peft, utils/constants.py).
_USUAL_TARGETS = ["q", "v"]
_TARGETS_OF_GPT2 = ["qkv"]
_EVERY = ["q", "k", "v", "o", "gate", "up", "down"]
_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion": "lion",
    "muon": "muon",
}
#: transformers' names of optimizers of other libraries, without ``paged_`` before them -> ours, and the library
#: (transformers, training_args.py and trainer_optimizer.py).
_BY_LIBRARY = {
    "adamw_bnb_8bit": ("adamw_8bit", "bitsandbytes"),
    "adamw_8bit": ("adamw_8bit", "bitsandbytes"),
    "adamw_32bit": ("adamw", "bitsandbytes"),
    "adamw_torch_8bit": ("adamw_8bit", "torchao"),
    "lion_8bit": ("lion_8bit", "bitsandbytes"),
    "lion_32bit": ("lion", "bitsandbytes"),
}


def put_precision(reading: ScriptReading, *, unsaid: str) -> None:
    """Put bf16, fp16 or what stands for it where the script says neither."""
    reading.refuse_both("bf16", "fp16")
    for dtype in ("bf16", "fp16"):
        if str(reading.look(dtype)).lower() in ("true", "auto", "full", "1", "yes"):
            reading.put("training.precision", dtype, dtype)
            return
    reading.assume("training.precision", unsaid, "neither bf16 nor fp16 is said")


def put_batch(reading: ScriptReading, micro: str, accumulation: str) -> None:
    """Put the micro-batch, how many a step has, and how many steps the run has, where it says so."""
    reading.take(micro, "training.micro_batch")
    steps = reading.number(accumulation)
    if steps is not None:
        reading.accumulation = steps
        reading.understand(accumulation, "micro-batches of a step", steps)
    elif reading.accumulation is None:
        reading.accumulation = 1
        reading.assumed.append(f"{accumulation}: 1, its default")
    reading.take_steps("max_steps")  # transformers' default is -1: epochs decide


def put_optimizer(reading: ScriptReading, option: str) -> None:
    """Put the optimizer by transformers' name of it, such as adamw_torch_fused."""
    name = str(reading.look(option, "")).lower()
    if by_library := _BY_LIBRARY.get(name.removeprefix("paged_")):
        for key, value in zip(("name", "implementation"), by_library, strict=True):
            reading.put(f"training.optimizer.{key}", value, option)
        if name.startswith("paged_"):
            reading.put("training.optimizer.paged", True, option)
        return
    family = next((ours for theirs, ours in _OPTIMIZERS.items() if name.startswith(theirs)), None)
    if family is None or any(word in name for word in ("8bit", "4bit", "paged", "anyprecision")):
        return
    reading.put("training.optimizer.name", family, option)
    if family == "adamw" and "fused" in name:
        reading.put("training.optimizer.implementation", "fused", option)


def put_clipping(reading: ScriptReading, option: str = "max_grad_norm") -> None:
    """Put the norm to which gradients are clipped; transformers' default is 1."""
    norm = reading.fraction(option)
    if norm is None:
        reading.assume("training.grad_clip", 1.0, f"transformers' default of {option}")
    else:
        reading.put("training.grad_clip", norm if norm > 0 else None, option)


def put_adapters(
    reading: ScriptReading,
    rank: str,
    targets: str,
    *,
    chosen_by: str,
    usual_rank: int,
    every: str | None = None,
    usual_all: bool = False,
) -> None:
    """Put adapters of PEFT.

    ``chosen_by``: the option that asks for them. ``every``: a switch that gives all products one, whatever ``targets``
    says. ``usual_all``: so do all where nothing is said of ``targets``, in place of PEFT's default.
    """
    usual: dict[str, Any] = {"rank": usual_rank, "targets": _EVERY if usual_all else _default_targets(reading)}
    script_keys: dict[str, Any] = {}
    if (size := reading.number(rank)) is not None:
        script_keys["rank"] = size
    else:
        reading.assumed.append(f"training.adapters.rank: {usual_rank}, the default of {rank}")
    names = words_of(reading.look(targets))
    switch = reading.first_on(every) if every is not None else None
    if switch or {"all", "all-linear"} & set(names):
        script_keys["targets"] = _EVERY
    elif chosen := [_TARGETS[name] for name in names if name in _TARGETS]:
        script_keys["targets"] = chosen
    else:
        reading.assumed.append(f"training.adapters.targets: {', '.join(usual['targets'])}, the default of {targets}")
    unknown = [name for name in names if name not in (*_TARGETS, "all", "all-linear")]
    reading.ignored += [f"adapters of {name}, which {targets} names" for name in unknown]
    if rate := reading.fraction("lora_dropout"):
        script_keys["dropout"] = rate
    reading.put("training.adapters", {**usual, **script_keys})
    for option in (chosen_by, rank, targets if "targets" in script_keys else None, switch, "lora_dropout"):
        if option and reading.look(option) not in (None, "auto"):
            reading.understand(option, "training.adapters", script_keys or "LoRA")


def _default_targets(reading: ScriptReading) -> list[str]:
    """Return the products beside which PEFT puts adapters in a script's model where nobody names some."""
    preset = str(reading.workload.get("model", {}).get("preset", ""))
    return _TARGETS_OF_GPT2 if preset.startswith("gpt2") else _USUAL_TARGETS


def put_base(reading: ScriptReading) -> bool:
    """Put four bits of the products beside adapters where bitsandbytes loads them so; return whether it does."""
    if not reading.flag("load_in_4bit"):
        return False
    kind = "bnb_4bit_quant_type"
    if str(reading.look(kind, "nf4")).lower() == "nf4":
        reading.put("training.base", "nf4", "load_in_4bit", *([kind] if reading.look(kind) else []))
    else:
        reading.assume("training.base", "nf4", "of the types with four bits the one that is simulated")
        reading.understand("load_in_4bit", "training.base", "nf4")
    return True


def assume_wide_weights(reading: ScriptReading, why: str) -> None:
    """Put weights in fp32 under mixed precision, of which products take casts; not beside adapters."""
    training = reading.workload.get("training", {})
    if training.get("precision") in ("bf16", "fp16") and "adapters" not in training:
        reading.assume("training.optimizer.master_weights", True, why)


def put_fsdp(reading: ScriptReading, words: str | None = None) -> None:
    """Put what accelerate's section ``fsdp_config`` says.

    ``words``: an option of transformers' Trainer with a strategy and other words, such as "full_shard auto_wrap".
    """

    def spelled(*names: str) -> tuple[str, ...]:
        return tuple(f"fsdp_config.{start}{name}" for name in names for start in ("fsdp_", ""))

    in_words = [word.upper() for word in words_of(reading.look(words))] if words is not None else []
    option, value = reading.first_of(*spelled("sharding_strategy", "reshard_after_forward"))
    strategy = _STRATEGIES.get(str(value).upper())
    if strategy is None and words is not None:
        option, strategy = words, next((_STRATEGIES[word] for word in in_words if word in _STRATEGIES), None)
    _put_sharding(reading, option, strategy)
    offloading = words if "OFFLOAD" in in_words else reading.first_on(*spelled("offload_params"))
    if offloading is not None:
        _offload(reading, offloading)
    if checkpointing := reading.first_on(*spelled("activation_checkpointing")):
        reading.put("training.recompute", "full", checkpointing)
    for name, usual in _FSDP_USUAL.items():
        for one in spelled(name):
            reading.leave_where(one, usual)
    reading.leave(*spelled(*_FSDP_NEUTRAL), "fsdp_version", "fsdp_transformer_layer_cls_to_wrap")
    each = reading.first_on("accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
    if each is not None and reading.workload["parallelism"]["zero"] == 3:
        reading.put("parallelism.sync_each_micro_batch", True, each)
    if reading.workload["parallelism"]["zero"] == 3:
        assume_wide_weights(reading, "accelerate keeps the weights of FSDP in fp32 under mixed precision")


def _put_sharding(reading: ScriptReading, option: str, strategy: _Sharding | None) -> None:
    if strategy is None:
        reading.assume("parallelism.zero", 3, "FULL_SHARD, the default of fsdp_sharding_strategy")
        return
    reading.put("parallelism.zero", strategy.zero, option)
    if not strategy.reshard:
        reading.put("parallelism.reshard_after_forward", False, option)
    if strategy.hybrid:
        reading.ignored.append("sharding inside a node alone: set parallelism.hsdp to the GPUs of a node")


def _offload(reading: ScriptReading, option: str) -> None:
    reading.put("parallelism.offload.parameters", "cpu", option)
    reading.put("parallelism.offload.optimizer", "cpu", option)
    key = "training.optimizer.implementation"
    if reading.workload.get("training", {}).get("optimizer", {}).pop("implementation", None):
        reading.understood = [entry for entry in reading.understood if entry.key != key]
        reading.assumed.append(f"{key}: the host's, as the host updates offloaded states")


def put_deepspeed(reading: ScriptReading, option: str) -> bool:
    """Put what the DeepSpeed configuration says that ``option`` names; return whether it names one.

    The file is looked for in the script's own folder and in those above it. One that is not there is told.
    """
    named = reading.look(option)
    if not isinstance(named, str) or named.lower() in ("", "true", "false"):
        return False
    folders = (reading.path.parent, *reading.path.resolve().parents)
    file = next((folder / named for folder in folders if (folder / named).is_file()), None)
    reading.put("framework", "hugging_face_deepspeed", option)
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
        return True
    data = read_json(file) if file.suffix == ".json" else read_yaml(file)
    if not isinstance(data, Mapping):
        raise InputError("must hold keys and values at its top level", file=file)
    prefix = f"{option}."
    reading.options = {**reading.options, **{prefix + key: value for key, value in flattened(data).items()}}
    deepspeed.apply(reading, lambda key: prefix + key)
    deepspeed.sort_rest(reading, prefix)
    return True

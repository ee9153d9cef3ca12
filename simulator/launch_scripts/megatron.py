"""Megatron-LM's arguments, from a shell script or a YAML file (`megatron/training/arguments.py` names them)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts.megatron_dispatching import put_dispatcher
from simulator.launch_scripts.megatron_graphs import put_graphs
from simulator.launch_scripts.megatron_layers import put_layers
from simulator.launch_scripts.script import LaunchScript, ScriptReading, flattened, words_of

FORMAT = "Megatron-LM arguments"
#: What a script must have to be one of Megatron-LM's.
MARKS = frozenset(("num_layers", "hidden_size", "num_attention_heads"))
#: Option -> key of the workload, for whole numbers that mean the same.
_NUMBERS = {
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "num_attention_heads": "model.heads",
    "vocab_size": "model.vocab",
    "make_vocab_size_divisible_by": "model.vocab_multiple",
    "mtp_num_layers": "model.mtp_layers",
    "seq_length": "training.seq",
    "micro_batch_size": "training.micro_batch",
    "global_batch_size": "training.global_batch",
    "tensor_model_parallel_size": "parallelism.tp",
    "pipeline_model_parallel_size": "parallelism.pp",
    "context_parallel_size": "parallelism.cp",
    "expert_model_parallel_size": "parallelism.ep",
    "expert_tensor_parallel_size": "parallelism.etp",
}
_NEUTRAL_PREFIXES = (
    "adam_", "auto_detect_ckpt", "ckpt_", "data_args", "data_cache", "data_impl", "data_path", "dataloader",
    "decoupled", "dist_ckpt", "distributed_timeout", "end_weight", "eval_", "exit_", "init_method", "log_",
    "loss_scale", "lr", "manual_gc", "merge_", "min_lr", "mock_", "moe_aux_loss_coeff", "moe_z_loss_coeff", "no_load",
    "no_save", "node_rank", "num_workers", "override_opt", "per_split", "profile", "rdzv", "save", "seed", "split",
    "start_weight", "tensorboard", "test_data", "tiktoken", "timing_", "tokenizer", "train_data", "use_checkpoint_",
    "use_mcore", "valid_", "vocab_file", "wandb", "warmup", "weight_decay", "world_size",
)  # fmt: skip
_NEUTRAL = frozenset(
    [
        "calculate_per_token_loss",
        "empty_unused_memory_level",
        "fp8_amax_compute_algo",
        "fp8_amax_history_len",
        "fp8_interval",
        "fp8_margin",
        "load",
        "master_addr",
        "master_port",
        "max_position_embeddings",
        "nnodes",
        "no_create_attention_mask_in_dataloader",
        "no_mmap_bin_files",
        "no_position_embedding",
        "norm_epsilon",
        "nproc_per_node",
        "rotary_base",
        "rotary_scaling_factor",
        "rotary_seq_len_interpolation_factor",
    ]
)
#: Option -> values, in small letters, that are what is simulated.
_USUAL = {
    "distributed_backend": ("nccl",),
    "moe_layer_freq": ("1",),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "gradient_accumulation_fusion": ("true",),
    "num_virtual_stages_per_pipeline_rank": ("1",),
    "rotary_percent": ("1", "1.0"),
}
#: --optimizer -> ours. Its Adam decays weights apart, and its SGD has momentum.
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd_momentum"}
#: --fp8-recipe -> ours.
_FP8_RECIPES = {"delayed": "te_delayed", "tensorwise": "te_current", "blockwise": "te_blockwise", "mxfp8": "te_mxfp8"}
#: --fp4-recipe -> ours: the only one that Megatron-LM has.
_FP4_RECIPES = {"nvfp4": "te_nvfp4"}
#: --cp-comm-type -> ours.
_CONTEXT_METHODS = {"p2p": "ring", "a2a": "ulysses"}
#: Options of the layers that the first and the last pipeline stage have.
_UNEVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
#: --data-parallel-sharding-strategy -> stage of ZeRO. no_shard is the default of Megatron-Core's
#: `DistributedDataParallelConfig`.
_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
#: --attention-backend -> ours.
_ATTENTION = {"flash": "flash", "fused": "flash", "unfused": "unfused"}


@dataclass(frozen=True)
class Dialect:
    """A file that holds Megatron-LM's arguments in a form of its own.

    ``names``: Megatron-LM's name of an option -> that of the file. ``neutral``, ``prefixes`` and ``usual``: options of
    the file alone that change nothing, beginnings of such, and values that are what is simulated. ``preset``: the
    shipped model that it trains, over which sizes are laid; None: sizes are all that it says of the model.
    ``sets_experts``: classes outside the file say how experts run, where the file does not.
    """

    form: str = FORMAT
    names: Mapping[str, str] = field(default_factory=dict)
    neutral: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()
    usual: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    preset: str | None = None
    sets_experts: bool = False


def read(options: Mapping[str, Any], path: Path, gpus: int | None, dialect: Dialect | None = None) -> LaunchScript:
    """Return the job of Megatron-LM's arguments on so many GPUs; None: the script leaves it open.

    ``dialect``: whose file holds them; None: Megatron-LM's own.
    """
    dialect = dialect or Dialect()
    reading = ScriptReading(dialect.form, path, options, gpus=gpus, names=dialect.names)
    for option, key in _NUMBERS.items():
        reading.take(option, key)
    _modules(reading)
    if dialect.preset is None:
        put_layers(reading, by_default=not dialect.sets_experts)
    else:
        reading.workload.setdefault("model", {})["preset"] = dialect.preset
    _training(reading)
    _parallelism(reading)
    put_dispatcher(reading, by_default=not dialect.sets_experts)
    put_graphs(reading)
    for option, values in {**_USUAL, **dialect.usual}.items():
        reading.leave_where(option, *values)
    reading.sort_rest(_NEUTRAL | dialect.neutral, (*_NEUTRAL_PREFIXES, *dialect.prefixes))
    return reading.script


def yaml_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a YAML file holds, in sections or not.

    Megatron-LM's own names come last in them. Of two such the second counts, and the first keeps its sections' names.
    """
    options: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in flattened(data).items():
        name = re.sub(r"^.*\.", "", key).replace("-", "_")
        if name in options:
            options[written[name]] = options[name]
        options[name], written[name] = value, key
    return options


def _modules(reading: ScriptReading) -> None:
    """Put whose modules layers are made of, and how attention is computed."""
    implementation = reading.look("transformer_impl")
    local = implementation == "local"
    if local:
        reading.put("framework", "megatron_core_local", "transformer_impl")
        reading.assume("model.attention", "unfused", "local modules have no fused attention")
        reading.leave("no_masked_softmax_fusion", "attention_softmax_in_fp32")  # as their softmax is simulated
        return
    if implementation == "transformer_engine":
        reading.put("framework", "megatron_core", "transformer_impl")
    else:
        reading.workload["framework"] = "megatron_core"
    backend = _ATTENTION.get(str(reading.look("attention_backend")).lower())
    if backend is not None:
        reading.put("model.attention", backend, "attention_backend")
    elif reading.flag("use_flash_attn"):
        reading.put("model.attention", "flash", "use_flash_attn")
    if backend != "unfused":  # a fused kernel has its softmax within, in fp32
        reading.leave("no_masked_softmax_fusion", "attention_softmax_in_fp32")


def _training(reading: ScriptReading) -> None:
    reading.refuse_both("bf16", "fp16")
    if half := reading.first_on("bf16", "fp16"):
        reading.put("training.precision", half, half)
    else:
        reading.assume("training.precision", "fp32", "Megatron-LM's without bf16 and fp16")
    _few_bits(reading, 8, _FP8_RECIPES)
    _few_bits(reading, 4, _FP4_RECIPES)
    clip = reading.fraction("clip_grad")
    if clip is None:
        reading.assume("training.grad_clip", 1.0, "Megatron-LM's default of clip_grad")
    else:
        reading.put("training.grad_clip", clip or None, "clip_grad")
    optimizer = _OPTIMIZERS.get(str(reading.look("optimizer")).lower())
    if optimizer is not None:
        reading.put("training.optimizer.name", optimizer, "optimizer")
    if option := reading.first_on("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_bf16"):
        reading.put("training.grad_dtype", "bf16", option)
    if reading.flag("no_gradient_accumulation_fusion"):
        reading.put("training.gradient_accumulation_fusion", False, "no_gradient_accumulation_fusion")
    _recompute(reading)
    training = reading.workload["training"]
    samples, seq = reading.number("train_samples"), training.get("seq")
    if samples and seq:
        reading.put("training.total_tokens", float(samples * seq), "train_samples")
        reading.leave("train_iters")
    else:
        reading.leave("train_samples")
        reading.take_steps("train_iters")
    if training.get("global_batch") is None:
        reading.accumulation = 1
        reading.assumed.append("training.global_batch: one micro-batch per replica, Megatron-LM's default")


def _few_bits(reading: ScriptReading, bits: int, recipes: Mapping[str, str]) -> None:
    """Put the recipe of products in so few bits; a script that names none has the first of ``recipes``."""
    key, option = f"training.fp{bits}", f"fp{bits}_recipe"
    switch, form = reading.first_of(f"fp{bits}_format", f"fp{bits}")
    if form is None or str(form).lower() == "false":
        reading.leave(option)
        return
    named = reading.look(option)
    recipe = recipes.get(str(next(iter(recipes)) if named is None else named).lower())
    if recipe is None:
        reading.ignore(switch, f"its recipe is {'none of' if len(recipes) > 1 else 'not'} {', '.join(recipes)}")
    elif named is not None:
        reading.put(key, recipe, switch, option)
    else:
        reading.put(key, recipe, switch)
        if len(recipes) > 1:
            reading.assumed.append(f"{key}: {recipe}, Megatron-LM's default of {option}")


def _recompute(reading: ScriptReading) -> None:
    switch = reading.first_on("recompute_activations", "checkpoint_activations")
    option, granularity = reading.first_of("recompute_granularity")
    if granularity is None and switch is not None:  # the second, before version 3, means whole layers
        option, granularity = switch, "selective" if switch == "recompute_activations" else "full"
    if granularity not in ("full", "selective"):
        return
    recompute: dict[str, Any] = {"granularity": granularity}
    options = [option]
    method, layers = reading.look("recompute_method"), reading.number("recompute_num_layers")
    if granularity == "full" and method == "block" and layers:
        recompute["layers"] = layers
    if granularity == "full" and ((method == "block" and layers) or (method == "uniform" and layers == 1)):
        options += ["recompute_method", "recompute_num_layers"]
    modules = reading.look("recompute_modules")
    if granularity == "selective" and modules:
        recompute["modules"] = modules.split() if isinstance(modules, str) else list(modules)
        options.append("recompute_modules")
    reading.put("training.recompute", recompute if len(recompute) > 1 else granularity, *options)


def _parallelism(reading: ScriptReading) -> None:
    if reading.workload.setdefault("parallelism", {}).get("tp", 1) > 1:
        reading.switch("parallelism.sequence_parallel", "sequence_parallel")
    reading.leave("sequence_parallel")
    _chunks(reading)
    _context(reading)
    _sharding(reading)
    for option, key in (
        ("overlap_grad_reduce", "grad_reduce"),
        ("overlap_param_gather", "param_gather"),
        ("tp_comm_overlap", "tp"),
    ):
        reading.switch(f"parallelism.overlap.{key}", option)
    if reading.flag("optimizer_cpu_offload"):
        reading.put("parallelism.offload.optimizer", "cpu", "optimizer_cpu_offload")
    for option, key in (
        ("account_for_embedding_in_pipeline_split", "account_for_embedding"),
        ("account_for_loss_in_pipeline_split", "account_for_loss"),
        ("moe_shared_expert_overlap", "overlap.ep"),
        ("overlap_moe_expert_parallel_comm", "overlap.expert_all_to_all"),
        ("delay_wgrad_compute", "overlap.delayed_weight_grad"),
    ):
        if reading.flag(option):
            reading.put(f"parallelism.{key}", True, option)


def _sharding(reading: ScriptReading) -> None:
    """Put the stage of ZeRO. PyTorch's FSDP shards all; Megatron's own what its strategy says, by default nothing."""
    if reading.flag("use_torch_fsdp2"):
        reading.put("parallelism.zero", 3, "use_torch_fsdp2")
        reading.leave("data_parallel_sharding_strategy", "use_distributed_optimizer")
    elif switch := reading.first_on("use_megatron_fsdp", "use_custom_fsdp"):
        option, strategy = reading.first_of("data_parallel_sharding_strategy")
        stage = _SHARDED.get(str(strategy))
        if stage is None:
            reading.assume("parallelism.zero", 0, f"Megatron-LM's default of {option}, no_shard")
            reading.understand(switch, "parallelism.zero", 0)
        else:
            reading.put("parallelism.zero", stage, switch, option)
        reading.leave("use_distributed_optimizer")
    elif reading.flag("use_distributed_optimizer"):
        reading.put("parallelism.zero", 1, "use_distributed_optimizer")


def _chunks(reading: ScriptReading) -> None:
    layout = reading.workload["parallelism"]
    pp = layout.get("pp", 1)
    option, number = reading.first_number(
        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"
    )
    if pp < 2:
        for single in ("num_layers_per_virtual_pipeline_stage", *_UNEVEN):
            if reading.look(single) is not None:
                reading.ignore(single, "the pipeline has one stage")
        return
    if number and option == "num_layers_per_virtual_pipeline_stage":
        number = _chunks_of(reading, number, pp)
    if number and number > 1:
        reading.put("parallelism.vpp", number, option)
        reading.put("parallelism.schedule", "interleaved", option)
    elif number == 1:
        reading.leave(option)
    _uneven_stages(reading, pp, number or 1)


def _chunks_of(reading: ScriptReading, each: int, pp: int) -> int:
    """Return the chunks of a pipeline rank that have ``each`` layers. Raises `InputError` where they do not divide."""
    ends = (
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    )
    layers = reading.workload["model"].get("layers", 1) + sum(map(reading.flag, ends))
    if each < 1 or layers % (pp * each):
        raise InputError(
            f"{layers} layers over {pp} pipeline ranks do not split into chunks of it",
            file=reading.path,
            key="num_layers_per_virtual_pipeline_stage",
            found=each,
            allowed="a divisor of the layers of a rank",
        )
    return int(layers // pp // each)


def _uneven_stages(reading: ScriptReading, pp: int, vpp: int) -> None:
    """Put layers of stages of which the first or last has its own number; the others share what is left evenly."""
    first, last = (reading.number(option) for option in _UNEVEN)
    options = [option for option, number in zip(_UNEVEN, (first, last), strict=True) if number is not None]
    if not options:
        return
    layers = reading.workload["model"].get("layers", 1)
    between = pp - len(options)
    rest = layers - (first or 0) - (last or 0)
    each = rest // between if between else 0
    stages = [each if first is None else first, *[each] * (pp - 2), each if last is None else last]
    if sum(stages) != layers or any(stage < 1 or stage % vpp for stage in stages):
        raise InputError(
            f"{layers} layers do not split so over {pp} pipeline ranks" + (f" of {vpp} chunks" if vpp > 1 else ""),
            file=reading.path,
            key=options[0],
            found=[number for number in (first, last) if number is not None],
        )
    reading.put("parallelism.layers_per_stage", [stage // vpp for stage in stages] * vpp, *options)


def _context(reading: ScriptReading) -> None:
    """Put how ranks of context parallelism trade what they lack."""
    kinds = set(words_of(reading.look("cp_comm_type")))
    if reading.workload["parallelism"].get("cp", 1) == 1:
        reading.leave("cp_comm_type")
    elif len(kinds) == 1 and (method := _CONTEXT_METHODS.get(kinds.pop())):
        reading.put("parallelism.cp_method", method, "cp_comm_type")

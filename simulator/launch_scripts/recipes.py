"""Recipes in Python: NeMo 2's and Megatron-Bridge's, as far as their calls and attributes have plain values.

Both set Megatron-Core's arguments under names of their own. What a recipe that is only imported sets itself is known
here for a few; of others it is assumed, and told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.launch_scripts import megatron
from simulator.launch_scripts.models import preset_of
from simulator.launch_scripts.python_values import CallValue, OutsideName, PythonFile, read_python
from simulator.launch_scripts.script import LaunchScript, UnderstoodOption, words_of

FORMAT = "recipe in Python (NeMo 2, Megatron-Bridge)"
#: Ends of the names of calls that make a recipe, of functions in a file that do, and of a whole configuration.
_RECIPE = re.compile(r"(pretrain|finetune|sft|peft)_(recipe|config)(_\w+)?$")
_WHOLE = ("ConfigContainer", "pretrain", "finetune")
#: Last part of an attribute or argument -> argument of Megatron-LM; others have the same name.
_ARGUMENTS = {
    "tensor_parallelism": "tensor_model_parallel_size",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallelism": "pipeline_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "context_parallelism": "context_parallel_size",
    "expert_parallelism": "expert_model_parallel_size",
    "virtual_pipeline_parallelism": "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "sequence_parallelism": "sequence_parallel",
    "sequence_length": "seq_length",
    "max_steps": "train_iters",
    "gradient_clip_val": "clip_grad",
    "num_moe_experts": "num_experts",
    "num_gpus_per_node": "nproc_per_node",
    "devices": "nproc_per_node",
    "num_nodes": "nnodes",
}
#: Arguments of Megatron-LM that are read wherever they stand in a recipe.
_READ = frozenset(
    [
        *_ARGUMENTS.values(),
        "clip_grad",
        "cp_comm_type",
        "delay_wgrad_compute",
        "expert_tensor_parallel_size",
        "ffn_hidden_size",
        "global_batch_size",
        "hidden_size",
        "kv_channels",
        "make_vocab_size_divisible_by",
        "micro_batch_size",
        "moe_enable_deepep",
        "moe_ffn_hidden_size",
        "moe_flex_dispatcher_backend",
        "moe_permute_fusion",
        "moe_router_topk",
        "moe_shared_expert_overlap",
        "moe_token_dispatcher_type",
        "mtp_num_layers",
        "num_attention_heads",
        "num_layers",
        "num_query_groups",
        "overlap_grad_reduce",
        "overlap_moe_expert_parallel_comm",
        "overlap_param_gather",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "tp_comm_overlap",
        "use_distributed_optimizer",
        "vocab_size",
    ]
)
#: What a precision's name has after ``bf16_with_``, without ``_scaling`` and ``_mixed`` -> arguments of Megatron-LM
#: (Megatron-Bridge, src/megatron/bridge/training/mixed_precision.py).
_PRODUCTS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "fp8_current": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8_delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "fp8_subchannel": {"fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "hybrid", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}
#: Attributes that hold a precision.
_PLACES = ("plugins", "mixed_precision", "precision")


def _layout(tp: int, pp: int, chunks: int, cp: int, nodes: int, **further: Any) -> Mapping[str, Any]:
    """Return Megatron-LM's arguments of a recipe that splits models; ``nodes``: those of its ``trainer``."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_virtual_stages_per_pipeline_rank": chunks,
        "context_parallel_size": cp,
        "sequence_parallel": tp > 1,
        "nnodes": nodes,
        **further,
    }


#: Imported recipe of NeMo 2 -> what its source sets (NeMo, collections/llm/recipes/NAME.py).
_LISTED: Mapping[str, Mapping[str, Any]] = {
    "llama3_8b": {"context_parallel_size": 2, "nnodes": 1},
    "llama3_70b": _layout(4, 4, 5, 2, 4),
    "llama31_8b": {"context_parallel_size": 2, "nnodes": 1},
    "llama31_70b": _layout(4, 4, 5, 2, 4),
    "llama31_405b": _layout(8, 9, 2, 4, 72),
    "mistral_7b": {"context_parallel_size": 2, "nnodes": 1, "seq_length": 4096},
    "mixtral_8x22b": _layout(2, 4, 14, 2, 16, expert_model_parallel_size=8, seq_length=4096),
    "gpt3_175b": _layout(
        tp=4,
        pp=8,
        chunks=6,
        cp=1,
        nodes=64,
        seq_length=2048,
        global_batch_size=2048,
        micro_batch_size=2,
        fp8_format="hybrid",
        fp8_recipe="delayed",
    ),
}
#: What all of these set, where the table says nothing else.
_OF_ALL_LISTED = {"seq_length": 8192, "global_batch_size": 512, "micro_batch_size": 1, "nproc_per_node": 8}
#: What recipes of NeMo 2 and of Megatron-Bridge set: bf16, a sharded optimizer, its communication overlapped, gradients
#: clipped at 1.
_USUAL = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "clip_grad": 1.0,
}
#: Product of Megatron-Core's layers that has an adapter -> ours; all of them, and this rank, where a recipe says none
#: (NeMo, collections/llm/peft/lora.py).
_TARGETS = {"linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": "gate_up", "linear_fc2": "down"}
_RANK = 32
_OWN = "the recipe itself"
_NEUTRAL_PREFIXES = (
    "checkpoint", "dir", "log", "name", "optim", "optimizer.lr", "optimizer.min_lr", "profiling", "resume", "rng",
    "scheduler", "seed", "tokenizer", "trainer.accelerator", "trainer.callbacks", "trainer.limit_", "trainer.log_",
    "trainer.val_", "train.eval_", "validation",
)  # fmt: skip


def is_recipe(path: Path) -> bool:
    """Return whether a file is Python, by its name."""
    return path.suffix.lower() == ".py"


def read(text: str, path: Path) -> LaunchScript:
    """Return the job of a recipe. Raises `InputError` where a file is no Python, or makes no recipe."""
    file = read_python(text, path)
    recipe = _recipe(file)
    if recipe is None:
        message = "makes no recipe of NeMo 2 or Megatron-Bridge that is known here"
        allowed = "a call of NAME.pretrain_recipe(...), NAME_pretrain_config(...) or ConfigContainer(...)"
        raise InputError(message, file=path, allowed=allowed)
    options, names, model = _options(recipe)
    preset = preset_of(_spelt(model))
    is_listed = model in _LISTED and recipe.name.endswith("pretrain_recipe") and _is_imported(recipe)
    defaults = {**_OF_ALL_LISTED, **_LISTED[model]} if is_listed else {}
    for argument, value in {**_USUAL, **defaults}.items():
        if argument not in options and not (argument == "bf16" and "fp16" in options):
            options[argument], names[argument] = value, _OWN
    adapters = _adapters(recipe, options, names)
    gpus = _product(options.get("nproc_per_node"), options.get("nnodes", 1))
    dialect = megatron.Dialect(FORMAT, names, prefixes=_NEUTRAL_PREFIXES, preset=preset, sets_experts=True)
    script = megatron.read(options, path, gpus, dialect)
    understood = [one for one in script.understood if one.option != _OWN]
    if preset is not None:
        understood.insert(0, UnderstoodOption(recipe.name, "model.preset", preset))
    if adapters is not None:
        script.workload.setdefault("training", {})["adapters"] = adapters
        understood.append(UnderstoodOption("peft", "training.adapters", adapters))
    assumed = [f"{one.key}: {one.value}, as {_OWN} has it" for one in script.understood if one.option == _OWN]
    assumed += [] if defaults or not _is_imported(recipe) else [f"all else that {recipe.name} sets: not in this file"]
    neutral = tuple(name for name in script.neutral if name != _OWN)
    ignored = (*script.ignored, *(f"not followed: {part}" for part in file.skipped))
    ignored += () if preset or not model else (f"{model} is no model known here: give its config.json",)
    return replace(
        script, understood=tuple(understood), assumed=(*script.assumed, *assumed), neutral=neutral, ignored=ignored
    )


def _recipe(file: PythonFile) -> CallValue | None:
    """Return the call that makes the recipe: one of the file's own functions, of an imported one, or the whole."""
    calls = [call for call in file.calls if _RECIPE.search(call.name)]
    calls += [call for call in file.calls if call.name.rpartition(".")[2] in _WHOLE and call.values]
    if calls:
        return calls[-1]
    functions = [name for name in file.functions if _RECIPE.search(name)]
    result = file.call(functions[0]) if functions else None
    return result if isinstance(result, CallValue) else None


def _is_imported(recipe: CallValue) -> bool:
    return _RECIPE.search(recipe.name) is not None


def _options(recipe: CallValue) -> tuple[dict[str, Any], dict[str, str], str]:
    """Return Megatron-LM's arguments, their names in the file, and the words that name the model."""
    options: dict[str, Any] = {}
    names: dict[str, str] = {}
    model = _model_words(recipe)
    for key, value in recipe.flattened().items():
        last = key.rpartition(".")[2]
        argument = _ARGUMENTS.get(last, last)
        if isinstance(value, OutsideName):
            name = value.text.rpartition(".")[2]
            arguments = _precision(name, key) if last in _PLACES and name.islower() else {}
        elif last in _PLACES and isinstance(value, str):
            arguments = _precision(value, key)
        elif last == "grad_reduce_in_fp32" and isinstance(value, bool):
            arguments = {"grad_reduce_in_bf16": not value}
        else:
            arguments = {argument if argument in _READ else key: value}
        for name, one in arguments.items():
            if one is not None or name not in options:
                options[name], names[name] = one, key
    if isinstance(options.get("num_query_groups"), int):
        options["group_query_attention"], names["group_query_attention"] = True, names["num_query_groups"]
    return options, names, model


def _adapters(recipe: CallValue, options: dict[str, Any], names: dict[str, str]) -> dict[str, Any] | None:
    """Return the section ``adapters`` of a recipe with LoRA, whose keys leave ``options``; None without it.

    Recipes that fine-tune have it unless ``peft_scheme`` says otherwise.
    """
    peft, scheme = recipe.values.get("peft"), recipe.values.get("peft_scheme", "lora")
    by_scheme = "finetune_recipe" in recipe.name and scheme == "lora"
    if not by_scheme and not (isinstance(peft, CallValue) and peft.name.endswith("LoRA")):
        return None
    values = peft.values if isinstance(peft, CallValue) else {}
    for key in [key for key in options if key.partition(".")[0] in ("peft", "peft_scheme")]:
        del options[key]
        names.pop(key, None)
    modules = words_of(values.get("target_modules")) or [*_TARGETS]
    rank = values.get("dim", _RANK)
    return {
        "rank": rank if isinstance(rank, int) else _RANK,
        "targets": [_TARGETS.get(module, module) for module in modules],
    }


def _precision(text: str, key: str) -> dict[str, Any]:
    """Return Megatron-LM's arguments of a precision's name. An unknown part stays under the recipe's key.

    >>> _precision("bf16_with_mxfp8_mixed", "plugins")
    {'bf16': True, 'fp8_format': 'hybrid', 'fp8_recipe': 'mxfp8'}
    >>> _precision("bf16-mixed", "plugins"), _precision("bf16_with_int3_mixed", "plugins")
    ({'bf16': True}, {'bf16': True, 'plugins': 'bf16_with_int3_mixed'})
    """
    name = re.fullmatch(r"(?:\w*_)?(bf16|fp16)(?:_with_(\w+?)(?:_scaling)?)?(?:_mixed)?", text.replace("-", "_"))
    if name is None:
        return {key: text}
    products = {} if name[2] is None else _PRODUCTS.get(name[2], {key: text})
    return {name[1]: True, **products}


def _model_words(recipe: CallValue) -> str:
    """Return the words that name the model: of a checkpoint, of a class of sizes, or of the recipe itself."""
    model = recipe.values.get("model")
    parts = [model, model.values.get("config")] if isinstance(model, CallValue) else []
    for part in parts:
        if isinstance(part, CallValue):
            texts = [text for text in part.arguments if isinstance(text, str)]
            for text in [*texts, _spelt(part.name.rpartition(".")[2])]:
                if preset_of(text):
                    return text
    module, _, function = recipe.name.rpartition(".")
    title = _RECIPE.sub("", function).strip("_") or module.rpartition(".")[2]
    return title if title in _LISTED else _spelt(title)


def _spelt(name: str) -> str:
    """Return the name of a recipe or of a class of sizes as a checkpoint would be called.

    >>> _spelt("llama31_405b"), _spelt("qwen3_1p7b"), _spelt("qwen3_600m"), _spelt("Llama3ModelProvider8B")
    ('llama3.1-405b', 'qwen3-1.7b', 'qwen3-0.6b', 'llama3-8b')
    """
    text = re.sub(r"ModelProvider|Config|Provider", "_", name).lower()
    text = re.sub(r"(\d)p(\d)", r"\1.\2", text)
    text = re.sub(r"_(\d)00m$", r"_0.\1b", text)
    text = re.sub(r"^([a-z]+)(\d)(\d)_", r"\1\2.\3_", text)
    return text.strip("_").replace("_", "-")


def _product(*values: Any) -> int | None:
    """Return the product of whole numbers; None where one is none."""
    product = 1
    for value in values:
        if not isinstance(value, int):
            return None
        product *= value
    return product

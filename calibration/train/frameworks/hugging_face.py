"""Models of Hugging Face's transformers: alone, under DistributedDataParallel, or under fully_shard (FSDP2).

They are trained whole, or by PEFT's adapters.

The loop is that of its Trainer: the model's own loss over shifted labels, backward, clipping, AdamW, ``zero_grad``.
"""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from calibration.train.frameworks.tokens import DTYPES, LEARNING_RATE, replica_tokens
from calibration.train.process_groups import ProcessGroups
from simulator.config.model import Model
from simulator.config.workload import Workload


def config_of(model: Model, seq: int) -> Any:
    """Return the configuration of transformers that a file's config.json is, or else that has these sizes."""
    if model.inherited.config:
        return _shipped(model, seq)
    if model.position == "learned":
        drop = model.dropout
        return transformers.GPT2Config(
            n_embd=model.hidden,
            n_layer=model.layers,
            n_head=model.heads,
            n_inner=model.ffn_hidden,
            vocab_size=model.vocab,
            n_positions=max(seq, 1024),
            resid_pdrop=drop,
            embd_pdrop=drop,
            attn_pdrop=drop,
            tie_word_embeddings=model.tied_embeddings,
            use_cache=False,
        )
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied_embeddings,
        "max_position_embeddings": max(seq, 4096),
        "use_cache": False,
    }
    moe = model.moe
    if moe is None:
        return _dense(model, sizes)
    if model.attention_sinks:
        return transformers.GptOssConfig(
            **sizes,
            sliding_window=model.sliding_window,
            layer_types=_layer_types(model),
            num_local_experts=moe.experts,
            num_experts_per_tok=moe.top_k,
        )
    if model.qk_norm:
        experts = {"num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "norm_topk_prob": True}
        return transformers.Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=moe.ffn_hidden)
    sizes["intermediate_size"] = moe.ffn_hidden
    return transformers.MixtralConfig(**sizes, num_local_experts=moe.experts, num_experts_per_tok=moe.top_k)


def _shipped(model: Model, seq: int) -> Any:
    """Return the config.json that the model is from, with the keys that the workload's file changes beside it.

    Raises `ValueError` for a changed key that is none of transformers' of all architectures.
    """
    written = model.model_fields_set - model.inherited
    named = {"layers": "num_hidden_layers", "vocab": "vocab_size", "tied_embeddings": "tie_word_embeddings"}
    if strange := written - named.keys() - {"vocab_multiple", "attention"}:
        raise ValueError(f"beside hf_config: {', '.join(sorted(strange))}")
    keys = json.loads(Path(model.inherited.config).read_text(encoding="utf-8"))
    if "layers" in written and keys.get("layer_types"):
        keys["layer_types"] = keys["layer_types"][: model.layers]
    keys |= {named[key]: getattr(model, key) for key in written & named.keys()} | {"use_cache": False}
    keys["max_position_embeddings"] = max(seq, keys.get("max_position_embeddings", 0))
    return transformers.AutoConfig.for_model(**keys)


def _dense(model: Model, sizes: dict[str, Any]) -> Any:
    """Return the configuration of Gemma 2 or 3, Mistral, Qwen2, Qwen3 or Llama, whichever has such layers."""
    if model.activation == "geglu":
        sizes |= {"sliding_window": model.sliding_window, "layer_types": _layer_types(model)}
        if model.qk_norm:
            return transformers.Gemma3TextConfig(**sizes)
        return transformers.Gemma2Config(
            **sizes,
            attn_logit_softcapping=model.attention_softcap,
            final_logit_softcapping=model.logit_softcap,
        )
    if model.sliding_window is not None:
        return transformers.MistralConfig(**sizes, sliding_window=model.sliding_window)
    if model.biases == ("qkv",):
        return transformers.Qwen2Config(**sizes)
    return (transformers.Qwen3Config if model.qk_norm else transformers.LlamaConfig)(**sizes)


def _layer_types(model: Model) -> list[str]:
    """Return what transformers calls the kind of each layer."""
    kinds = {"window": "sliding_attention", "attention": "full_attention"}
    return [kinds[model.mixer(layer).name] for layer in range(model.layers)]


def model_of(workload: Workload, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a model of transformers in training, with gradient checkpointing where the workload wants it."""
    config = config_of(workload.model, workload.training.seq)
    config._attn_implementation = "sdpa" if workload.model.attention == "flash" else "eager"
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    if workload.training.recompute.granularity == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module: nn.Module = model
    return module


def store_as_nf4(model: Any) -> None:
    """Put bitsandbytes' layers with 4-bit weights in the place of all linear layers but the head.

    That is what transformers does with ``load_in_4bit`` and double quantisation (its ``replace_with_bnb_linear``).
    """
    import bitsandbytes

    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or name == "lm_head":
                continue
            weight = linear.weight
            narrow = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=weight.dtype,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            narrow.weight = bitsandbytes.nn.Params4bit(
                weight.data.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4", module=narrow
            )
            setattr(parent, name, narrow.to(weight.device))
    model.is_loaded_in_4bit = True  # which is how PEFT knows


def with_adapters(workload: Workload, model: nn.Module) -> nn.Module:
    """Return the model with PEFT's adapters beside its products, where the workload has some, and all else frozen."""
    adapters = workload.training.adapters
    if adapters is None:
        return model
    import peft

    if workload.training.base == "nf4":
        store_as_nf4(model)
    config = peft.LoraConfig(
        r=adapters.rank,
        target_modules=[f"{name}_proj" for name in adapters.targets],
        lora_dropout=adapters.dropout,
        use_dora=adapters.method == "dora",
    )
    wide = workload.training.trained_dtype == "fp32"
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=wide)
    return adapted


def layers_of(model: Any) -> nn.ModuleList:
    """Return the layers of a model of transformers."""
    layers: nn.ModuleList = model.model.layers if hasattr(model, "model") else model.transformer.h
    return layers


class TransformersTrainer:
    """Trains a model of transformers on this rank."""

    def __init__(self, workload: Workload, groups: ProcessGroups, device: torch.device) -> None:
        training, layout = workload.training, workload.parallelism
        wide = training.optimizer.master_weights
        working = DTYPES[training.precision]
        model = with_adapters(workload, model_of(workload, device, torch.float32 if wide else working))
        if layout.zero == 3 and groups.data is not None:
            mesh = DeviceMesh.from_group(groups.data, device.type)
            policy = MixedPrecisionPolicy(working, torch.float32) if wide else MixedPrecisionPolicy()
            for layer in layers_of(model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        self._run: Any = model
        if layout.zero == 0 and groups.data is not None:
            self._run = DistributedDataParallel(model, process_group=groups.data)
        if workload.framework.compile:
            self._run = torch.compile(self._run)
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = training.optimizer.implementation == "fused" and device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused)
        self._clip = training.grad_clip
        self._autocast = wide and layout.zero == 0
        self._adds_whole = workload.adds_whole_gradients
        self._tf32 = training.precision == "fp32" and training.tf32
        self._device, self._working = device, working
        self._batches = replica_tokens(workload, groups.place["dp"])[:, :-1].to(device).split(training.micro_batch)

    def step(self) -> Tensor:
        """Make one optimizer step; return the last micro-batch's loss."""
        torch.backends.cuda.matmul.allow_tf32 = self._tf32  # probes of the host between steps have changed it
        loss = torch.zeros(())
        for number, tokens in enumerate(self._batches):
            last = number == len(self._batches) - 1
            with self._without_reduction(last):
                with self._precision():
                    loss = self._run(input_ids=tokens, labels=tokens).loss / len(self._batches)
                loss.backward()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def close(self) -> None:
        """Free what the run has left behind."""
        del self._run, self._model, self._parameters, self._optimizer
        torch.compiler.reset()
        gc.collect()

    def _without_reduction(self, last: bool) -> contextlib.AbstractContextManager[object]:
        """Let replicas reduce gradients behind the last micro-batch alone, as ``no_sync`` of Accelerate does."""
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(last or not self._adds_whole)
        if last or not isinstance(self._run, DistributedDataParallel):
            return contextlib.nullcontext()
        unsynced: contextlib.AbstractContextManager[object] = self._run.no_sync()
        return unsynced

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if not self._autocast:
            return contextlib.nullcontext()
        working: contextlib.AbstractContextManager[object] = torch.autocast(self._device.type, self._working)
        return working


TRAINER = TransformersTrainer

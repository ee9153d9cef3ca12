"""Limits of what of Hugging Face's transformers is simulated.

Models are told by their positions, activations, norms and sinks: learned positions mean GPT-2, rotary ones Llama's
kind, GeGLU Gemma, sinks gpt-oss. Norms behind blocks alone mean OLMo 2, and GELU beside rotary positions StarCoder 2.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulator.frameworks.limits import Limit, plain_layers

_LEARNED: Mapping[str, object] = {"model.position": "learned"}
_ROTARY: Mapping[str, object] = {"model.position": "rope"}
_SILU: Mapping[str, object] = {"model.activation": "swiglu"}
_GELU: Mapping[str, object] = {"model.activation": "gelu"}
_GEGLU: Mapping[str, object] = {"model.activation": "geglu"}
IN_FP32: Mapping[str, object] = {"training.precision": "fp32"}
_OLMO2: Mapping[str, object] = {**_SILU, "model.norm_place": "after"}
_STARCODER2: Mapping[str, object] = {**_ROTARY, **_GELU}
_COMPILED: Mapping[str, object] = {"framework.compile": True}
_SINKS: Mapping[str, object] = {"model.attention_sinks": True}
#: Keys of layers that have limits of their own.
PATTERNED = (
    *("model.mixers", "model.norm_place", "model.logit_softcap"),
    *("model.attention_sinks", "model.attention_softcap", "model.qk_norm_kind"),
)
#: Weights in fp32 that no ``fully_shard`` casts.
AUTOCAST: Mapping[str, object] = {"training.optimizer.master_weights": True, "parallelism.zero": 0}
LIMITS = (
    *(
        limit
        for limit in plain_layers(
            "layers of Hugging Face's models", "attention and norms of Llama, OLMo 2, Gemma 2 and 3, gpt-oss or GPT-2"
        )
        if limit.key not in PATTERNED
    ),
    Limit("model.mixers", ("attention", "window"), "layers attend to all tokens before or to a window", each=True),
    Limit(
        "model.norm_place", ("before", "after"), "norms before and behind blocks are Gemma's, which GeGLU means", _SILU
    ),
    Limit("model.norm_place", ("before", "both"), "norms behind blocks alone are OLMo 2's, which has SiLU", _GEGLU),
    Limit("model.norm_place", ("before",), "GPT-2 and StarCoder 2, which GELU means, have norms before blocks", _GELU),
    Limit("model.qk_norm_kind", ("head", "width"), "norms of queries and keys have weights"),
    *(
        Limit("model.qk_norm_kind", ("head",), "norms of the whole width are OLMo 2's, behind blocks", {key: place})
        for key, place in (("model.norm_place", "before"), ("model.norm_place", "both"))
    ),
    Limit("model.qk_norm", (True,), "OLMo 2, which norms behind blocks mean, has norms of queries and keys", _OLMO2),
    Limit("model.qk_norm_kind", ("width",), "OLMo 2, which norms behind blocks mean, norms the whole width", _OLMO2),
    Limit("model.moe", (None,), "OLMo 2, which norms behind blocks mean, has no experts", _OLMO2),
    Limit("model.activation", ("gelu", "swiglu"), "Gemma, which GeGLU means, is not simulated here", AUTOCAST),
    Limit("parallelism.tp", (1,), "tensor parallelism of Hugging Face's models (by DTensor) is not simulated"),
    Limit("parallelism.pp", (1,), "pipelines of Hugging Face's models are not simulated"),
    Limit("parallelism.cp", (1,), "context parallelism of Hugging Face's models is not simulated"),
    Limit("parallelism.zero", (0, 3), "replicas are torch's DistributedDataParallel (0) or fully_shard (3)"),
    Limit("model.moe", (None,), "experts with weights in fp32 are products in fp32, which is not simulated", AUTOCAST),
    Limit("parallelism.ep", (1,), "experts of Hugging Face's models are not spread over ranks here"),
    Limit("model.moe.shared_ffn_hidden", (None, 0), "experts are Mixtral's or Qwen3's, none of which all tokens pass"),
    Limit("model.moe.capacity_factor", (None,), "experts of Hugging Face's models take all tokens"),
    Limit("model.moe.router_dtype", (None, "bf16", "fp16"), "the router's product is in the working precision"),
    Limit("model.moe", (None,), "GPT-2, which learned positions mean, has no experts", _LEARNED),
    Limit("model.mla", (None,), "latent attention as transformers 5 runs it is not simulated"),
    Limit("model.mtp_layers", (0,), "Hugging Face's models do not train a prediction of several tokens"),
    Limit("model.attention_sinks", (False, True), "sinks are gpt-oss', whose layers all have them"),
    Limit("model.attention", ("unfused",), "gpt-oss, which sinks mean, has attention in steps alone (eager)", _SINKS),
    Limit("model.qk_norm", (False,), "gpt-oss, which sinks mean, has no norms of heads", _SINKS),
    Limit("model.attention_softcap", (None,), "caps are Gemma's, which GeGLU means", _SILU),
    Limit(
        "model.attention", ("flash",), "Phi-3's attention in steps is not simulated", {"model.joined_products": True}
    ),
    Limit("model.attention", ("flash",), "GPT-2's attention in steps is not simulated", _LEARNED),
    Limit("model.attention", ("flash",), "attention in steps is not simulated under torch.autocast", AUTOCAST),
    Limit("model.attention", ("flash",), "attention in steps (eager) is not simulated in fp32", IN_FP32),
    Limit("model.position", ("rope", "learned"), "its models are Llama's kind (rope) or GPT-2 (learned)"),
    Limit("model.norm", ("layernorm",), "GPT-2, which learned positions mean, has LayerNorm", _LEARNED),
    Limit("model.activation", ("gelu",), "GPT-2, which learned positions mean, has gelu_new", _LEARNED),
    Limit("model.qk_norm", (False,), "GPT-2, which learned positions mean, has no norms of heads", _LEARNED),
    *(
        Limit("model.norm", ("rmsnorm",), "models of Llama's kind, which rope and a gate mean, have RMSNorm", gated)
        for gated in ({**_ROTARY, **_SILU}, {**_ROTARY, **_GEGLU})
    ),
    Limit("model.norm", ("layernorm",), "StarCoder 2, which rope and GELU mean, has LayerNorm", _STARCODER2),
    Limit("model.qk_norm", (False,), "StarCoder 2, which rope and GELU mean, has no norms of heads", _STARCODER2),
    Limit("model.moe", (None,), "StarCoder 2, which rope and GELU mean, has no experts", _STARCODER2),
    Limit("model.attention", ("flash",), "StarCoder 2's attention in steps is not simulated", _STARCODER2),
    Limit(
        "model.activation",
        ("swiglu", "geglu", "gelu"),
        "models that rope means have SiLU with a gate (Llama's kind), or a GELU with one (Gemma) or without",
        _ROTARY,
    ),
    *(
        Limit("model.joined_products", (False,), "joined products are Phi-3's, which has SiLU and plain layers", where)
        for where in (_GEGLU, _STARCODER2, _LEARNED, _OLMO2, _SINKS, {"model.qk_norm": True})
    ),
    *(
        limit._replace(where={**limit.where, **where})
        for where in (AUTOCAST, IN_FP32, _COMPILED)
        for limit in (
            Limit("model.joined_products", (False,), "joined products, Phi-3's, are simulated eager and in 16 bits"),
            Limit("model.norm_place", ("before", "both"), "OLMo 2 is simulated in 16 bits and eager alone"),
            Limit(
                "model.activation", ("swiglu", "geglu"), "StarCoder 2 is simulated in 16 bits and eager alone", _ROTARY
            ),
        )
    ),
    Limit("model.dropout", (0.0,), "models of Llama's kind, which rope means, have no dropout", _ROTARY),
    Limit("training.precision", ("bf16", "fp16", "fp32"), "transformers computes in 16 or 32 bits"),
    Limit("model.position", ("rope",), "GPT-2, which learned positions mean, is not simulated in fp32", IN_FP32),
    Limit("model.activation", ("gelu", "swiglu"), "Gemma, which GeGLU means, is not simulated in fp32", IN_FP32),
    Limit("model.sliding_window", (None,), "attention to windows is not simulated in fp32", IN_FP32),
    Limit("model.moe", (None,), "experts' products in fp32 are not simulated", IN_FP32),
    Limit("training.adapters", (None,), "adapters in fp32 are not simulated", IN_FP32),
    Limit("training.recompute.granularity", ("none", "full"), "gradient checkpointing is that of whole layers"),
    Limit("training.adapters", (None,), "adapters under torch.autocast are not simulated", AUTOCAST),
    Limit("training.freeze", (None,), "frozen weights under torch.autocast are not simulated", AUTOCAST),
    Limit("training.loss.name", ("eager", "compiled"), "torch.autocast is simulated with its own loss", AUTOCAST),
)

"""Layers by pattern: mixers and MLPs, what they need, and what they cannot run with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.model import BIASES
from simulator.errors import Bare, InputError
from simulator.input_files import brief
from simulator.mixers import MIXERS, Split

if TYPE_CHECKING:
    from simulator.config.model import Model
    from simulator.config.workload import Workload


#: Key of the model -> the mixers that read it.
_KEYS = {
    "sliding_window": ("window",),
    "window_heads": ("window",),
    "attention_chunk": ("chunked",),
    **{
        section: tuple(name for name, mixer in MIXERS.items() if mixer.section == section)
        for section in dict.fromkeys(mixer.section for mixer in MIXERS.values() if mixer.section)
    },
}
#: Widths of the model that a state-space layer may have inside, or a state, at most.
_MOST_WIDTHS = 64
#: Those of them without which a mixer is fine.
_OPTIONAL = ("window_heads",)


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield what is wrong with the pattern of a model's layers, and what its kinds of layers cannot run with."""
    model = workload.model
    wrong = [*_pattern_problems(model), *_mlp_problems(model)]
    yield from wrong
    if wrong:
        return
    yield from _bias_problems(model)
    yield from _attention_problems(workload)
    yield from _width_problems(model)
    yield from _stream_problems(model)
    yield from _edge_problems(workload)
    layout = workload.parallelism
    split = Split(layout.tp, layout.cp)
    for kind in model.kinds:
        if kind.refusals is not None:
            for refusal in kind.refusals(getattr(model, kind.section), split):
                yield InputError(refusal.message, key=refusal.key, found=refusal.value, allowed=refusal.allowed)
    if workload.training.recompute.granularity == "ops" and (unlike := _unlike_llama(workload)):
        yield InputError(
            "recomputation by operation is that of Llama's layers",
            key="training.recompute.granularity",
            found="ops",
            allowed=f"none, selective or full, beside {unlike}",
        )


def _width_problems(model: Model) -> Iterator[InputError]:
    """Yield state-space layers that are wider than any model's; Mamba 2's own are twice as wide as the model."""
    sizes = model.mamba2
    if sizes is None:
        return
    most = _MOST_WIDTHS * model.hidden
    for key, width in (("head_dim", sizes.heads * sizes.head_dim), ("state", sizes.state)):
        if width > most:
            what = "heads x head_dim" if key == "head_dim" else "a state"
            yield InputError(
                f"{what} is more than {_MOST_WIDTHS} times as wide as the model",
                key=f"model.mamba2.{key}",
                found=width,
                allowed=f"at most {most:,}",
            )


def _stream_problems(model: Model) -> Iterator[InputError]:
    """Yield what blocks that read several residual streams do not have."""
    if model.residual_streams == 1:
        return
    alone = (
        ("norm_place", model.norm_place, "before"),
        ("dropout", model.dropout, 0.0),
        ("mtp_layers", model.mtp_layers, 0),
    )
    for key, value, allowed in alone:
        if value != allowed:
            yield InputError(
                "is not simulated with several residual streams",
                key=f"model.{key}",
                found=value,
                allowed=f"{allowed}, or residual_streams: 1",
            )


def _edge_problems(workload: Workload) -> Iterator[InputError]:
    """Yield where layers cannot get parts of a second embedding, or keys of other layers."""
    model, layout = workload.model, workload.parallelism
    sections = [key for key in ("layer_inputs", "reused_keys") if getattr(model, key) is not None]
    if not sections:
        return
    for key, degree in (("pp", layout.pp), ("tp", layout.tp), ("cp", layout.cp)):
        if degree > 1:
            yield InputError(
                f"model.{sections[0]} is simulated on one rank, whose layers share it",
                key=f"parallelism.{key}",
                found=degree,
                allowed="1",
            )
    if model.mtp_layers or model.mla is not None or model.residual_streams > 1:
        yield InputError(
            "is simulated with plain attention in one residual stream",
            key=f"model.{sections[0]}",
            found=Bare("a section"),
            allowed="without mtp_layers, mla and residual_streams",
        )
    if model.reused_keys is None:
        return
    missing = _kinds_without_lender(model, model.reused_keys.layers)
    if missing or not all(kind.attends for kind in model.kinds):
        most = max(
            (n for n in range(min(model.reused_keys.layers, model.layers)) if not _kinds_without_lender(model, n)),
            default=0,
        )
        yield InputError(
            f"no layer of kind {missing[0]} before lends its keys" if missing else "is of layers of attention alone",
            key="model.reused_keys.layers",
            found=model.reused_keys.layers,
            allowed=f"at most {most}" if missing and most else "no model.reused_keys",
            fix=f"reused_keys: {{layers: {most}}}" if missing and most else "reused_keys: null",
        )


def _kinds_without_lender(model: Model, reused: int) -> list[str]:
    """Return the kinds of the last ``reused`` layers that no layer before these is of."""
    kinds = [model.mixer(layer).name for layer in range(model.layers)]
    first = max(model.layers - reused, 0)
    return [kind for kind in kinds[first:] if kind not in kinds[:first]]


def _pattern_problems(model: Model) -> Iterator[InputError]:
    """Yield patterns longer than the model, mixers without their sizes, and sizes without their mixer."""
    for key, pattern in (("mixers", model.mixers), ("mlps", model.mlps)):
        if pattern is not None and len(pattern) > model.layers:
            yield InputError(
                f"says more than the model's {model.layers} layers",
                key=f"model.{key}",
                found=Bare(f"{len(pattern)} entries"),
                allowed=f"at most {model.layers}; a shorter list begins anew",
            )
            return
    names = [kind.name for kind in model.kinds]
    for key, kinds in _KEYS.items():
        present = getattr(model, key) is not None
        read_by = [name for name in names if name in kinds]
        if present and not read_by:
            yield InputError(
                "no layer of the model reads it",
                key=f"model.{key}",
                found=brief(getattr(model, key)) if key != "window_heads" else Bare("a section"),
                allowed=f"left out, or {' or '.join(kinds)} among model.mixers",
            )
        elif not present and read_by and key not in _OPTIONAL:
            yield InputError(
                f"layers of kind {' and '.join(read_by)} need it",
                key=f"model.{key}",
                found=Bare("nothing"),
            )
    if names == ["none"]:
        yield InputError(
            "in no layer do tokens act on each other", key="model.mixers", found=["none"], allowed=", ".join(MIXERS)
        )
    if "sparse" in names and (model.mla is None or not model.mla.q_lora_rank):
        yield InputError(
            "an indexer reads the compressed queries of latent attention",
            key="model.indexer",
            found=Bare("a section"),
            allowed="beside model.mla with a q_lora_rank",
        )


def _mlp_problems(model: Model) -> Iterator[InputError]:
    """Yield patterns of MLPs that do not fit the experts, and layers without any block."""
    if model.qk_norm_kind != "head" and not model.qk_norm:
        yield InputError(
            "has no meaning without norms of queries and keys",
            key="model.qk_norm_kind",
            found=model.qk_norm_kind,
            fix="qk_norm: true",
        )
    if model.mlps is None:
        return
    for layer in range(model.layers):
        if model.mixer(layer).name == "none" and model.mlp(layer) == "none":
            yield InputError(
                f"layer {layer} has neither a mixer nor an MLP", key="model.mlps", found="none", allowed="dense, moe"
            )
            return
    if model.moe is None and "moe" in model.mlps:
        yield InputError("the model has no experts", key="model.mlps", found="moe", allowed="dense, none; or model.moe")
    elif model.moe is not None and "moe" not in map(model.mlp, range(model.layers)):
        yield InputError(
            "leaves no layer for the experts", key="model.mlps", found=list(model.mlps), allowed="moe among them"
        )
    elif model.moe is not None and (model.moe.first_dense_layers or model.moe.every > 1):
        key = "first_dense_layers" if model.moe.first_dense_layers else "every"
        yield InputError(
            "model.mlps says which layers have experts",
            key=f"model.moe.{key}",
            found=getattr(model.moe, key),
            allowed="left out, beside model.mlps",
        )


def _bias_problems(model: Model) -> Iterator[InputError]:
    """Yield a list of biases that says otherwise than ``bias`` does."""
    if {"bias", "biases"} <= model.model_fields_set and (
        set(model.biases) != set(BIASES) if model.bias else model.biases
    ):
        yield InputError(
            "model.biases says which linear layers have biases",
            key="model.bias",
            found=brief(model.bias),
            allowed="left out, beside model.biases",
        )
    if model.moe is not None and model.moe.shared_gate and not model.moe.shared_experts:
        yield InputError(
            "there are no shared experts", key="model.moe.shared_gate", found=brief(True), fix="shared_experts: 1"
        )


#: Forms of attention that most frameworks have in fused kernels alone.
FUSED_FORMS = ("attention_sinks", "attention_softcap", "indexer")


def _attention_problems(workload: Workload) -> Iterator[InputError]:
    """Yield forms of attention that kernels or a split do not have."""
    model, layout = workload.model, workload.parallelism
    fused = [key for key in FUSED_FORMS if key not in workload.software.forms_in_steps]
    forms = [key for key in fused if getattr(model, key)]
    if model.attention != "flash" and forms:
        yield InputError(
            f"model.{forms[0]} is simulated in fused kernels",
            key="model.attention",
            found=model.attention,
            allowed="flash",
            fix="attention: flash",
        )
    if model.attention_sinks and layout.cp > 1:
        yield InputError(
            "sinks are of heads that see whole sequences", key="parallelism.cp", found=layout.cp, allowed="1"
        )
    if model.qk_norm and model.qk_norm_kind == "width" and layout.tp > 1:
        yield InputError(
            "a norm over the width of all heads needs them on one rank",
            key="parallelism.tp",
            found=layout.tp,
            allowed="1, or qk_norm_kind: head",
        )
    if model.keys_as_values and not _norms_both(model):
        yield InputError(
            "values that are keys are as wide, and both have norms of heads",
            key="model.keys_as_values",
            found=brief(True),
            allowed="beside value_norm: true and qk_norm: true, and a v_head_dim that is head_dim",
        )
    if model.mla is not None:
        alone = (
            ("value_norm", model.value_norm),
            ("keys_as_values", model.keys_as_values),
            ("attention_gate", model.attention_gate),
            ("window_heads", model.window_heads is not None),
            ("v_head_dim", model.v_head_dim != model.head_dim),
        )
        for key in (key for key, present in alone if present):
            yield InputError(
                "latent attention has heads of its own", key=f"model.{key}", found=Bare("given"), allowed="left out"
            )
    yield from _window_head_problems(workload)


def _norms_both(model: Model) -> bool:
    """Tell whether keys and values have norms of heads of one width."""
    both = model.value_norm and model.qk_norm and model.qk_norm_kind == "head"
    return both and model.head_dim == model.v_head_dim


def _window_head_problems(workload: Workload) -> Iterator[InputError]:
    """Yield heads of windows that do not split."""
    model, layout = workload.model, workload.parallelism
    window = next((layer for layer in range(model.layers) if model.mixer(layer).name == "window"), None)
    if model.window_heads is None or window is None:
        return
    heads = model.heads_of(window)
    if heads.heads % heads.kv_heads:
        yield InputError(
            f"heads {heads.heads} does not divide by it", key="model.window_heads.kv_heads", found=heads.kv_heads
        )
    elif heads.heads % layout.tp or (heads.kv_heads % layout.tp and layout.tp % heads.kv_heads):
        yield InputError(
            f"{heads.heads} query and {heads.kv_heads} KV heads of windows do not split over it",
            key="parallelism.tp",
            found=layout.tp,
        )
    if layout.cp > 1:
        yield InputError("heads of windows are not spread over cp", key="parallelism.cp", found=layout.cp, allowed="1")


def _unlike_llama(workload: Workload) -> str:
    """Return a key by which layers differ from Llama's in what their operations are; empty: none."""
    model, training = workload.model, workload.training
    unlike = (
        ("model.mlps", model.mlps is not None),
        ("model.norm_place", model.norm_place != "before"),
        ("model.attention_gate", model.attention_gate),
        ("model.mixers", any(kind.operations is not None for kind in model.kinds)),
        ("model.residual_streams", model.residual_streams > 1),
        ("model.layer_inputs", model.layer_inputs is not None),
        ("model.reused_keys", model.reused_keys is not None),
        ("training.adapters", training.adapters is not None),
        ("training.base", training.base not in (None, training.precision)),
    )
    return next((key for key, present in unlike if present), "")

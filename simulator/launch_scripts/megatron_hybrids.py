"""Megatron-LM's models whose layers are each a state-space layer, attention, an MLP or experts (`pretrain_mamba.py`).

A sign per layer says which (megatron/core/ssm, `Symbols`). Sizes that no option says are those of its `MambaMixer`.
"""

from __future__ import annotations

from simulator.config.hugging_face.state_space import SIGNS, single_parts
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.launch_scripts.script import ScriptReading, is_off

_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
#: Options of such models that say less than a pattern, and nothing beside one.
_RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
#: Options of models whose layers differ in a way that no pattern of signs says.
_UNREAD = (
    "experimental_attention_variant",
    "linear_attention_type",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
#: Option -> key of the workload, and Megatron-LM's default.
_SIZES = {
    "mamba_head_dim": ("model.mamba2.head_dim", 64),
    "mamba_state_dim": ("model.mamba2.state", 128),
    "mamba_num_groups": ("model.mamba2.groups", 8),
}
#: Key of the workload -> what `MambaMixer` has by default: no option says it.
_FIXED = {"model.mamba2.conv_width": 4, "model.mamba2.chunk": 128}
_FIX = "a workload file with model.mixers and model.mlps, or model.preset or model.hf_config"


def put_pattern(reading: ScriptReading) -> None:
    """Put which layer is what, where a pattern says it; nothing where all layers are attention with an MLP.

    Raises `InputError` where layers are of several kinds and no pattern that is known here says of which.
    """
    for option in _UNREAD:
        _refuse(reading, option)
    option, pattern = reading.first_of(*_PATTERNS)
    if is_off(pattern):
        for switch in ("is_hybrid_model", *_RATIOS):
            _refuse(reading, switch)
        spec = str(reading.look("spec", "")).lower()
        if "mamba" in spec or "hybrid" in spec:
            _refuse(reading, "spec")
        return
    names = _names(reading, option, str(pattern).replace("\\", ""))
    parts = single_parts(names)
    reading.workload.setdefault("model", {}).setdefault("layers", len(names))
    for key, value in parts.items():
        reading.put(f"model.{key}", value, option)
    reading.leave("is_hybrid_model", "spec", *_PATTERNS, *_RATIOS)
    if "mamba2" in parts["mixers"]:
        _sizes(reading)
    else:
        reading.leave(*_SIZES, "mamba_num_heads")


def _names(reading: ScriptReading, option: str, pattern: str) -> list[str]:
    """Return the name of each layer of a pattern. Raises `InputError` on other signs, or another number of layers."""
    if unknown := sorted({*pattern} - {*SIGNS}):
        allowed = ", ".join(f"{sign} ({name})" for sign, name in SIGNS.items())
        raise InputError(
            "has signs of layers that are not simulated, or cuts layers into stages",
            file=reading.path,
            key=option,
            found=brief("".join(unknown)),
            allowed=allowed,
            fix=_FIX,
        )
    layers = reading.number("num_layers")
    if layers is not None and layers != len(pattern):
        raise InputError(
            f"has {len(pattern)} signs", file=reading.path, key=option, found=brief(pattern), allowed=f"{layers} signs"
        )
    return [SIGNS[sign] for sign in pattern]


def _sizes(reading: ScriptReading) -> None:
    """Put the sizes of state-space layers; heads together are twice as wide as the model unless the script says it."""
    widths = {}
    for option, (key, default) in _SIZES.items():
        width = reading.take(option, key)
        widths[option] = default if width is None else width
        if width is None:
            reading.assume(key, default, f"Megatron-LM's default of {option}")
    if reading.take("mamba_num_heads", "model.mamba2.heads") is None:
        heads = 2 * (reading.number("hidden_size") or 0) // max(widths["mamba_head_dim"], 1)
        reading.assume("model.mamba2.heads", heads, "twice the model's width, Megatron-LM's default of mamba_num_heads")
    for key, value in _FIXED.items():
        reading.assume(key, value, "as Megatron-LM's MambaMixer has it")


def _refuse(reading: ScriptReading, option: str) -> None:
    """Raise `InputError` where an option of models with several kinds of layers is on."""
    value = reading.look(option)
    if not is_off(value) and str(value) not in ("0", "0.0"):
        message = "has layers of other kinds, which no pattern of signs says"
        raise InputError(message, file=reading.path, key=option, found=brief(value), fix=_FIX)

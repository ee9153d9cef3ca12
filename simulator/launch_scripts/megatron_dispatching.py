"""How Megatron-LM's experts get their tokens (`megatron/training/arguments.py`, `transformer_config.py`)."""

from __future__ import annotations

from simulator.config.presets import presets
from simulator.launch_scripts.script import ScriptReading

_TYPE, _BACKEND, _OLD_BACKEND = "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"
_FUSION = "moe_permute_fusion"
_KEY, _FUSION_KEY = "parallelism.dispatcher", "training.fused_permutation"
#: --moe-token-dispatcher-type, and --moe-flex-dispatcher-backend of flex -> ours.
_DISPATCHERS = {"alltoall": "all_to_all", "allgather": "all_gather"}
_BACKENDS = ("deepep", "hybridep")
_DEFAULT_TYPE, _DEFAULT_BACKEND = "allgather", "deepep"


def put_dispatcher(reading: ScriptReading, *, by_default: bool) -> None:
    """Put the dispatcher of tokens to experts, and whether its permutation is fused.

    ``by_default``: where the file is silent, Megatron-LM's defaults hold.
    """
    if not has_experts(reading):
        return
    local = reading.workload.get("framework") == "megatron_core_local"
    dispatcher = _dispatcher(reading, local=local, by_default=by_default)
    if local:
        if reading.flag(_FUSION):
            reading.ignore(_FUSION, "local modules permute by PyTorch's kernels here")
    elif reading.look(_FUSION) is None and not by_default:
        return
    elif dispatcher == "all_to_all" or reading.flag(_FUSION):
        reading.switch(_FUSION_KEY, _FUSION)
    else:
        why = f"PyTorch's kernels of a script without {_FUSION} are not simulated around {dispatcher}"
        reading.assume(_FUSION_KEY, True, why)


def has_experts(reading: ScriptReading) -> bool:
    """Return whether the model that was put has experts."""
    model = reading.workload.get("model", {})
    return "moe" in model or "moe" in presets().get(model.get("preset"), {})


def _dispatcher(reading: ScriptReading, *, local: bool, by_default: bool) -> str:
    """Put the dispatcher, and return the one that is simulated. One that makes no difference is left out."""
    dispatcher, options = _asked(reading, by_default=by_default)
    if dispatcher == "all_to_all" or dispatcher is None:
        if options:
            reading.put(_KEY, "all_to_all", *options)
        return "all_to_all"
    layout = reading.workload["parallelism"]
    if local or layout.get("etp", layout.get("tp", 1)) > 1:
        why = "is simulated neither with local modules nor with experts that tensor parallelism splits"
        for option in options:
            reading.ignore(option, f"{dispatcher} {why}")
        if not options:
            reading.assume(_KEY, "all_to_all", f"Megatron-LM's default {dispatcher} {why}")
        return "all_to_all"
    if layout.get("ep", 1) == 1:
        reading.leave(*options)
        return "all_to_all"
    if options:
        reading.put(_KEY, dispatcher, *options)
    else:
        reading.assume(_KEY, dispatcher, f"Megatron-LM's default of {_TYPE}")
    return dispatcher


def _asked(reading: ScriptReading, *, by_default: bool) -> tuple[str | None, tuple[str, ...]]:
    """Return the dispatcher that Megatron-LM would run, and the options that say so; None: none that is known here."""
    kind = reading.look(_TYPE)
    if kind is None:
        return _DISPATCHERS[_DEFAULT_TYPE] if by_default and _TYPE not in reading.options else None, ()
    if kind != "flex":
        name = _DISPATCHERS.get(str(kind).lower())
        return name, () if name is None else (_TYPE,)
    backend = reading.look(_BACKEND)
    if backend in _BACKENDS:
        return str(backend), (_TYPE, _BACKEND)
    if backend is not None:
        reading.ignore(_TYPE, f"its backend is none of {', '.join(_BACKENDS)}")
        return None, ()
    if reading.flag(_OLD_BACKEND):
        return _DEFAULT_BACKEND, (_TYPE, _OLD_BACKEND)
    reading.assumed.append(f"{_BACKEND}: {_DEFAULT_BACKEND}, Megatron-LM's default")
    return _DEFAULT_BACKEND, (_TYPE,)

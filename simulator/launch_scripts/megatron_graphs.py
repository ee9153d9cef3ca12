"""CUDA graphs, as Megatron-LM's options ask for them (docs/user-guide/features/cuda_graph.md)."""

from __future__ import annotations

from simulator.config.cuda_graphs import PARTS_OF_LAYERS, GraphPart, parts_in_model
from simulator.config.presets import expand_model
from simulator.launch_scripts.script import ScriptReading, words_of

_KEY = "framework.cuda_graphs"
_IMPL, _MODULES = "cuda_graph_impl", ("cuda_graph_modules", "cuda_graph_scope")
#: Older switches -> the implementation that they mean.
_SWITCHES = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
_DETAILS = ("cuda_graph_warmup_steps", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph")


def put_graphs(reading: ScriptReading) -> None:
    """Put the parts of layers that graphs hold, or the whole step. Without a list these are all that layers have."""
    switch = reading.first_on(*_SWITCHES)
    option, implementation = (switch, _SWITCHES[switch]) if switch else (_IMPL, reading.look(_IMPL, "none"))
    listed, named = reading.first_of(*_MODULES)
    modules = words_of(named) if named is not None else []
    options = [option, *([listed] if named is not None else [])]
    if implementation == "none":
        reading.leave(_IMPL, *_MODULES, *_DETAILS)
        return
    reading.leave(*_DETAILS)
    framework = reading.workload.get("framework")
    if GraphPart.WHOLE_STEP in (implementation, *modules):
        parts = [str(GraphPart.WHOLE_STEP)]
    else:
        parts = [part for part in modules if part in PARTS_OF_LAYERS] if modules else _parts_in_model(reading)
    if not parts or set(modules) - {*GraphPart}:
        for one in options:
            reading.ignore(one, f"graphs of {', '.join(modules)} are not simulated")
        return
    reading.workload["framework"] = {"name": framework or "megatron_core"}
    reading.put(_KEY, parts, *options)


def _parts_in_model(reading: ScriptReading) -> list[str]:
    """Return the parts that graphs can hold of the model that was put."""
    model = expand_model(reading.workload["model"], base=None, origin=lambda key: (reading.path, key))
    moe = model.get("moe")
    mlps = model.get("mlps") or ["dense" if moe is None else "moe"]
    if moe and "mlps" not in model and (moe.get("first_dense_layers") or moe.get("every", 1) > 1):
        mlps = ["dense", "moe"]
    return [str(part) for part in parts_in_model(model.get("mixers") or ["attention"], mlps)]

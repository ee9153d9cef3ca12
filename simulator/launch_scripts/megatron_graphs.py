"""CUDA graphs, as Megatron-LM's options ask for them (docs/user-guide/features/cuda_graph.md)."""

from __future__ import annotations

from simulator.launch_scripts.megatron_dispatching import has_experts
from simulator.launch_scripts.script import ScriptReading, words_of

_KEY = "framework.cuda_graphs"
_IMPL, _MODULES = "cuda_graph_impl", ("cuda_graph_modules", "cuda_graph_scope")
#: Older switches -> the implementation that they mean.
_SWITCHES = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
_DETAILS = ("cuda_graph_warmup_steps", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph")
_WHOLE = "full_iteration"
#: Parts of layers that graphs can hold here.
_PARTS = ("attn", "mlp", "moe_router", "moe_preprocess", "mamba")


def put_graphs(reading: ScriptReading) -> None:
    """Put the parts of layers that graphs hold; without a list of them all that the model has, or the whole step."""
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
    if implementation == _WHOLE or _WHOLE in modules:
        parts = [_WHOLE]
    else:
        usual = ["attn", "moe_router", "moe_preprocess"] if has_experts(reading) else ["attn", "mlp"]
        parts = [part for part in modules if part in _PARTS] if modules else usual
    if not parts or set(modules) - {*_PARTS, _WHOLE}:
        for one in options:
            reading.ignore(one, f"graphs of {', '.join(modules)} are not simulated")
        return
    reading.workload["framework"] = {"name": framework or "megatron_core"}
    reading.put(_KEY, parts, *options)

"""Words of advice: settings as a user writes them, and what to know before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.input_files import as_options, brief

#: Dotted key -> what a user should know before setting it: much less speed, or another numerical result.
CAVEATS = {
    "training.global_batch": "a larger batch",
    "parallelism.offload.activations": "slower: they cross PCIe in every pass",
    "parallelism.offload.optimizer": "slower: CPUs update the weights",
    "parallelism.offload.parameters": "slower: they cross PCIe in every pass",
    "training.optimizer.state_dtype": "changes the numerics",
    "training.optimizer.master_weights": "changes the numerics",
    "training.grad_dtype": "changes the numerics",
}


def setting_words(setting: Mapping[str, Any]) -> str:
    """Return a single key as it stands in a file, and several as they are typed behind a command."""
    if len(setting) > 1:
        return as_options(setting)
    return "".join(f"{key}: {value if isinstance(value, str) else brief(value)}" for key, value in setting.items())


def setting_caveats(setting: Mapping[str, Any]) -> str:
    """Return what a user should know before changing ``setting``, in brackets; empty where there is nothing."""
    caveats = dict.fromkeys(CAVEATS[key] for key in setting if key in CAVEATS)
    return f" ({'; '.join(caveats)})" if caveats else ""

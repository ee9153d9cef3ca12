"""A model as people name it: a shipped one, an id of Hugging Face, or a config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.config.presets import nearest_preset, presets
from simulator.errors import InputError
from simulator.input_files import as_path, read_json
from simulator.launch_scripts.models import preset_of

CONFIG = "config.json"


def model_section(text: str) -> dict[str, Any]:
    """Return the section ``model`` that a name, an id or a path means. Raises `InputError` where it means none.

    >>> model_section("llama3-8b"), model_section("meta-llama/Llama-3.1-8B")
    ({'preset': 'llama3-8b'}, {'preset': 'llama3-8b'})
    """
    if text in presets():
        return {"preset": text}
    path = as_path(text, file="model")
    if path.is_dir() and (path / CONFIG).is_file():
        path = path / CONFIG
    if path.suffix == ".json":
        if path.is_file() and "widest_split" in read_json(path):
            raise InputError(
                "is a captured model, whose file says how it is trained",
                file="model",
                found=text,
                fix=f"a file with model: {{captured: {path}}}, global_batch and cluster (docs/how-to/your-model.md)",
            )
        return {"hf_config": str(path)}
    if (preset := preset_of(text)) is not None:
        return {"preset": preset}
    message, near = "is no shipped model", nearest_preset(Path(text).name)
    fix = f"{near}, or the path of the model's {CONFIG}" if near else f"the path of the model's {CONFIG}"
    raise InputError(message, file="model", found=text, allowed="llmsim list models", fix=fix)

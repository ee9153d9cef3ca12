"""Published models: their config.json loads with every parameter, and plays in the layouts that it can have."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simulator.api import run
from simulator.config import Workload, load_workload, presets
from simulator.config.hugging_face import ARCHITECTURES, from_hugging_face
from simulator.engine.invariants import check
from simulator.errors import InputError
from simulator.input_files import read_yaml
from simulator.models import model_weights, parameters
from tests.support.unadvised import without_advice  # noqa: F401

MODELS = read_yaml(Path(__file__).with_name("huggingface_models.yaml"))
#: One model of each architecture.
ONE_EACH = {row["config"]["model_type"]: name for name, row in reversed(MODELS.items())}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "pp": 2, "dp": 2},
    "zero3": {"dp": 4, "zero": 3},
    "split backward": {"pp": 2, "dp": 2, "schedule": "zb_h1"},
    "ep": {"dp": 4, "ep": 2},
    "cp": {"cp": 2, "cp_method": "ulysses", "dp": 2},
}
RECOMPUTE = ("none", "full", "selective")
#: What some architectures are refused in, by the beginning of the message.
REFUSED = (
    r"parallelism.tp: a norm over the width of all heads needs them on one rank",  # OLMo, MiniMax
    r"parallelism.cp: (heads of windows are not spread|sinks are of heads|an indexer chooses|the state of \w+ passes)",
    r"parallelism.cp: keys are compressed over whole sequences",  # DeepSeek-V4
    r"parallelism.tp: attention with one head of keys is not split",  # DeepSeek-V4
    r"parallelism.\w+: model.layer_inputs is simulated on one rank",  # Gemma 4's E2B and E4B
    r"parallelism.ep: the model has no experts",
    r"parallelism.tp: does not divide model.mamba2.groups 1",  # Granite 4, Bamba
    r"training.recompute: selective computes core_attn again, of which the model has none",  # DeepSeek-V4
    r"training.recompute.modules: the model has no such modules",  # Mamba 2 has no attention to recompute
)


def job(fields: dict[str, Any], **more: Any) -> Workload:
    training = {"seq": 1024, "global_batch": 8, **more.pop("training", {})}
    return load_workload(
        {"model": {"vocab_multiple": 1, **fields}, "training": training, "cluster": "dgx_h100", "name": "model", **more}
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_counted(name: str) -> None:
    """GPT-2's table of positions has 1,024 rows, which is the sequence here."""
    fields = from_hugging_face(MODELS[name]["config"], name)
    assert parameters(job(fields)) == MODELS[name]["parameters"]


@pytest.mark.parametrize("name", [name for name, keys in presets().items() if "config.json of" in keys["source"]])
def test_presets_have_the_parameters_of_their_file(name: str) -> None:
    source = presets()[name]["source"].removeprefix("config.json of ")
    assert parameters(job({"preset": name})) == MODELS[source]["parameters"]


def test_the_table_is_of_many_architectures() -> None:
    """Every one that is read but for Granite's mixture with a shared MLP, whose layers Granite 4 has too."""
    assert len(MODELS) >= 60
    assert set(ARCHITECTURES) - set(ONE_EACH) == {"granitemoeshared"}


def _per_layer(names: list[tuple[str, int]]) -> Counter[str]:
    """Return the elements of the weights by layer; what stands outside of layers under an empty number."""
    counts: Counter[str] = Counter()
    for name, elements in names:
        found = re.search(r"(?:layers|h)\.(\d+)\.", name)
        counts[found[1] if found else ""] += elements
    return counts


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in list(ONE_EACH.values())[::2] else pytest.mark.slow) for name in MODELS],
)
def test_every_layer_has_the_weights_that_transformers_gives_it(name: str) -> None:
    """Kimi K2 has DeepSeek-V3's class under another name. `make test` has every other architecture, one model of each;
    the count of all parameters is of all models."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = {key: value for key, value in MODELS[name]["config"].items() if key != "model_type"}
    kind = MODELS[name]["config"]["model_type"].replace("kimi_k2", "deepseek_v3")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    ours = job(from_hugging_face(MODELS[name]["config"], name))
    assert _per_layer([(weight.name, weight.whole_elements) for weight in model_weights(ours)]) == _per_layer(
        [(weight, tensor.numel()) for weight, tensor in theirs.named_parameters()]
    )


def _shortened(name: str) -> dict[str, Any]:
    """Return the model with as few layers as its pattern allows, at least four, for two stages."""
    fields = from_hugging_face(MODELS[name]["config"], name)
    period = max(len(fields.get("mixers", [1])), len(fields.get("mlps", [1])))
    if fields["layers"] > 12 >= period:
        fields["layers"] = next(count for count in range(4, 26) if count % period == 0 and count % 2 == 0)
    if fields["layers"] % 2:
        fields["layers"] -= 1
        fields |= {key: fields[key][: fields["layers"]] for key in ("mixers", "mlps") if key in fields}
    if "first_dense_layers" in fields.get("moe", {}):
        fields["moe"]["first_dense_layers"] = 1
    return fields


CASES = [(kind, layout) for kind in ONE_EACH for layout in LAYOUTS]
#: The other architectures than those whose layers `make test` compares with transformers', in the layouts in turn.
SAMPLE = [(kind, list(LAYOUTS)[number % len(LAYOUTS)]) for number, kind in enumerate(list(ONE_EACH)[1::2])]


@pytest.mark.usefixtures("without_advice")
@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES]
)
def test_an_architecture_plays_or_is_refused_with_a_reason(kind: str, layout: str) -> None:
    """What is played can have happened. Recomputation goes through its kinds in turn."""
    number = CASES.index((kind, layout))
    recompute = RECOMPUTE[(number + number // len(LAYOUTS)) % len(RECOMPUTE)]
    fields = {key: value for key, value in _shortened(ONE_EACH[kind]).items() if key != "vocab"}
    training = {"recompute": recompute, "seq": 2048}
    try:
        workload = job(fields | {"vocab": 32000}, parallelism=LAYOUTS[layout], training=training)
    except InputError as error:
        refused = str(error)
        assert any(re.match(says, refused) for says in REFUSED), refused
        return
    result = run(workload)
    check(result.program, result.played)
    report = result.to_dict()
    assert report["params_total"] >= report["params_active"] > 0
    assert 0 < report["model_flops_per_step_causal"] <= report["model_flops_per_step"]


def test_a_file_of_a_model_with_an_encoder_names_its_text_model(tmp_path: Path) -> None:
    """The text model stands in a section of the file, which its key names."""
    text = MODELS["meta-llama/Llama-4-Scout-17B-16E"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mllama", "text_config": text["config"], "vision_config": {}}))
    with pytest.raises(InputError, match=r"text_config: the model has an encoder(.|\n)*config\.json#text_config"):
        job({"hf_config": str(path)})
    assert parameters(job({"hf_config": f"{path}#text_config"})) == text["parameters"]
    with pytest.raises(InputError, match="thinker: no such section"):
        job({"hf_config": f"{path}#thinker"})

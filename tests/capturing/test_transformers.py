"""Models of transformers, captured as they are, beside the models that are built in here."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import simulator
from simulator.capturing.entry import capture_made
from simulator.config import load_workload
from simulator.models import (
    hardware_flops_per_step,
    head,
    layer,
    model_flops_per_step_causal,
    parameters,
    trained_parameters,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # importing a model of transformers takes seconds

ROOT = Path(__file__).resolve().parents[2]
SEQ, BATCH, WIDTH, HEADS, KV_HEADS = 128, 2, 256, 8, 4
ROWS = SEQ * BATCH
LLAMA = {
    **{"layers": 2, "hidden": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "ffn_hidden": 512, "vocab": 1000},
    **{"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
}
CONFIG = {
    **{"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
    **{"intermediate_size": 512, "vocab_size": 1000},
}
#: Bytes of what every kernel of attention keeps of its random numbers, and of one number in fp32 for each row.
SEEDS, PER_ROW = 24, 4 * ROWS


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**CONFIG, head_dim=32, tie_word_embeddings=True))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=WIDTH, n_head=HEADS, vocab_size=1000, n_positions=SEQ))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**CONFIG, num_local_experts=4))


#: Model -> the keys of the built-in one, and the bytes of small tensors that this leaves out of a layer. They are the
#: deviations of norms (GPT-2's means too), and of each head of Qwen3. Mixtral's also order tokens by expert.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], int | None]] = {
    "llama": (llama, LLAMA, 2 * PER_ROW + SEEDS),
    "qwen3": (
        qwen3,
        {**LLAMA, "head_dim": 32, "qk_norm": True, "tied_embeddings": True},
        (2 + HEADS + KV_HEADS) * PER_ROW + SEEDS,
    ),
    "gpt2": (gpt2, {"layers": 2, "hidden": WIDTH, "heads": HEADS, "vocab": 1000, "dropout": 0.1}, 4 * PER_ROW + SEEDS),
    "mixtral": (mixtral, {**LLAMA, "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 512}}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_captured_model_is_the_built_in_one(name: str, tmp_path: Path) -> None:
    make, sizes, left_out = CASES[name]
    with torch.device("meta"):
        module = make()
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    model = simulator.capture(module, inputs, dtype="bf16")
    model.save(tmp_path / "model.json")
    common = {"cluster": "dgx_h100", "framework": "hugging_face"}
    job = load_workload(
        {**common, "model": {"captured": str(tmp_path / "model.json")}, "training": {"global_batch": 2}}
    )
    built_in = load_workload(
        {**common, "model": sizes, "training": {"seq": SEQ, "micro_batch": BATCH, "global_batch": 2}}
    )
    assert model.layers == (1, 1)
    assert parameters(job) == parameters(built_in) == sum(weight.numel() for weight in module.parameters())
    assert model_flops_per_step_causal(job) == model_flops_per_step_causal(built_in)
    assert hardware_flops_per_step(job) == hardware_flops_per_step(built_in)
    more = layer(job).saved_bytes - layer(built_in).saved_bytes
    if left_out is None:
        assert 0 < more < 0.01 * layer(built_in).saved_bytes
    else:
        assert more == left_out
    # Behind the layers: the norm's deviations, the targets, and the sum of their weights.
    norms = 2 if name == "gpt2" else 1
    assert head(job).saved_bytes - head(built_in).saved_bytes == norms * PER_ROW + 8 * ROWS + 4


@pytest.mark.parametrize("targets", [["q", "v"], ["q", "k", "v", "o", "gate", "up", "down"]], ids=len)
def test_adapters_of_a_captured_llama_are_the_built_in_ones(targets: list[str], tmp_path: Path) -> None:
    """All layers but the first, of whose input the captured one has no gradient, as autograd takes none."""
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with torch.device("meta"):
        module = llama()
    adapters = {"rank": 16, "targets": [f"{name}_proj" for name in targets]}
    model = simulator.capture(
        module, {"input_ids": ids, "labels": ids, "use_cache": False}, dtype="bf16", adapters=adapters
    )
    model.save(tmp_path / "model.json")
    common = {"cluster": "dgx_h100", "framework": "hugging_face"}
    job = load_workload(
        {**common, "model": {"captured": str(tmp_path / "model.json")}, "training": {"global_batch": 2}}
    )
    training = {"seq": SEQ, "micro_batch": BATCH, "global_batch": 2, "adapters": {"rank": 16, "targets": targets}}
    built_in = load_workload({**common, "model": LLAMA, "training": training})
    assert (parameters(job), trained_parameters(job)) == (parameters(built_in), trained_parameters(built_in))
    first, second = layer(job, number=1), layer(built_in, number=1)
    for way in ("forward", "backward"):
        recorded, expected = (
            sum(op.kernel.flops for op in getattr(part, way) if hasattr(op, "kernel")) for part in (first, second)
        )
        assert recorded == expected
    assert first.saved_bytes - second.saved_bytes == 2 * PER_ROW + SEEDS


@pytest.mark.parametrize("recipe", ["", "tensorwise", "rowwise"])
def test_a_compiled_llama_is_the_built_in_one(recipe: str, tmp_path: Path) -> None:
    """Its layers are first converted by torchao itself for 8 bits; all but the head, as torchtitan does.

    Queries, keys and values, and gate and up, are products of their own here, with casts and scales of their own.
    A layer keeps the deviations of two norms, 24 bytes of seeds, and some scales of 4 bytes more.
    """
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 128, "num_attention_heads": 16}
    with torch.device("meta"):
        from transformers import LlamaConfig, LlamaForCausalLM

        module = LlamaForCausalLM(LlamaConfig(**{**CONFIG, **sizes}))
    if recipe:
        float8 = pytest.importorskip("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    ids = torch.zeros(BATCH, 4096, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    simulator.capture(module, inputs, dtype="bf16", compile=True).save(tmp_path / "model.json")
    common = {"cluster": "dgx_h100", "framework": {"name": "pytorch", "compile": True}}
    eager = {"loss": {"name": "eager"}, **({"fp8": f"torchao_{recipe}"} if recipe else {})}
    training = {"seq": 4096, "micro_batch": BATCH, "global_batch": 2, **eager}
    model = {**LLAMA, "hidden": 2048, "ffn_hidden": 8192, "heads": 16, "vocab_multiple": 1}
    captured = {"model": {"captured": str(tmp_path / "model.json")}, "training": {"global_batch": 2}}
    files = {**common, **captured}, {**common, "model": model, "training": training}
    job, built_in = map(load_workload, files)
    assert parameters(job) == parameters(built_in)
    assert hardware_flops_per_step(job) == hardware_flops_per_step(built_in)
    more = layer(job).saved_bytes - layer(built_in).saved_bytes - 2 * 4 * BATCH * 4096 - SEEDS
    assert 0 <= more <= (80 if recipe else 0)
    longer = [simulator.run(one, set={"model.layers": 10}).to_dict()["step_time_s"] for one in files]
    layers = [step - simulator.run(one).to_dict()["step_time_s"] for step, one in zip(longer, files, strict=True)]
    assert layers[0] == pytest.approx(layers[1], rel=0.05 if recipe else 0.02)


def test_a_measured_run_is_met_in_time_and_memory(tmp_path: Path) -> None:
    # docs/how-to/your-model.md says how far off: 4.8 % in time, 0.01 % in memory.
    from transformers import LlamaConfig, LlamaForCausalLM

    table = ROOT / "simulator/validation/data/own-frameworks.csv"
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    measured = next(row for row in rows if row["id"] == "hf1_llama1b_ga4")
    file = ROOT / "calibration/runs/frameworks/hf1_llama1b_ga4.yaml"
    job = yaml.safe_load(file.read_text(encoding="utf-8"))
    sizes, seq = job["model"], job["training"]["seq"]
    config = LlamaConfig(
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["ffn_hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        vocab_size=sizes["vocab"],
        tie_word_embeddings=sizes["tied_embeddings"],
    )
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    ids = torch.zeros(job["training"]["micro_batch"], seq, dtype=torch.long)
    simulator.capture(module, {"input_ids": ids, "labels": ids, "use_cache": False}, dtype="bf16").save(
        tmp_path / "llama.json"
    )
    step = simulator.run({**job, "model": {"captured": str(tmp_path / "llama.json")}})
    figures = step.to_dict()
    assert figures["step_time_s"] == pytest.approx(float(measured["measured_step_s"]), rel=0.055)
    assert figures["memory"]["peak_allocated_bytes"] == pytest.approx(1e9 * float(measured["mem_gb"]), rel=0.001)


def test_the_plan_of_a_model_splits_it() -> None:
    with torch.device("meta"):
        module = llama()
    model = simulator.capture(module, torch.zeros(BATCH, SEQ, dtype=torch.long), dtype="bf16")
    assert (model.unsplit, model.widest_split) == ("", KV_HEADS)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, vocab_size=90)
    tokens = torch.zeros(BATCH, 16, dtype=torch.long)
    return T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def bert() -> Any:
    """Return BERT with a mask that hides nothing, which transformers looks at."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**CONFIG, max_position_embeddings=32)
    tokens = torch.zeros(BATCH, 32, dtype=torch.long)
    return BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**CONFIG, image_size=32, patch_size=8, num_labels=10)
    return ViTForImageClassification(config), {"pixel_values": torch.zeros(BATCH, 3, 32, 32)}


def whisper() -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{end}_{name}": size for end in ("encoder", "decoder") for name, size in SIDES.items()}
    config = WhisperConfig(d_model=64, max_source_positions=50, vocab_size=90, **IDS, **sizes)
    labels = torch.zeros(BATCH, 8, dtype=torch.long)
    inputs = {"input_features": torch.zeros(BATCH, 80, 100), "labels": labels, "use_cache": False}
    return WhisperForConditionalGeneration(config), inputs


def clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    side = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = CLIPConfig(text_config={**side, "vocab_size": 90}, vision_config={**side, "image_size": 32})
    tokens, images = torch.zeros(BATCH, 16, dtype=torch.long), torch.zeros(BATCH, 3, 32, 32)
    return CLIPModel(config), {"input_ids": tokens, "pixel_values": images, "return_loss": True}


def swin() -> Any:
    """Return Swin, with windows of images and unlike layers."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
    return SwinForImageClassification(config), {"pixel_values": torch.zeros(BATCH, 3, 32, 32)}


def gemma2() -> Any:
    """Return Gemma 2, whose embedding is scaled, and split over ranks by its own plan."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    tokens = torch.zeros(BATCH, 32, dtype=torch.long)
    config = Gemma2Config(**CONFIG, head_dim=32, attn_implementation="eager")
    return Gemma2ForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


SIDES = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)


@pytest.mark.parametrize("make", [t5, bert, vit, whisper, clip, swin, gemma2], ids=lambda make: str(make.__name__))
def test_other_architectures_play_on_one_gpu_and_sharded(make: Callable[[], Any], tmp_path: Path) -> None:
    """Their FLOPs are what PyTorch counts itself, where attention is products one after another.

    Attention counts three times its forward pass: two products forward, and four backward.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = capture_made(make, make.__name__, {"dtype": "bf16"})
    module, inputs = make()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = module.train()(**inputs)
        (output.loss if output.get("loss") is not None else output.logits.sum()).backward()
    model.save(tmp_path / "model.json")
    job = {"model": {"captured": str(tmp_path / "model.json")}, "cluster": {"name": "dgx_h100", "nodes": 1}}
    for layout in ({"dp": 1}, {"dp": 8, "zero": 3}):
        step = simulator.run({**job, "training": {"global_batch": BATCH * layout["dp"]}, "parallelism": layout})
        figures = step.to_dict()
        assert figures["model_flops_per_step"] == layout["dp"] * counter.get_total_flops()
        assert figures["params_total"] == sum(weight.numel() for weight in module.parameters())
        assert figures["memory"]["fits"]

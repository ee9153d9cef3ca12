"""No key is accepted and ignored: what is given changes the answer, is refused, or is warned of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import simulator
from simulator.config import altered, load_workload, warnings
from simulator.config.model import BiasPlace, Model
from simulator.config.parallelism import Parallelism
from simulator.config.rules.effect import TABLE
from simulator.config.training import Training
from simulator.errors import InputError
from tests.support.unadvised import without_advice  # noqa: F401

pytestmark = pytest.mark.usefixtures("without_advice")

CLUSTER: dict[str, Any] = {
    "name": "two nodes",
    "node": {
        "gpus": {"type": "h100-sxm-80gb", "count": 4},
        "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9, "latency_s": 6e-7},
        "pcie": {"generation": 5},
        "nics": {"count": 4, "bandwidth_bps": 400e9, "latency_s": 3e-6},
        "host_memory_bandwidth_Bps": 2e11,
        "nvme": {"count": 2, "read_Bps": 5e9, "write_Bps": 3e9},
    },
}
MODEL = {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "vocab": 2000, "position": "rope"}
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 256, "shared_experts": 1}


def job(parallelism: dict[str, Any], *, moe: bool = False, **training: Any) -> dict[str, Any]:
    model = MODEL | ({"moe": MOE} if moe else {})
    sizes = {"seq": 256, "global_batch": 8}
    return {"model": model, "training": sizes | training, "parallelism": parallelism, "cluster": CLUSTER}


JOBS = {
    "one GPU": job({}),
    "replicas": job({"dp": 4, "bucket_bytes": 1_000_000}),
    "zero 1": job({"tp": 2, "pp": 2, "dp": 2, "zero": 1, "bucket_bytes": 1_000_000}, grad_clip=1.0),
    "zero 3": job({"tp": 2, "dp": 4, "zero": 3}),
    "at once": job({"dp": 4, "zero": 1, "bucket_bytes": 1_000_000, "overlap": {"grad_reduce": False}}),
    "not ahead": job({"dp": 4, "zero": 3, "overlap": {"param_gather": False}}),
    "long": job({"cp": 2, "dp": 2, "bucket_bytes": 1_000_000}),
    "ulysses": job({"cp": 2, "cp_method": "ulysses", "bucket_bytes": 1_000_000}),
    "experts": job({"tp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1, "bucket_bytes": 1_000_000}, moe=True),
    "servers": job({"dp": 2, "data_parallel": "parameter_server", "bucket_bytes": 1_000_000}),
    "no drain": job({"pp": 2, "dp": 2, "zero": 1, "schedule": "async_1f1b", "bucket_bytes": 1_000_000}),
    "selective": job({"tp": 2}, precision="fp16", recompute={"granularity": "selective"}),
}


def answer(work: dict[str, Any]) -> dict[str, Any]:
    """Return what is said of a job, but for what repeats its input, names ways to the same end, or tells how long we
    took."""
    result = copy.deepcopy(simulator.run(work).to_dict())
    for key in ("parallelism", "warnings", "simulation", "accuracy", "nothing_comparable", "name"):
        result.pop(key, None)
    result["calibration"].pop("kernel_time_priced_by")
    for kind in result["communication"].values():
        kind.pop("algorithm")
    return result


def with_key(work: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(work)
    section = changed
    *path, name = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
    section[name] = value
    return changed


#: Another value than the default of every key whose values are not all listed.
VALUES: dict[str, list[Any]] = {
    "seed": [3],
    "model.sliding_window": [64, 4096],
    "model.joined_products": [True],
    "model.moe.node_limit": [1],
    "training.seq": [512],
    "training.micro_batch": [2],
    "training.global_batch": [16],
    "training.grad_clip": [1.0],
    "training.total_tokens": [1e9],
    "training.recompute.modules": [["layernorm"]],
    "parallelism.hsdp": [2, 4],
    "parallelism.prefetch": [0, 3],
    "parallelism.bucket_bytes": [6_000_000],
    "parallelism.zb_memory_limit": [1.0],
    "parallelism.servers": [1, 2],
    "parallelism.rank_order": ["tp-cp-ep-pp-dp"],
    "parallelism.collective_algorithm": ["tree", "ring"],
    "cluster.node.nvlink.latency_s": [1e-5],
    "cluster.price_per_gpu_hour": [2.0],
    "cluster.node.nics.bandwidth_bps": [2e11],
    "cluster.node.nvme.read_Bps": [6e9],
    "cluster.node.nvme.write_Bps": [6e9],
}
#: Keys whose other values cost the same, or whose effect another test has.
ALIKE = {
    "training.optimizer.name": "adam and adamw move the same bytes",
    "training.recompute.layers": "of full recomputation alone, else refused; these models are tested with it elsewhere",
    "parallelism.collective_algorithm": "auto may choose the one that is asked for",
    "parallelism.rank_order": "orders may be alike on a cluster",
    "parallelism.prefetch": "enough is enough",
    "parallelism.overlap.p2p": "blocking transfers may cost nothing where a rank would wait anyway",
    "cluster.node.nics.bandwidth_bps": "of a job on one node",
    "cluster.node.nvme.read_Bps": "of the drives, which only what is offloaded uses",
    "cluster.node.nvme.write_Bps": "of the drives, which only what is offloaded uses",
    "cluster.node.nvlink.latency_s": "of a job on one GPU",
}
#: Jobs that show the keys of the training section.
TRAINED = ("zero 1", "selective")
#: Sections whose keys are tried one by one.
SECTIONS = {"training": Training, "parallelism": Parallelism}


def leaves(section: type[BaseModel], path: str) -> Iterator[tuple[str, list[Any]]]:
    """Every dotted key below a section, with values to try."""
    for name, field in section.model_fields.items():
        key, default = f"{path}.{name}", field.default
        if isinstance(default, BaseModel):
            yield from leaves(type(default), key)
        elif key in VALUES:
            yield key, VALUES[key]
        elif name in ("schedule", "layers_per_stage"):
            continue  # these have tests of their own
        elif isinstance(default, bool) or key.endswith(("sequence_parallel", "optimizer_sync", "accumulation_fusion")):
            yield key, [True, False]
        elif options := get_args(field.annotation):
            yield key, [value for value in options if isinstance(value, str) and value != default]


KEYS = [leaf for name, section in SECTIONS.items() for leaf in leaves(section, name)]
KEYS += [(key, values) for key, values in VALUES.items() if not key.startswith(tuple(SECTIONS))]


def test_the_keys_of_the_table_are_tried() -> None:
    """Keys of the model's layers have tests of their own, below."""
    assert {row[0] for row in TABLE} <= {key for key, _ in KEYS} | {f"model.{key}" for key in OF_LAYERS}
    assert len(KEYS) > 40


#: Parts of the keys; `make test` tries one part in each job, so that a key meets one of the jobs.
PARTS = 12


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
@pytest.mark.parametrize("name", JOBS)
def test_a_key_changes_the_answer_or_is_refused_or_warned_of_and_warnings_are_true(name: str, part: int) -> None:
    """Both ways: without a warning the answer differs from the job's own, with one it is the same."""
    work = JOBS[name]
    own, defaults = answer(work), load_workload(work)
    ignored, untrue = [], []
    for key, values in KEYS[(list(JOBS).index(name) + part) % PARTS :: PARTS]:
        for value in values:
            if key == "model.moe.node_limit" and "moe" not in work["model"]:
                continue
            if key.startswith("training.") and name not in TRAINED:
                continue
            changed = with_key(work, key, value)
            try:
                loaded = load_workload(changed)
            except InputError:
                continue
            told = any(note.startswith(f"{key} ") for note in warnings(loaded))
            same = loaded == defaults
            if same and not told:
                continue
            differs = answer(changed) != own
            if not differs and not told and key not in ALIKE:
                ignored.append(f"{key}: {value}")
            if differs and any(note.startswith(f"{key} has no effect") for note in warnings(loaded)):
                untrue.append(f"{key}: {value}")
    assert ignored == []
    assert untrue == []


#: Keys of the model that count in layers of some kinds, with a value that is unlike the default.
OF_LAYERS: dict[str, Any] = {
    "kv_heads": 2,
    "head_dim": 32,
    "v_head_dim": 32,
    "attention": "unfused",
    "qk_norm": True,
    "qk_norm_kind": "unweighted",
    "value_norm": True,
    "keys_as_values": True,
    "attention_sinks": True,
    "attention_gate": True,
    "attention_softcap": 30.0,
    "mla": {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    "attention_chunk": 64,
    "position": "rope",
    "ffn_hidden": 1024,
    "activation": "swiglu",
}
#: Keys of the model that count in every model, or are refused where they do not.
COUNT_ALWAYS = {
    *("layers", "hidden", "heads", "vocab", "vocab_multiple", "norm", "norm_place", "bias", "tied_embeddings"),
    *("mixers", "mlps", "window_heads", "logit_softcap", "dropout", "moe", "indexer", "gated_delta", "kimi_delta"),
    *("mamba2", "captured", "mtp_layers", "shared_key", "residual_streams", "encoder", "layer_inputs", "reused_keys"),
}
#: A model none of whose layers attends.
RECURRENT = {
    **{"layers": 2, "hidden": 512, "heads": 8, "vocab": 2000, "position": "none"},
    **{"mixers": ["kimi_delta"], "kimi_delta": {"heads": 4, "head_dim": 64}},
}


def of_model(model: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**job({}), "model": model | keys}


def ineffective(work: dict[str, Any]) -> list[str]:
    """Return the keys of the model that warnings tell to have no effect."""
    notes = (note.partition(" has no effect: ") for note in warnings(load_workload(work)))
    return [key.removeprefix("model.") for key, told, _ in notes if told]


def test_every_key_of_the_model_counts_always_or_is_told_of() -> None:
    told = {row[0].removeprefix("model.") for row in TABLE if row[0].startswith("model.") and row[0].count(".") == 1}
    assert told == {*OF_LAYERS, "sliding_window", "joined_products"}
    assert set(Model.model_fields) == told | COUNT_ALWAYS | {"biases"}  # which has a warning of its own


@pytest.mark.parametrize(
    "keys",
    [
        ("position", "attention"),
        ("kv_heads", "head_dim", "attention_gate", "attention_softcap", "attention_sinks"),
        ("qk_norm", "qk_norm_kind", "v_head_dim", "value_norm"),
        ("qk_norm", "value_norm", "keys_as_values"),
        ("mla", "position"),
    ],
)
def test_keys_of_attention_change_nothing_where_no_layer_attends(keys: tuple[str, ...]) -> None:
    work = of_model(RECURRENT, **{key: OF_LAYERS[key] for key in keys})
    assert set(ineffective(work)) == set(keys)
    assert answer(work) == answer(of_model(RECURRENT))


@pytest.mark.parametrize(
    ("beside", "key", "value"),
    [
        ({}, "attention_sinks", "window"),
        ({"sliding_window": 64, "qk_norm": True, "value_norm": True}, "keys_as_values", True),
        ({"mixers": ["chunked"], "attention_chunk": 300}, "attention_chunk", 512),
        ({"mixers": ["no_rope"], "position": "none"}, "position", "rope"),
        ({"mlps": ["none"]}, "ffn_hidden", 1024),
        ({"mlps": ["none"]}, "activation", "swiglu"),
    ],
)
def test_keys_of_layers_change_nothing_where_there_are_none_of_them(
    beside: dict[str, Any], key: str, value: object
) -> None:
    work = of_model(MODEL | beside, **{key: value})
    assert ineffective(work) == [key]
    assert answer(work) == answer(of_model(MODEL | beside))


@pytest.mark.parametrize(
    ("beside", "key", "value"),
    [
        *(({}, key, OF_LAYERS[key]) for key in ("kv_heads", "head_dim", "v_head_dim", "attention", "ffn_hidden")),
        *(({}, key, OF_LAYERS[key]) for key in ("qk_norm", "value_norm", "attention_sinks", "attention_gate")),
        ({"qk_norm": True}, "qk_norm_kind", "width"),
        ({"qk_norm": True, "value_norm": True}, "keys_as_values", True),
        ({"mixers": ["window", "attention"], "sliding_window": 64}, "attention_sinks", "window"),
        ({"mixers": ["chunked"], "attention_chunk": 256}, "attention_chunk", 64),
        ({"position": "none", "mixers": ["no_rope", "attention"]}, "position", "rope"),
        ({"kv_heads": 8}, "mla", OF_LAYERS["mla"]),
        ({}, "activation", "swiglu"),
    ],
)
def test_keys_of_layers_that_the_model_has_change_the_answer(beside: dict[str, Any], key: str, value: object) -> None:
    work = of_model(MODEL | beside, **{key: value})
    assert key not in ineffective(work)
    assert answer(work) != answer(of_model(MODEL | beside))


@pytest.mark.parametrize(
    ("model", "absent"),
    [
        (MODEL, ["experts", "router"]),
        (MODEL | {"moe": {"experts": 8, "top_k": 2, "ffn_hidden": 256}}, ["mlp"]),
        (MODEL | {"moe": MOE}, []),
        (RECURRENT, ["qkv", "o", "experts", "router"]),
        (MODEL | {"kv_heads": 8, "mla": OF_LAYERS["mla"]}, ["qkv", "experts", "router"]),
    ],
)
def test_biases_of_layers_that_the_model_has_not_are_told(model: dict[str, Any], absent: list[str]) -> None:
    """Each place alone, beside no bias at all."""
    plain, silent = answer(of_model(model, biases=[])), []
    for place in get_args(BiasPlace):
        work = of_model(model, biases=[place])
        told = f"model.biases names {place}, which no layer of the model has" in warnings(load_workload(work))
        assert (answer(work) == plain) is told, place
        silent += [place] if told else []
    assert silent == absent


@pytest.mark.parametrize(("gpu", "changes"), [("v100-sxm-32gb", False), ("h100-sxm-80gb", True)])
def test_tf32_is_switched_off_where_gpus_have_it(gpu: str, changes: bool) -> None:
    """The V100 is older than TF32 (NVIDIA's A100 white paper of 2020 introduces it)."""
    fp32 = with_key(job({}, precision="fp32"), "cluster.node.gpus.type", gpu)
    off = with_key(fp32, "training.tf32", False)
    told = "training.tf32 has no effect: the GPUs have no TF32" in warnings(load_workload(off))
    assert told is not changes
    assert (answer(off) != answer(fp32)) is changes


def test_a_workload_that_gives_nothing_is_not_warned_of_it() -> None:
    for work in JOBS.values():
        assert not [note for note in warnings(load_workload(work)) if "no effect" in note], work


def test_a_switch_that_is_off_asks_for_nothing() -> None:
    off = {"overlap": {"tp": False, "ep": False}, "scatter_gather_p2p": False, "sequence_parallel": False}
    assert warnings(load_workload(job(off | {"dp": 4}))) == []
    on = load_workload(job({"dp": 4, "overlap": {"tp": True}}))
    assert warnings(on) == ["parallelism.overlap.tp has no effect: tp is 1"]


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("model.attention", "unfused", "model.attention is unfused"),
        ("cluster.node.gpus.type", "a100-sxm-80gb", "the profile has no FlashAttention 2 beside a newer kernel"),
        ("cluster.node.gpus.type", "l40s-48gb", "the profile has no FlashAttention 2 beside a newer kernel"),
        ("cluster.node.gpus.type", "h100-sxm-80gb", ""),
        ("cluster.node.gpus.type", "b200-sxm-180gb", ""),
    ],
)
def test_flash_attention_2_changes_nothing_where_there_is_no_choice(key: str, value: str, why: str) -> None:
    """Attention that is not fused has none of its kernels, and an A100's are FlashAttention 2 anyway (the L40S's are as
    there); an H100 has both (the B200's are as there)."""
    work = with_key(JOBS["replicas"], key, value)
    asked = with_key(work, "training.attention_kernel", "flash2")
    told = [text for text in warnings(load_workload(asked)) if "NVLink" not in text]
    assert told == ([f"training.attention_kernel has no effect: {why}"] if why else [])
    assert (answer(asked) == answer(work)) is bool(why)


def test_modules_named_twice_are_computed_again_once_and_said_to_be() -> None:
    once, twice = (job({}, recompute={"granularity": "selective", "modules": ["mlp"] * n}) for n in (1, 2))
    assert answer(once) == answer(twice)
    assert "mlp more than once" in " ".join(warnings(load_workload(twice)))


def test_two_overrides_of_one_link_are_refused() -> None:
    """Their scales would multiply, which nobody can have meant."""
    for override in ({"link": "node0.nic0", "bandwidth_scale": 0.5}, {"gpu": "node0.gpu1", "speed_scale": 0.5}):
        work = with_key(JOBS["one GPU"], "cluster.overrides", [override, override])
        with pytest.raises(InputError, match=r"overrides\[0\] is of it too"):
            load_workload(work)


def test_fp8_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="says nothing of casts and scales: write precision: bf16"):
        load_workload(job({}, precision="fp8"))


def test_keys_of_a_preset_ask_for_nothing() -> None:
    """A window that no sequence reaches is told of where the file has it, not where Mistral has it; so in copies."""
    mistral = {"preset": "mistral-7b", "layers": 2}
    base = {"training": {"seq": 1024, "global_batch": 8}, "cluster": CLUSTER, "parallelism": {"tp": 4, "dp": 2}}
    told = "model.sliding_window has no effect: no sequence is longer than the window"
    plain = load_workload({"model": mistral, **base})
    written = load_workload({"model": {**mistral, "sliding_window": 2048}, **base})
    assert told not in warnings(plain)
    assert told in warnings(written)
    assert told not in warnings(altered(plain, {"training.micro_batch": 2}))
    assert told in warnings(altered(plain, {"model.sliding_window": 2048}))
    explicit = load_workload({"model": plain.model.model_dump(), **base})
    assert explicit == plain
    assert told in warnings(explicit)
    gpt_oss = {"preset": "gpt-oss-20b", "layers": 2, "biases": ["qkv", "o", "mlp", "experts", "router"]}
    absent = "model.biases names mlp, which no layer of the model has"
    assert absent in warnings(load_workload({"model": gpt_oss, **base}))


def test_a_price_says_something_of_a_run_whose_length_is_known() -> None:
    told = "cluster.price_per_gpu_hour has no effect"
    for tokens, expected in ((None, True), (1e12, False)):
        workload = load_workload(job({"dp": 4}, total_tokens=tokens), {"cluster.price_per_gpu_hour": 2.0})
        assert any(text.startswith(told) for text in warnings(workload)) is expected

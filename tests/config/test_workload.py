"""The workload file: defaults, expansion, and every illegal workload with the remedy that it is answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator
from simulator.config import ClusterSpec, Workload, altered, catalog, load_cluster, load_workload, presets, warnings
from simulator.config.rules.numbers import divisors, split
from simulator.config.section import docstring_of, section_of
from simulator.config.training import Training
from simulator.errors import InputError
from simulator.input_files import read_yaml
from tests.support.frameworks import COMPILED, PYTORCH

SMALL: dict[str, Any] = {
    "model": {"layers": 12, "hidden": 1024, "heads": 16, "vocab": 50257},
    "training": {"seq": 1024, "global_batch": 32},
    "cluster": "dgx_a100",
}


def small(**changes: Any) -> Workload:
    """A small workload with dotted keys (dots written __) changed."""
    return load_workload(SMALL, {key.replace("__", "."): value for key, value in changes.items()})


def refused(changes: dict[str, Any], base: dict[str, Any] = SMALL) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(base, changes)
    return str(caught.value)


# ---- defaults


def test_defaults_follow_what_is_given() -> None:
    job = small(parallelism__tp=2, parallelism__pp=3)
    model, layout = job.model, job.parallelism
    assert (model.kv_heads, model.head_dim, model.ffn_hidden) == (16, 64, 4096)
    assert (layout.dp, layout.sequence_parallel, layout.layers_per_stage) == (1, True, (4, 4, 4))
    assert (job.n_ranks, job.microbatches, job.cluster.nodes) == (6, 32, 1)
    assert (job.name, job.calibration) == ("workload", "a100-sxm-80gb")
    assert small().parallelism.sequence_parallel is False


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 4, 8, 16, 32]))
@settings(max_examples=30, deadline=None)
def test_nodes_are_the_fewest_that_hold_the_ranks_and_dp_fills_the_nodes_that_are_given(
    tp: int, pp: int, dp: int
) -> None:
    """Nodes of 8 GPUs: n nodes hold the ranks and n - 1 do not. The other way round, dp = GPUs / (tp * pp)."""
    job = small(parallelism__tp=tp, parallelism__pp=pp, parallelism__dp=dp)
    assert 8 * (job.cluster.nodes - 1) < tp * pp * dp <= 8 * job.cluster.nodes
    if (8 * job.cluster.nodes) % (tp * pp) == 0 and 32 % (8 * job.cluster.nodes // (tp * pp)) == 0:
        filled = small(parallelism__tp=tp, parallelism__pp=pp, cluster__nodes=job.cluster.nodes)
        assert filled.n_ranks == 8 * job.cluster.nodes


def test_nodes_of_a_cluster_file_are_no_limit_but_those_of_the_workload_are() -> None:
    assert load_cluster("dgx_a100").nodes == 1
    assert small(parallelism__dp=32).cluster.nodes == 4
    assert small(parallelism__dp=8, cluster__nodes=2).cluster.n_gpus == 16


def test_a_cluster_file_that_says_several_nodes_means_them(tmp_path: Path) -> None:
    """However the file is named: 8 nodes of 8 GPUs are dp 16 of tp 4. A file of one node says what nodes are."""
    mine = read_yaml(catalog.find("cluster", "dgx_a100")) | {"name": "mine"}
    for nodes in (8, 1):
        (tmp_path / f"of_{nodes}.yaml").write_text(yaml.safe_dump(mine | {"nodes": nodes}))
    path = str(tmp_path / "of_8.yaml")
    for cluster in (path, {"name": path}, {"name": path, "nodes": 8}, mine | {"nodes": 8}):
        job = load_workload(SMALL | {"cluster": cluster, "parallelism": {"tp": 4}})
        assert (job.cluster.nodes, job.parallelism.dp) == (8, 16)
    held = load_workload(SMALL | {"cluster": path, "parallelism": {"tp": 4, "dp": 2}})
    assert any("56 of the 64 GPUs of the cluster have no rank" in note for note in warnings(held))
    assert "have 64" in refused({"parallelism.dp": 32, "parallelism.tp": 4}, SMALL | {"cluster": path})
    for cluster in (str(tmp_path / "of_1.yaml"), {"name": path, "nodes": None}):
        job = load_workload(SMALL | {"cluster": cluster, "parallelism": {"tp": 4, "dp": 4}})
        assert (job.cluster.nodes, job.parallelism.dp) == (2, 4)


def test_null_means_the_default() -> None:
    job = small(parallelism__tp=None, parallelism__overlap=None, model__preset=None, model__norm=None)
    assert job == small()
    assert "a required key is missing" in refused({"training.seq": None})


def test_integral_floats_are_whole_numbers() -> None:
    job = small(training__seq=1e3, parallelism__bucket_bytes=25e6)
    assert (job.training.seq, job.parallelism.bucket_bytes) == (1000, 25_000_000)
    assert type(job.parallelism.bucket_bytes) is int


def test_recompute_is_a_word_or_a_mapping() -> None:
    assert small(training__recompute="full").training.recompute.granularity == "full"
    first = small(training__recompute={"granularity": "full", "layers": 3}).training.recompute
    assert first.layers == 3
    job = load_workload(
        SMALL | {"training": SMALL["training"] | {"recompute": "full"}}, {"training.recompute.layers": 3}
    )
    assert job.training.recompute == first


def test_fp32_weights_are_their_own_master_copy() -> None:
    assert small(training__precision="fp32").training.optimizer.master_weights is False
    assert small(training__precision="fp16").training.optimizer.master_weights is True
    assert "master_weights" in refused({"training.precision": "fp32", "training.optimizer.master_weights": True})


def test_a_loaded_workload_reads_back_as_itself() -> None:
    for name in catalog.names("workload"):
        job = load_workload(name)
        assert load_workload(job) is job
        assert load_workload(job.model_dump()) == job


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"),
    [(151552, 6, 152064), (32000, 2, 32000), (50257, 8, 51200), (51200, 8, 51200), (1, 1, 128)],
)
def test_the_vocabulary_is_padded_once_to_a_multiple_of_128_tp(vocab: int, tp: int, rows: int) -> None:
    padded = small(model__vocab=vocab).model.padded_vocab(tp)
    assert padded == rows
    assert padded % tp == 0
    assert 0 <= padded - vocab < 128 * tp


# ---- shipped files


#: What shipped workloads are warned of, as their makers chose it so.
NOTES = {
    "deepseek_v3_dualpipe": "splits the backward pass",
    "llama3_405b": "zero 2 in a pipeline",
    "llama3_405b_131k": "zero 2 in a pipeline",
    "qwen3_235b": "optimizer state of experts is not sharded",
}


def test_every_shipped_workload_is_legal_and_warns_of_nothing_else() -> None:
    assert "gpt175b_3d" in catalog.names("workload")
    for name in catalog.names("workload"):
        job = load_workload(name)
        assert job.name == name
        told = warnings(job)
        assert len(told) == (name in NOTES), told
        assert all(NOTES[name] in note for note in told)


def test_the_main_job_is_the_published_one() -> None:
    job = load_workload("gpt175b_3d")
    model, layout, training = job.model, job.parallelism, job.training
    assert (model.layers, model.hidden, model.heads, model.vocab, model.attention) == (96, 12288, 96, 51200, "unfused")
    assert (layout.tp, layout.pp, layout.dp, layout.vpp, layout.zero, layout.schedule) == (8, 12, 16, 1, 0, "1f1b")
    assert (layout.sequence_parallel, layout.overlap.grad_reduce) == (False, False)
    assert (training.seq, training.micro_batch, training.global_batch, training.precision) == (2048, 1, 1536, "fp16")
    assert training.recompute.granularity == "full"
    assert (job.n_ranks, job.cluster.nodes, job.microbatches) == (1536, 192, 96)
    for dp in (8, 4):
        changed = load_workload("gpt175b_3d", {"parallelism.dp": dp})
        assert (changed.n_ranks, changed.cluster.nodes, changed.microbatches) == (96 * dp, 12 * dp, 1536 // dp)


@pytest.mark.parametrize(
    "name", [name for name, keys in presets().items() if "moe" not in keys and "config.json of" not in keys["source"]]
)
def test_presets_are_legal_have_a_source_and_the_size_in_their_name(name: str) -> None:
    """A layer has 4 h^2 attention weights (less with fewer kv heads) and 2 or 3 h f in the MLP; plus the vocabulary. Of
    models with experts see `test_r41_parameters_of_published_models`, of those that are a config.json
    `test_presets_have_the_parameters_of_their_file`."""
    job = load_workload(SMALL | {"model": {"preset": name}})
    m = job.model
    attention = 2 * m.hidden * m.head_dim * (m.heads + m.kv_heads)
    mlp = (3 if m.activation == "swiglu" else 2) * m.hidden * m.ffn_hidden
    total = m.layers * (attention + mlp) + m.vocab * m.hidden * (1 if m.tied_embeddings else 2)
    size = name.rsplit("-", 1)[-1]
    promised = float(size[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[size[-1]]
    assert total == pytest.approx(promised, rel=0.08)
    assert presets()[name]["source"]


def test_keys_beside_a_preset_override_it() -> None:
    job = load_workload(SMALL | {"model": {"preset": "llama3-8b", "layers": 4, "dropout": 0.1}})
    assert (job.model.layers, job.model.dropout, job.model.kv_heads) == (4, 0.1, 8)


def test_shipped_files_and_short_forms_satisfy_the_exported_schema() -> None:
    import jsonschema  # takes seconds, and only here

    for kind, model in (("workload", Workload), ("cluster", section_of(ClusterSpec))):
        schema = model.model_json_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for path in sorted(catalog.FOLDERS[kind].glob("*.yaml")):
            validator.validate({"name": path.stem} | read_yaml(path))
    bad = [{}, SMALL | {"modle": {}}, SMALL | {"model": {"layers": 3}}, SMALL | {"model": {"preset": "gpt5"}}]
    bad += [
        SMALL | {"training": {"seq": 0, "global_batch": 1}},
        SMALL | {"training": {"seq": 8, "global_batch": 8, "recompute": "some"}},
    ]
    good = [
        SMALL,
        SMALL | {"model": {"preset": "gpt-22b", "layers": 3}},
        SMALL | {"cluster": {"name": "dgx_a100", "nodes": 2}},
    ]
    validator = jsonschema.Draft202012Validator(Workload.model_json_schema())
    assert [validator.is_valid(data) for data in bad] == [False] * len(bad)
    assert [validator.is_valid(data) for data in good] == [True] * len(good)


def test_docstrings_of_fields_stand_in_the_schema_of_sections_and_of_dataclasses() -> None:
    """They are read from the sources when a schema or a message asks for them, not for every section that is made."""
    cluster = section_of(ClusterSpec).model_json_schema()["anyOf"][1]
    assert cluster["properties"]["node"]["description"] == "what every node is"
    assert docstring_of(Training, "seq") == Training.model_json_schema()["properties"]["seq"]["description"]
    assert docstring_of(Training, "no_such_key") is None


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        # keys and values
        ({"modle.layers": 3}, "modle", "model instead of modle"),
        ({"parallelism.tpp": 2}, "parallelism.tpp", "tp instead of tpp"),
        ({"tp": 2}, "tp", "fix:     parallelism.tp"),
        ({"parallelism.cpp": 2}, "parallelism.cpp", "unknown key"),
        ({"sede": 1}, "sede", "unknown key"),
        ({"parallelism.overlap.dp": True}, "parallelism.overlap.dp", "grad_reduce, param_gather, p2p"),
        ({"training.seq": "1024"}, "training.seq", "without quotes"),
        ({"training.seq": True}, "training.seq", "found:   true"),
        ({"training.seq": 1024.5}, "training.seq", "must be a whole number"),
        ({"training.seq": float("nan")}, "training.seq", "nan"),
        ({"training.seq": 0}, "training.seq", ">= 1"),
        ({"training.seq": -4}, "training.seq", ">= 1"),
        ({"training.total_tokens": float("inf")}, "training.total_tokens", "finite"),
        ({"training.total_tokens": "many"}, "training.total_tokens", "must be a number"),
        ({"model.dropout": 1.0}, "model.dropout", "< 1"),
        ({"model.bias": 1}, "model.bias", "true or false"),
        ({"model.activation": "swigloo"}, "model.activation", "activation: swiglu"),
        ({"parallelism.schedule": "1F1B"}, "parallelism.schedule", "schedule: 1f1b"),
        ({"parallelism.schedule": "zb_h3"}, "parallelism.schedule", "naive, gpipe, 1f1b, interleaved"),
        ({"parallelism.zero": 4}, "parallelism.zero", "<= 3"),
        ({"parallelism.zero": True}, "parallelism.zero", "whole number"),
        ({"parallelism": 8}, "parallelism", "a mapping of keys"),
        ({"model": "gpt3-175b"}, "model", "a mapping of keys"),
        ({"name": 5}, "name", "must be text"),
        ({"model": {"preset": "gpt3_175b"}}, "model.preset", "preset: gpt3-175b"),
        ({"model": {"preset": 3}}, "model.preset", "no shipped model"),
        ({"model": {"preset": "gpt-22b", "hf_config": "x.json"}}, "model.hf_config", "either"),
        ({"model": {"layers": 2}}, "model.hidden", "required"),
        ({"cluster": "dgx_a10"}, "cluster", "cluster dgx_a100"),
        ({"cluster": 8}, "cluster", "a name, a path or a mapping"),
        ({"cluster.node.nvlink.bandwidth_Bps": -1}, "cluster.node.nvlink.bandwidth_Bps", ">= 0"),
        ({"cluster.node.gpus.type": "gtx-970"}, "calibration", "no profile"),
        ({"calibration": "h100-sxm-80gb"}, "calibration", "profiles of a100-sxm-80gb: a100-sxm-80gb"),
        ({"name": "a\x1b[31m"}, "name", "printable"),
        ({"model.layers": 100_000}, "model.layers", "<= 10,000"),
        ({"training.seq": 10**9, "model.hidden": 2**20}, "training.micro_batch", "at most 1e+15 numbers"),
        ({"training.total_tokens": 1e300}, "training.total_tokens", "<= 1,000,000,000,000,000,000"),
        ({"cluster.price_per_gpu_hour": 1e300}, "cluster.price_per_gpu_hour", "<= 1,000,000"),
        ({"cluster.node.nics.latency_s": 11}, "cluster.node.nics.latency_s", "<= 10"),
        ({"cluster.node.nics.bandwidth_bps": 1e-9}, "cluster.node.nics.bandwidth_bps", ">= 1,000"),
        ({"model.layers": "four"}, "model.layers", "allowed: a whole number, >= 1, <= 10,000"),
        ({"parallelism.x.y": 1}, "--set: parallelism.x", "unknown key"),
        ({"name": "a\nb"}, "name", "printable"),
        ({"name": "\ud800"}, "name", "printable"),
        ({"calibration": "a100-sxm-80"}, "calibration", "profile a100-sxm-80gb"),
        ({"parallelism.rank_order": "tp-pp"}, "parallelism.rank_order", "tp-cp-ep-dp-pp"),
        ({"parallelism.rank_order": "tp-dp-pp-tp"}, "parallelism.rank_order", "once each"),
        # sizes against each other
        ({"model.heads": 12}, "model.heads", "heads: 16"),
        ({"model.kv_heads": 6}, "model.kv_heads", "1, 2, 4, 8, 16"),
        ({"parallelism.tp": 16, "model.kv_heads": 16, "model.ffn_hidden": 4100}, "model.ffn_hidden", "4096"),
        ({"training.seq": 1023, "parallelism.tp": 2}, "training.seq", "sequence_parallel: false"),
        ({"parallelism.tp": 2, "parallelism.scatter_gather_p2p": True}, "parallelism.scatter_gather_p2p", "already"),
        ({"training.recompute": {"layers": 2}}, "training.recompute.layers", "granularity: full"),
        ({"training.recompute": {"granularity": "full", "layers": 13}}, "training.recompute.layers", "at most 12"),
        # schedules
        ({"parallelism.vpp": 2, "parallelism.pp": 2}, "parallelism.vpp", "schedule: interleaved"),
        ({"parallelism.schedule": "interleaved", "parallelism.pp": 2}, "parallelism.vpp", ">= 2"),
        ({"parallelism.schedule": "interleaved", "parallelism.vpp": 2}, "parallelism.pp", ">= 2"),
        (
            {"parallelism": {"schedule": "interleaved", "vpp": 3, "pp": 4}, "training.global_batch": 9},
            "training.global_batch",
            "allowed: 8, 10",
        ),
        ({"parallelism": {"schedule": "zb_v", "vpp": 3, "pp": 4}}, "parallelism.vpp", "vpp: 2"),
        ({"parallelism": {"schedule": "zb_v"}}, "parallelism.pp", ">= 2"),
        ({"parallelism": {"schedule": "dualpipe", "pp": 3}}, "parallelism.schedule", "even number of pipeline ranks"),
        (
            {"parallelism": {"schedule": "dualpipe", "pp": 4}, "training.global_batch": 6},
            "training.global_batch",
            "at least 8 micro-batches (2 pp, both directions), got 6",
        ),
        # layers, batch, cluster
        ({"parallelism.pp": 5}, "parallelism.layers_per_stage", "[3, 3, 2, 2, 2]"),
        ({"parallelism.pp": 13}, "parallelism.pp", "at most 12"),
        ({"parallelism.pp": 2, "parallelism.layers_per_stage": [6, 7]}, "parallelism.layers_per_stage", "[6, 6]"),
        ({"parallelism.pp": 3, "parallelism.layers_per_stage": [6, 6]}, "parallelism.layers_per_stage", "3 numbers"),
        ({"parallelism.pp": 2, "parallelism.layers_per_stage": [13, -1]}, "parallelism.layers_per_stage[1]", ">= 0"),
        (
            {"parallelism.pp": 3, "parallelism.layers_per_stage": [6, 0, 6]},
            "parallelism.layers_per_stage",
            "0 for the first",
        ),
        ({"parallelism.zb_memory_limit": 2}, "parallelism.zb_memory_limit", "zb_auto"),
        ({"parallelism.schedule": "async_1f1b", "parallelism.zero": 3}, "parallelism.zero", "drains"),
        (
            {"parallelism.pp": 2, "parallelism.schedule": "zb_auto", "parallelism.zb_memory_limit": 0.4},
            "parallelism.zb_memory_limit",
            "at least 0.5",
        ),
        ({"parallelism.dp": 5}, "training.global_batch", "global_batch: 30, or dp: 8"),
        ({"parallelism.dp": 8, "training.micro_batch": 3}, "training.global_batch", "24, or micro_batch: 1"),
        # 24 GPUs: dp 24 would do as well as a smaller micro-batch, which leaves the layout as it was
        (
            {"parallelism.dp": 16, "cluster.nodes": 3, "training.micro_batch": 2, "training.global_batch": 48},
            "training.global_batch",
            "global_batch: 64, or micro_batch: 1\n",
        ),
        # the only node is the server's, and no GPU is left for a worker
        (
            {"parallelism": {"dp": 5, "data_parallel": "parameter_server"}, "cluster.nodes": 1},
            "training.global_batch",
            "fix:     global_batch: 30\n",
        ),
        ({"training.micro_batch": 3}, "training.global_batch", "a multiple of 3"),
        ({"parallelism.dp": 16, "cluster.nodes": 1}, "cluster.nodes", ">= 2"),
        ({"parallelism.tp": 16, "cluster.nodes": 1}, "cluster.nodes", ">= 2"),
        ({"parallelism.tp": 16, "cluster.nodes": 3}, "parallelism.dp", "multiple of 2"),
        ({"parallelism.dp": 10**12}, "parallelism.dp", "1,000,000"),
        ({"parallelism.dp": 10**6, "parallelism.pp": 2}, "parallelism", "at most 1,000,000 GPUs"),
        ({"training.global_batch": 10**9, "parallelism.pp": 12}, "training.global_batch", "at most 10,000,000"),
        ({"cluster.overrides": [{"gpu": "node1.gpu0", "speed_scale": 1}]}, "cluster.overrides[0].gpu", "node0"),
    ],
)
def test_an_illegal_workload_names_key_value_and_remedy(changes: dict[str, Any], key: str, words: str) -> None:
    message = refused(changes)
    assert f"{key}: " in message
    assert words in f"{message}\n"


def test_what_came_from_set_is_said_to() -> None:
    assert refused({"parallelism.tp": 7}).startswith("--set: parallelism.tp: ")
    assert refused({"cluster.nodes": "two"}).startswith("--set: cluster.nodes: ")


def test_errors_of_a_cluster_file_name_that_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("node: {gpus: {type: a100-sxm-80gb, count: -2}, pcie: {generation: 4}}\n")
    data = SMALL | {"cluster": {"name": "mine.yaml", "price_per_gpu_hour": "free"}}
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(InputError) as caught:
        load_workload(tmp_path / "w.yaml")
    assert f"{tmp_path}/mine.yaml: node.gpus.count: " in str(caught.value)
    assert f"{tmp_path}/w.yaml: cluster.price_per_gpu_hour: " in str(caught.value)


def test_a_cluster_that_is_refused_hides_nothing_of_the_other_sections(tmp_path: Path) -> None:
    """One answer names what is wrong in the cluster's file and in every section, and nothing that follows from it."""
    (tmp_path / "mine.yaml").write_text(
        "node: {gpus: {type: a100-sxm-80gb, count: 8}, nvlink: nvswitch, pcie: {generation: 4}}\n"
    )
    data = SMALL | {
        "model": SMALL["model"] | {"activation": "swish"},
        "training": {"seq": 1024},
        "parallelism": {"schedule": "none.csv", "tpp": 2},
        "cluster": "mine.yaml",
    }
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(InputError) as caught:
        load_workload(tmp_path / "w.yaml")
    message = str(caught.value)
    for key in ("mine.yaml: node.nvlink", "model.activation", "training.global_batch", "parallelism.schedule"):
        assert f"{key}: " in message
    assert message.count("found:") == 3
    assert "allowed: a mapping of keys: kind, bandwidth_Bps" in message
    with pytest.raises(InputError) as caught:
        load_workload({"cluster": "dgx_b100", "training": SMALL["training"]})
    assert "cluster: no cluster file of this name" in str(caught.value)
    assert str(caught.value).count("a required key is missing") == 1  # the model


def test_30_layers_on_4_stages_propose_8_8_7_7_and_any_split_that_sums_up_runs() -> None:
    assert "[8, 8, 7, 7]" in refused({"model.layers": 30, "parallelism.pp": 4})
    assert small(model__layers=7, parallelism__pp=2, parallelism__layers_per_stage=[3, 4]).parallelism.pp == 2
    job = small(parallelism__pp=4, parallelism__layers_per_stage=[2, 4, 4, 2])
    assert sum(job.parallelism.layers_per_stage) == job.model.layers


@given(st.integers(1, 300), st.integers(1, 64))
def test_a_proposed_split_loses_no_layer_and_is_as_even_as_can_be(layers: int, stages: int) -> None:
    sizes = split(layers, stages)
    assert (len(sizes), sum(sizes)) == (stages, layers)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("heads", "tp", "allowed"),
    [(40, 3, "1, 2, 4, 5, 8, 10, 20, 40"), (28, 8, "1, 2, 4, 7, 14, 28"), (52, 8, "1, 2, 4, 13, 26, 52")],
)
def test_heads_that_do_not_split_list_the_sizes_that_do(heads: int, tp: int, allowed: str) -> None:
    message = refused({"model.heads": heads, "model.hidden": heads * 128, "parallelism.tp": tp})
    assert f"allowed: {allowed}\n" in message


def test_32_heads_on_5_gpus_are_offered_dp_5_or_an_uneven_pipeline() -> None:
    message = refused({"model.heads": 32, "model.layers": 32, "parallelism.tp": 5, "training.global_batch": 30})
    assert "dp: 5" in message
    assert "pp: 5 and layers_per_stage: [7, 7, 6, 6, 6]" in message
    job = small(model__heads=32, model__layers=32, parallelism__pp=5, parallelism__layers_per_stage=[7, 7, 6, 6, 6])
    assert job.n_ranks == 5


def test_a_batch_that_does_not_divide_is_not_offered_a_dp_that_leaves_gpus_without_a_rank() -> None:
    """250 sequences on 32 GPUs: no other dp uses all of them."""
    message = refused({"training.global_batch": 250, "cluster.nodes": 4})
    assert message.endswith("fix:     global_batch: 256")


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_kv_heads_are_split_or_replicated(kv_heads: int, tp: int) -> None:
    assert small(model__kv_heads=kv_heads, parallelism__tp=tp).model.kv_heads == kv_heads


def test_tp_and_kv_heads_of_which_neither_divides_the_other() -> None:
    """48 heads: tp 16 divides them, but against 6 kv heads it can neither split nor copy."""
    message = refused({"model.heads": 48, "model.hidden": 48 * 64, "model.kv_heads": 6, "parallelism.tp": 16})
    assert "neither tp 16 nor kv_heads 6 divides the other" in message
    assert "allowed: 1, 2, 3, 6, 12, 24, 48\n" in message


def _rounds_fit(m: int, pp: int) -> bool:
    return m % max(1, m // pp) == 0


@given(
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(1, 4),
    st.sampled_from(["1f1b", "interleaved"]),
)
@settings(max_examples=150, deadline=None)
def test_a_workload_is_legal_exactly_where_the_arithmetic_says_so(
    pp: int, dp: int, batch: int, vpp: int, schedule: str
) -> None:
    fits = pp > 1 and vpp > 1 and _rounds_fit(batch // dp, pp) if schedule == "interleaved" else vpp == 1
    legal = 12 % (pp * vpp) == 0 and batch % dp == 0 and fits
    changes = {"pp": pp, "dp": dp, "vpp": vpp, "schedule": schedule}
    try:
        job = load_workload(SMALL | {"parallelism": changes}, {"training.global_batch": batch})
    except InputError:
        assert not legal
    else:
        assert legal
        assert job.microbatches * dp == batch
        assert job.parallelism.layers_per_stage == (12 // (pp * vpp),) * (pp * vpp)


@given(st.integers(1, 2000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_warnings() -> None:
    assert warnings(small(parallelism__zero=1)) == [
        "7 of the 8 GPUs of the cluster have no rank; parallelism.dp is 1, as neither it nor cluster.nodes is given: "
        "cluster.nodes: 1 gives all of them a rank, with dp 8",
        "parallelism.zero saves nothing: with dp * cp 1 there is no replica to share the optimizer state with",
    ]
    assert "allow_tf32" in warnings(small(parallelism__dp=8, training__precision="fp32"))[0]
    # A V100 has no TF32, and its products in fp32 are plain ones.
    old = small(parallelism__dp=8, training__precision="fp32", cluster={"name": "dgx1_v100", "nodes": 1})
    assert not [warning for warning in warnings(old) if "TF32" in warning]
    assert "flash attention keeps no scores" in warnings(small(parallelism__dp=8, training__recompute="selective"))[0]
    assert warnings(small(parallelism__dp=8, training__recompute="selective", model__attention="unfused")) == []


def test_a_loaded_workload_can_be_altered_as_its_file_could() -> None:
    """What followed from other keys follows again; what is not legal is refused as anywhere."""
    small = {"training.micro_batch": 1, "cluster.nodes": 1}
    workload = load_workload("gpt22b_tp8", small | {"parallelism.tp": 1, "parallelism.pp": 4})
    assert altered(workload, {}) == workload
    assert workload.parallelism.dp == 2
    layout = {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.dp": 1}
    wider = altered(workload, layout)
    assert wider == load_workload("gpt22b_tp8", small | layout)
    assert wider.parallelism.layers_per_stage == (24, 24)
    assert altered(workload, {"training.recompute": "full"}).training.recompute.granularity == "full"
    assert altered(workload, {"cluster.nodes": 2}).cluster.nodes == 2
    with pytest.raises(InputError, match="layers_per_stage"):
        altered(workload, {"parallelism.pp": 5})


def test_nodes_that_followed_from_the_ranks_follow_again_in_a_changed_copy() -> None:
    """pp 2 alone needs one node of eight GPUs; a changed copy still has one replica, not one per pair of GPUs."""
    sizes = {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50_000}
    job = {"name": "tiny", "model": sizes, "training": {"seq": 1024, "global_batch": 8}, "cluster": "dgx_a100"}
    first = load_workload(job, {"parallelism.pp": 2})
    assert (first.cluster.nodes, first.parallelism.dp) == (1, 1)
    second = altered(first, {"parallelism.tp": 8})
    assert (second.cluster.nodes, second.parallelism.dp) == (2, 1)


def test_a_key_inside_a_section_of_a_preset_overrides_that_key_alone() -> None:
    """8 experts, top 2, from the preset; the distribution from beside it."""
    model = {"preset": "mixtral-8x7b", "moe": {"token_distribution": {"skew": 0.5}}}
    data = {"model": model, "training": {"seq": 4096, "global_batch": 8}, "cluster": {"name": "dgx_h100", "nodes": 1}}
    moe = load_workload(data).model.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn_hidden) == (8, 2, 14336)
    assert moe.token_distribution != "balanced"


@pytest.mark.parametrize("reference", ["a\0.csv", "~nouserx/a.csv", "x" * 300 + ".csv"])
def test_a_schedule_that_can_be_no_file_is_refused(reference: str) -> None:
    with pytest.raises(InputError, match=r"parallelism\.schedule: cannot be a file"):
        small(parallelism__schedule=reference)


@pytest.mark.parametrize("framework", [PYTORCH, COMPILED])
def test_a_job_without_a_pipeline_is_not_warned_of_one(framework: Any) -> None:
    """What `framework` decides, nobody gave."""
    given = {"training": {"seq": 128, "global_batch": 8}, "framework": framework, "parallelism": {"dp": 8}}
    job = {"model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512}, "cluster": "dgx_h100", **given}
    assert not [text for text in warnings(load_workload(job)) if "pipeline" in text]


def test_set_takes_a_cluster_and_keys_inside_it_in_either_order() -> None:
    keys = {"cluster.node.host_speed": 0.8, "cluster": "hgx_h200_8gpu"}
    one, other = (load_workload("gpt22b_tp8", dict(order)) for order in (keys.items(), reversed(keys.items())))
    assert one == other
    assert one.cluster.node_at(0).host_speed == 0.8
    assert one.gpu_types == ("h200-sxm-141gb",)


def test_a_job_that_says_neither_nodes_nor_replicas_is_told_how_to_use_all_gpus() -> None:
    """Four GPUs in the node, of which one has a rank. What the sentence says to write is legal and uses all. Where the
    batch does not divide by that many replicas, nothing is said to write, and where dp is given, nothing is missing."""
    four = {"name": "four", "node": {"gpus": {"type": "h100-sxm-80gb", "count": 4}, "pcie": {"generation": 5}}}
    job = SMALL | {"cluster": four, "training": {**SMALL["training"], "global_batch": 8}, "parallelism": {"zero": 3}}
    told = [note for note in warnings(load_workload(job)) if "no rank" in note]
    assert told == [
        "3 of the 4 GPUs of the cluster have no rank; parallelism.dp is 1, as neither it nor cluster.nodes is given: "
        "cluster.nodes: 1 gives all of them a rank, with dp 4"
    ]
    assert load_workload(job, {"cluster.nodes": 1}).n_ranks == 4
    odd = [note for note in warnings(load_workload(job, {"training.global_batch": 7})) if "no rank" in note]
    assert odd == [told[0].partition(": cluster.nodes")[0]]
    given = [note for note in warnings(load_workload(job, {"parallelism.dp": 1})) if "no rank" in note]
    assert given == ["3 of the 4 GPUs of the cluster have no rank"]


@pytest.mark.parametrize("name", catalog.names("workload"))
def test_every_shipped_workload_reads_back_from_its_dump(name: str) -> None:
    first = load_workload(name)
    assert load_workload(json.loads(json.dumps(first.model_dump(mode="json")))) == first


@pytest.mark.parametrize("name", catalog.names("cluster"))
def test_a_job_on_every_shipped_cluster_reads_back_to_the_same_step(name: str) -> None:
    changes = {"training.precision": "fp16", "training.global_batch": 144, "model.layers": 2}
    first = load_workload(SMALL | {"cluster": {"name": name, "nodes": 1}}, changes)
    again = load_workload(json.loads(json.dumps(first.model_dump(mode="json"))))
    assert again == first
    assert simulator.run(again).spans.step_time_s == simulator.run(first).spans.step_time_s

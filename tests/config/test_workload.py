"""The workload file: defaults, expansion, and every illegal workload with the remedy that it is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator.config
from simulator.config import ClusterSpec, Workload, catalog, load_cluster, load_workload, presets, warnings
from simulator.config.section import docstring_of, section_of
from simulator.config.training import Training
from simulator.input_files import read_yaml
from tests.support.small_workload import SMALL, refused, small

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


def test_null_undoes_what_a_preset_or_a_config_says(tmp_path: Path) -> None:
    """Each null leaves the model as if the preset did not have the key; so do those inside a section."""
    mistral = small(model={"preset": "mistral-7b", "sliding_window": None}).model
    assert (mistral.sliding_window, mistral.hidden) == (None, 4096)
    assert small(model={"preset": "mixtral-8x7b", "moe": None}).model.moe is None
    gemma = small(model={"preset": "gemma2-9b", "attention_softcap": None}).model
    assert (gemma.attention_softcap, gemma.logit_softcap) == (None, 30.0)
    moe = small(model={"preset": "qwen3-next-80b-a3b", "moe": {"shared_gate": None}}).model.moe
    assert moe is not None
    assert (moe.shared_gate, moe.shared_experts) == (False, 1)
    config = {"model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 4, "vocab_size": 128, "sliding_window": 16, "num_key_value_heads": 4}
    config |= {"hidden_act": "silu", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for written, window in (({}, 16), ({"sliding_window": None}, None)):
        assert small(model={"hf_config": str(tmp_path / "config.json"), **written}).model.sliding_window == window
    assert "a required key is missing" in refused({"model": {"preset": "mistral-7b", "layers": None}})


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


def test_presets_read_one_by_one_are_those_of_the_whole_file() -> None:
    """No preset needs another's lines, and none is lost or stands twice, which reading the whole would refuse."""
    whole = read_yaml(Path(simulator.config.__file__).with_name("presets.yaml"))
    assert dict(presets()) == whole
    assert list(presets()) == list(whole)


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

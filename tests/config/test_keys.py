"""Keys that are none: what is meant, and where it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import simulator
from simulator.cli.app import main
from simulator.config import Workload, load_workload
from simulator.config.section import likeliest, paths
from simulator.config.synonyms import SYNONYMS, here
from simulator.errors import InputError

JOB: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024},
    "training": {"seq": 512, "global_batch": 16},
    "cluster": {"name": "dgx_a100", "nodes": 2},
}


def refused(changes: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        load_workload(JOB, changes)
    return str(caught.value)


def test_every_synonym_means_a_key_that_there_is_and_is_none_itself() -> None:
    known = set(paths(Workload))
    for name, meant in SYNONYMS.items():
        assert meant.split(":")[0] in known, name
        section = meant.rpartition(".")[0]
        assert f"{section}.{name}" not in known, name


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("parallelism.fsdp", "zero: 3 instead of fsdp"),
        ("training.sequence_length", "seq instead of sequence_length"),
        ("training.batch_size", "global_batch instead of batch_size"),
        ("training.gradient_accumulation_steps", "global_batch: micro_batch x dp x those steps"),
        ("parallelism.tensor_model_parallel_size", "tp instead of tensor_model_parallel_size"),
        ("parallelism.pipeline-model-parallel-size", "pp instead of pipeline-model-parallel-size"),
        ("model.num_hidden_layers", "layers instead of num_hidden_layers"),
        ("cluster.num_nodes", "nodes instead of num_nodes"),
        ("cluster.gpus", "nodes: GPUs of the job / GPUs of a node instead of gpus"),
        ("gpus", "cluster.nodes: GPUs of the job / GPUs of a node"),
        ("batch_size", "training.global_batch"),
        ("training.num_nodes", "cluster.nodes"),
        ("parallelism.schedul", "schedule instead of schedul"),
        ("tp", "parallelism.tp"),
    ],
)
def test_what_another_framework_calls_a_key_is_answered_with_ours(key: str, fix: str) -> None:
    assert f"fix:     {fix}" in refused({key: 2})


@pytest.mark.parametrize("section", ["training", "parallelism", "model", "cluster"])
def test_a_synonym_of_another_sections_key_is_answered_with_that_and_not_with_what_it_looks_like(section: str) -> None:
    """``parallelism.batch_size`` is no misspelt ``batch_p2p``."""
    for name, meant in SYNONYMS.items():
        known, _, key = meant.rpartition(".")
        fix = f"{key} instead of {name}" if known == section else meant
        assert f"fix:     {fix}\n" in refused({f"{section}.{name}": 2}) + "\n", name


@pytest.mark.parametrize(
    ("entry", "phrases"),
    [
        (
            {"source": "node0.nic0", "to": "node1.nic0", "bandwidth_Bps": 1e9},
            ["from instead of source", "from, to, ban"],
        ),
        ({"links": "node0.nic*", "share": 0.5}, ["link instead of links", "background[0].link: a required key"]),
        ({"shar": 0.5}, ["share instead of shar"]),
        ({"from": "node0.nic0", "share": 0.5}, ["background[0].share: unknown key", "background[0].to: a required"]),
    ],
)
def test_background_traffic_is_judged_as_what_it_is_meant_as(entry: dict[str, Any], phrases: list[str]) -> None:
    message = refused({"cluster.background": [entry]})
    assert all(phrase in message for phrase in phrases)
    assert "allowed: source" not in message


def test_a_section_of_several_kinds_is_told_by_its_first_key_then_by_most_keys() -> None:
    from simulator.hardware.overrides import GpuOverride, LinkOverride, NicOverride

    kinds = (LinkOverride, GpuOverride, NicOverride)
    for entry, meant in (
        ({"nic": "node0.nic1", "bandwidth_scale": 0.5}, "NicOverride"),
        ({"gpus": "node0.gpu1", "speed_scale": 0.5}, "GpuOverride"),
        ({"lnik": "node0.nic1", "bandwidth_scale": 0.5}, "LinkOverride"),
        ({}, "LinkOverride"),
        (GpuOverride(gpu="node0.gpu1", missing=True), "GpuOverride"),
    ):
        assert likeliest(entry, *kinds) == meant


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("section", ["overrides", "background"])
def test_names_of_links_that_do_not_exist_are_told_with_file_and_key(
    command: str, section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which links there are is known when the cluster is built, after all files have been read."""
    scale = {"overrides": "bandwidth_scale", "background": "share"}[section]
    entries = [{"link": "node0.nic77", scale: 0.5}]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**JOB, "cluster": {**JOB["cluster"], section: entries}}))
    with pytest.raises(SystemExit):
        main([command, str(path)])
    assert f"error: {path}: cluster.{section}[0].link: this link does not exist" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(JOB))
    with pytest.raises(SystemExit):
        main([command, str(path), "--set", f"cluster.{section}={entries}"])
    assert f"error: --set: cluster.{section}[0].link: this link does not exist" in capsys.readouterr().err
    with pytest.raises(InputError, match=rf"set: cluster\.{section}\[0\]\.link: this link does not exist"):
        simulator.run(path, set={f"cluster.{section}": entries})


def test_here_knows_options_as_they_are_typed() -> None:
    assert here("--context-parallel-size") == ("parallelism", "cp")
    assert here("Batch_Size") == ("training", "global_batch")
    assert here("seq") is None


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"calibration": "a16-16gb"}, "a100"),  # an A16 is no A100
        ({"cluster.node.gpus.type": "a16-16gb"}, "a100"),
        ({"model.quantisation": "nf4"}, "activation"),
        ({"nodes": [1]}, "note instead"),
    ],
)
def test_no_name_is_proposed_that_is_not_alike(changes: dict[str, Any], other: str) -> None:
    message = refused(changes)
    assert other not in message.partition("fix:")[2]


def test_a_key_inside_a_section_is_named_before_one_that_looks_like_it() -> None:
    assert "fix:     cluster.nodes" in refused({"nodes": 2})


def test_errors_in_a_list_of_gpus_name_the_entry() -> None:
    several = [{"type": "rtx-4090-24gb", "count": 2}, {"type": "l40s-48gb", "cuont": 2}]
    message = refused({"cluster.node.gpus": several})
    assert "cluster.node.gpus[1].cuont: unknown key" in message
    assert "cluster.node.gpus[1].count: a required key is missing" in message
    assert "cluster.node.gpus: has not as many items" in refused({"cluster.node.gpus": []})
    crowd = refused({"cluster.node.gpus": [{"type": "l40s-48gb", "count": 500}] * 2})
    assert "are more GPUs than a node holds" in crowd


def test_a_number_where_a_section_must_be_is_refused_without_an_empty_list_of_keys() -> None:
    assert "None" not in refused({"cluster.node.gpus": 256})


def test_a_preset_beside_a_config_says_how_to_leave_it_out() -> None:
    assert "fix:     model.preset: null" in refused({"model.preset": "llama3-8b", "model.hf_config": "x"})


def test_an_id_of_hugging_face_as_a_preset_says_where_ids_are_taken() -> None:
    """No preset is spelt nearly so."""
    assert "llmsim init --model meta-llama/Llama-3.1-8B" in refused({"model.preset": "meta-llama/Llama-3.1-8B"})

"""What is refused of a workload, by key, value and remedy, and the layouts that are proposed instead."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.config import load_workload
from simulator.config.rules.numbers import divisors, split
from simulator.errors import InputError
from simulator.frameworks.framework import UnfusedPart
from tests.support.small_workload import SMALL, refused, small

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
        # A step of the small job trains on global_batch x seq tokens.
        ({"training.total_tokens": 1}, "training.total_tokens", "which is global_batch x seq"),
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
        ({"cluster.node.gpus.type": "gtx-970"}, "cluster.node.gpus.type", "without a profile"),
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
        *(
            ({"training.precision": "fp32", "training.attention_kernel": older}, "training.attention_kernel", "newest")
            for older in ("flash2", "triton")
        ),
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
@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize(
    ("key", "value", "lines"),
    [
        (
            "model.attention_sinks",
            "windw",
            ["is none of the known values", "found:   'windw'", "allowed: true, false or window"],
        ),
        ("model.attention_sinks", 3, ["is none of the known values", "found:   3", "allowed: true, false or window"]),
        ("placement", 3, ["is none of the known values", "found:   3", "allowed: packed, interleaved, or a list"]),
        ("placement", [-1], ["is out of range", "found:   -1", "allowed: >= 0"]),
        (
            "calibration",
            3,
            ["must be text or a mapping of keys", "found:   3", "allowed: text or a mapping of keys"],
        ),
        (
            "training.unfused",
            "qkv_bias",
            ["must be a list", "found:   'qkv_bias'", f"allowed: a list of {', '.join(get_args(UnfusedPart))}"],
        ),
    ],
)
def test_a_value_of_none_of_several_kinds_has_one_error_under_the_key_that_was_written(
    key: str, value: object, lines: list[str]
) -> None:
    message = refused({key: value})
    head, *others = (line.strip() for line in message.splitlines())
    place = f"{key}[0]" if isinstance(value, list) else key
    assert [head, *others[:2]] == [f"--set: {place}: {lines[0]}", *lines[1:]]
    assert message.count("found:") == 1


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("parallelism.offload.optimizer", True, "optimizer: cpu or nvme"),
        ("training.recompute", False, "granularity: none"),
    ],
)
def test_true_and_false_stand_for_words(key: str, value: bool, fix: str) -> None:
    assert refused({key: value}).endswith(f"fix:     {fix}")


def test_a_word_in_place_of_a_list_is_put_into_one() -> None:
    assert refused({"model.biases": "qkv"}).endswith("fix:     biases: [qkv]")
    assert "fix:" not in refused({"model.biases": "everything"})


def test_a_key_that_is_called_as_a_kind_of_value_is_unknown_by_its_own_name() -> None:
    assert "model.str: unknown key" in refused({"model.str": 1})


def test_a_bad_config_json_is_one_error_in_python_too(tmp_path: Path) -> None:
    """What is checked beside it, and would be missing without it, is no part of the traceback."""
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "no_such"}')
    with pytest.raises(InputError, match="this architecture is not supported") as caught:
        load_workload({"model": {"hf_config": str(file)}, "training": {}, "cluster": "dgx_h100"})
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


def test_a_part_that_is_named_twice_is_refused_once() -> None:
    message = refused({"training.unfused": ["rotation", "router", "rotation"], "framework": "megatron_core"})
    assert "training.unfused: names a part more than once" in message
    assert message.count("found:") == 1


def test_selective_recomputation_of_what_the_model_has_not_names_the_key_that_was_given() -> None:
    """No layer attends, and core_attn is the default of `modules`. Named, it is that key's error."""
    model = {"model.mixers": ["kimi_delta"], "model.kimi_delta": {"heads": 4, "head_dim": 64}}
    message = refused(model | {"training.recompute": "selective"})
    assert message.startswith("--set: training.recompute: selective computes core_attn again")
    assert "allowed: none or full, or modules of layernorm, mlp" in message
    named = refused(model | {"training.recompute": {"granularity": "selective", "modules": ["core_attn"]}})
    assert named.startswith("--set: training.recompute.modules: the model has no such modules")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model.kimi_delta": {"heads": 4, "head_dim": 64}}, "{heads: 4, head_dim: 64, conv_width: 4}"),
        ({"model.mixers": ["kimi_delta"]}, "nothing"),
        ({"model.layers": {"training.seq": 1024}}, "{training.seq: 1024}"),
        ({"training.global_batch": 1e30}, "1e+30"),
        ({"model.layers": [True, None, (1, 2)]}, "[true, null, [1, 2]]"),
    ],
)
def test_what_was_found_is_written_as_yaml(changes: dict[str, Any], found: str) -> None:
    assert f"found:   {found}" in refused(changes).splitlines()[1]

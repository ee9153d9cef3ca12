"""What users mistype about clusters, collectives and tables of measurements: refused by name, or played as said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.cli.app import main
from simulator.cli.collective import command as collective
from simulator.cli.validate import verdict
from simulator.cluster import build_cluster
from simulator.commands.collective import parse_sizes
from simulator.config import Workload, load_workload
from simulator.config.catalog import FileKind, find
from simulator.config.cluster import load_cluster
from simulator.config.section import paths
from simulator.errors import InputError
from simulator.validation.collective_scores import Prediction, compare
from simulator.validation.collectives import measurements
from simulator.validation.rows import read_rows
from tests.support.jobs import job

NODE = {
    "gpus": {"type": "h100-sxm-80gb", "count": 4},
    "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 450e9, "latency_s": 1e-6},
    "pcie": {"generation": 5, "lanes": 16, "gpus_per_switch": 2, "p2p": True},
    "nics": {"count": 2, "bandwidth_bps": 400e9, "latency_s": 2e-6, "attach": "pcie_switch"},
}


def _cluster(fabric: dict[str, Any] | None = None, nodes: int = 2, **keys: Any) -> Any:
    return load_cluster({"node": NODE, "nodes": nodes, "fabric": fabric or {"kind": "fat_tree"}, **keys})


def _missing(*names: str) -> list[dict[str, object]]:
    return [{"gpu": name, "missing": True} for name in names]


@pytest.mark.parametrize("bare", [(0,), (2,), (0, 1), (1, 2), (0, 3)])
def test_nodes_without_gpus_belong_to_neither_half(bare: tuple[int, ...]) -> None:
    """Four nodes of two 50 GB/s cards. Those without GPUs neither send nor receive, so that halves are of the others:
    one node against one or two, which is what the cards of one node carry."""
    built = build_cluster(_cluster(nodes=4, overrides=_missing(*(f"node{node}.gpu*" for node in bare))))
    assert built.bisection_Bps() == pytest.approx(100e9)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_the_only_node_with_gpus_is_halved_itself(left: int) -> None:
    """Two of its four GPUs send 450 GB/s each, wherever the node stands among others that have none."""
    bare = _missing(*(f"node{node}.gpu*" for node in range(3) if node != left))
    assert build_cluster(_cluster(nodes=3, overrides=bare)).bisection_Bps() == pytest.approx(900e9)


@pytest.mark.parametrize("name", ["node00.gpu0", "node0.gpu00", "node01.gpu1"])
def test_a_part_has_one_name(name: str) -> None:
    with pytest.raises(InputError, match="is no name of a GPU"):
        _cluster(overrides=_missing(name))


@pytest.mark.parametrize("value", [-7, 1e300, "zzz", [1], {"q": 1}])
def test_what_is_allowed_is_said_of_every_key(value: object) -> None:
    """Each key of a workload and its cluster with a value that hardly any can have: who is refused is told what would
    do, or what the key that is missing means."""
    work = job(model__moe={"experts": 8, "top_k": 2, "ffn_hidden": 512}, parallelism__dp=8) | {
        "cluster": {"node": NODE, "nodes": 2, "fabric": {"kind": "fat_tree"}}
    }
    load_workload(work)
    refused = 0
    for key in dict.fromkeys(paths(Workload)):
        try:
            load_workload(work, {key: value})
        except InputError as error:
            refused += 1
            for one in getattr(error, "errors", [error]):
                told = one.allowed or one.fix or "is missing (" in one.message or "must be a name" in one.message
                assert told, str(one)
    assert refused > 100


@pytest.mark.parametrize(
    ("key", "value", "allowed", "fix"),
    [
        ("parallelism.zero", 5, ">= 0, <= 3", "zero: 3"),
        ("parallelism.zero", -1, ">= 0, <= 3", "zero: 0"),
        ("parallelism.hsdp", 0, ">= 1, <= 1,000,000", None),  # 1 is refused in turn: one GPU is no group of shards
        ("parallelism.layers_per_stage", [2, -2], ">= 0", "layers_per_stage[1]: 0"),
        ("parallelism.zb_memory_limit", 0, "> 0, <= 1,000,000", None),
        ("model.dropout", 1.5, ">= 0, < 1", None),
    ],
)
def test_a_range_is_said_with_both_ends_and_the_nearest_of_whole_numbers(
    key: str, value: object, allowed: str, fix: str | None
) -> None:
    with pytest.raises(InputError) as caught:
        load_workload(job(), {key: value})
    assert (caught.value.allowed, caught.value.fix) == (allowed, fix)
    assert str(caught.value.key).endswith((fix or key).split(":")[0])


def test_small_bounds_are_printed_as_they_are() -> None:
    """The smallest scale is 1e-6; what is refused must not be within what is said to be allowed."""
    with pytest.raises(InputError, match=r">= 1e-06"):
        _cluster(overrides=[{"link": "node0.nic0", "bandwidth_scale": 0}])
    with pytest.raises(InputError, match=r">= 1e-06, <= 1,000,000"):
        _cluster(overrides=[{"link": "node0.nic0"}])


@pytest.mark.parametrize(
    ("radix", "oversubscription", "fits"), [(8, 7, True), (8, 7.5, False), (64, 63, True), (4, 1000, False)]
)
def test_a_leaf_keeps_a_port_upwards(radix: int, oversubscription: float, fits: bool) -> None:
    """Of r ports at most r - 1 lead down, so that nothing is more than (r - 1) : 1."""
    fabric = {"kind": "fat_tree", "radix": radix, "oversubscription": oversubscription}
    if fits:
        _cluster(fabric)
    else:
        with pytest.raises(InputError, match=f"<= {radix - 1}: at least one of {radix} ports leads up"):
            _cluster(fabric)


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"a": {"at": "z", "nodes": 2}}, r"switches\.a\.at: is no switch"),
        ({"a": {}, "b": {"at": "c", "nodes": 2}, "c": {"at": "z"}}, r"switches\.c\.at: is no switch"),
        ({"a": {"at": "b"}, "b": {"at": "a", "nodes": 2}}, "hangs under itself"),
        ({"a": {}, "b": {"at": "c"}, "c": {"at": "b", "nodes": 2}}, "hangs under itself"),
        ({"a": {"nodes": 1}, "b": {"nodes": 1}}, "one switch has none above it"),
    ],
)
def test_a_tree_of_switches_says_what_is_wrong_with_it(switches: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_cluster(_cluster({"kind": "switch_tree", "switches": switches}))


def test_a_long_chain_of_switches_is_a_tree() -> None:
    """3,000 switches in a row, a node at either end: built at once, and as deep as it is long."""
    chain: dict[str, dict[str, object]] = {"s0": {"nodes": 1}}
    chain |= {f"s{i}": {"at": f"s{i - 1}"} for i in range(1, 3000)}
    chain["s2999"]["nodes"] = 1
    assert build_cluster(_cluster({"kind": "switch_tree", "switches": chain})).switches.tiers == 3000


@pytest.mark.parametrize("text", ["", " ", ",", "8,", "0", "8388608T", "8:8388608T"])
def test_sizes_are_of_64_bits_and_never_nothing(text: str) -> None:
    """2^23 T is 2^63; the largest is one byte less. Nothing given in so many words is not the default."""
    with pytest.raises(InputError, match="are no sizes"):
        parse_sizes(text)
    with pytest.raises(InputError, match="are no sizes"):
        collective(cluster="dgx_h100", op="all_reduce", sizes=text)
    assert parse_sizes("8388607T") == [2**63 - 2**40]


@pytest.mark.parametrize(("text", "fix"), [("1,024", "1024"), ("1,024:2,048M", "1024:2048M"), ("8,007", "8007")])
def test_sizes_with_commas_between_thousands_are_told_without(text: str, fix: str) -> None:
    """A list of sizes has commas too, and no size begins with 0."""
    with pytest.raises(InputError, match="are no sizes") as refused:
        parse_sizes(text)
    assert refused.value.fix == fix
    parse_sizes(fix)


@pytest.mark.parametrize("kind", ["cluster", "profile", "stack", "workload"])
@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_no_file(kind: FileKind, name: str) -> None:
    """It is neither the default nor the current directory."""
    with pytest.raises(InputError, match=f"no {kind} file of this name"):
        find(kind, name)


def test_an_empty_option_is_not_the_default() -> None:
    for option, kind in (("calibration", "profile"), ("stack", "stack"), ("cluster", "cluster")):
        given: dict[str, Any] = {"cluster": "dgx_h100", "op": "all_reduce", "sizes": "8", option: ""}
        with pytest.raises(InputError, match=f"no {kind} file of this name"):
            collective(**given)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_the_fix_of_an_algorithm_is_one_that_runs(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    """NVLS inside a node has nothing for two of them; what is proposed instead has."""

    def run(algorithm: str) -> None:
        collective(cluster="dgx_h100", nodes=2, op=op, sizes="1M", algorithm=algorithm)

    with pytest.raises(InputError) as refused:
        run("nvls")
    run(str(refused.value.fix).removeprefix("algorithm "))
    assert op in capsys.readouterr().out


def test_a_gpu_without_calibration_is_named_where_no_option_was_given(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    node = str(NODE).replace("h100-sxm-80gb", "t4")
    file.write_text(f"name: c\nnode: {node}\n")
    with pytest.raises(InputError, match=r"gpus\.type: no calibration of this GPU is shipped"):
        collective(cluster=str(file), op="all_reduce", sizes="8")


def test_a_file_of_switches_alone_is_no_cluster(tmp_path: Path) -> None:
    file = tmp_path / "topology.conf"
    file.write_text("SwitchName=s0 Nodes=n[0-3]\n")
    with pytest.raises(InputError, match=r"says nothing of the nodes themselves(.|\n)*llmsim import .* --node"):
        load_cluster(str(file))
    # With nodes of its own beside it, it is one.
    assert load_cluster({"name": str(file), "node": NODE}).nodes == 4


@pytest.mark.parametrize(("nodes", "idle"), [(2, 10), (3, 18)])
def test_gpus_without_work_are_those_that_no_job_has(nodes: int, idle: int) -> None:
    """Two jobs of 2 and 4 ranks on a node each of eight GPUs, and a node that nobody has: of all, not per job."""
    spec = {"node": {**NODE, "gpus": {"type": "a100-sxm-80gb", "count": 8}}, "nodes": nodes, "name": "c"}
    one, other = (job(parallelism__dp=dp) | {"name": f"dp{dp}", "cluster": spec} for dp in (2, 4))
    result = simulator.share([one, other]).to_dict()
    assert result["warnings"] == [f"{idle} of the {8 * nodes} GPUs of the cluster have no rank"]
    assert [run["warnings"] for run in result["runs"]] == [[], []]


COLUMNS = "id,op,size,n_gpus,nodes,algbw,busbw,latency_us,hardware,cluster"


def _table(tmp_path: Path, *lines: str, columns: str = COLUMNS) -> list[dict[str, str]]:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([columns, *lines]) + "\n")
    return measurements(file)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ("all_reduce,8MB,1,1,100,,,", "one GPU has nobody to send to"),
        ("p2p,8MB,1,1,100,,,", "one GPU has nobody to send to"),
        ("all_reduce,8MB,16.5,2,100,,,", "n_gpus '16.5' is not a whole number"),
        ("all_reduce,8MB,2e6,2,100,,,", "n_gpus '2e6' is not a whole number up to 1,000,000"),
        ("all_reduce,8MB,1e300,2,100,,,", "n_gpus '1e300' is not a number above 0, and at most 1e+15"),
        ("all_reduce,8MB,16,0.5,100,,,", "nodes '0.5' is not a whole number"),
        ("all_reduce,8MB,16,1.5,100,,,", "nodes '1.5' is not a whole number"),
        ("all_reduce,9e300,8,1,100,,,", "size '9e300' is no number of bytes"),
        ("all_reduce,8MB,16,2,100,fast,,", "busbw 'fast' is not a number above 0"),
    ],
)
def test_rows_that_cannot_be_are_skipped_with_the_reason(tmp_path: Path, cells: str, reason: str) -> None:
    """Nothing is rounded to what could be simulated."""

    def predict(case: object) -> Any:
        raise AssertionError(f"{case} was simulated")

    (compared,) = compare(_table(tmp_path, f"a,{cells},dgx_h100"), predict)
    assert reason in compared.outcome.skipped


def test_a_table_is_as_wide_as_its_head(tmp_path: Path) -> None:
    """A cell too many moves the others to columns that they are not of; of two columns of one name one is lost."""
    good = "a,all_reduce,8MB,16,2,100,,,z,dgx_h100"
    assert len(_table(tmp_path, good)) == 1
    with pytest.raises(InputError, match="row 2 has more cells"):
        _table(tmp_path, good, good.replace("a,", "b,", 1).replace("8MB", "8,000,000"))
    with pytest.raises(InputError, match=re.compile("two columns have this name.*op", re.DOTALL)):
        _table(tmp_path, good + ",reduce", columns=COLUMNS + ",op")


def test_a_word_that_may_also_be_a_list_is_told_once_and_by_its_key() -> None:
    with pytest.raises(InputError) as error:
        simulator.run("llama3_8b_dgx_h100", set={"placement": "packd"})
    assert "fix:     placement: packed" in str(error.value)
    assert "list" not in str(error.value)


@pytest.mark.parametrize("given", [["parallelism.tp=4"], "parallelism.tp=4", 4])
def test_changes_that_are_no_mapping_are_refused(given: object) -> None:
    with pytest.raises(InputError, match="must be a mapping"):
        simulator.run("llama3_8b_dgx_h100", set=given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("skipped", "said"), [(0, "limits: mean 10%: met"), (1, "limits: mean 10%, skipped 10%: NOT MET")]
)
def test_a_limit_on_skipped_rows_is_named_where_rows_were(skipped: int, said: str) -> None:
    """Else a mean of 2.5 % under a limit of 10 % is called not met, and nobody knows why."""
    figures = dict.fromkeys(("mean_abs", "median_abs", "max_abs", "bias"), 0.025)
    counts = {"n_rows": 1 + skipped, "n_skipped": skipped, "passed": not skipped}
    assert verdict({**figures, **counts, "bounds": {"mean": 0.1, "row": None}}).endswith(said)


@pytest.mark.parametrize(
    ("column", "fix"),
    [
        ("training.sq", "training.seq"),
        ("trainin.seq", "training.seq"),
        ("paralelism.tp", "parallelism.tp"),
        ("a.b", None),
    ],
)
def test_a_dotted_column_that_is_no_key_is_refused(column: str, fix: str | None, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"id,workload,measured_step_s,{column}\nrow,llama3_8b_dgx_h100,1.0,1\n")
    with pytest.raises(InputError, match="no such key of a workload") as error:
        read_rows(table)
    assert fix is None or f"{fix} instead" in str(error.value)


@pytest.mark.parametrize("column", ["training.seq", "cluster.node.gpus.count", "model.moe.experts", "note v1.0"])
def test_dotted_columns_that_are_keys_or_labels_are_taken(column: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"id,workload,measured_step_s,{column}\nrow,llama3_8b_dgx_h100,1.0,1\n")
    assert read_rows(table)[0][column] == "1"


def test_a_word_that_is_nearly_known_is_proposed() -> None:
    with pytest.raises(InputError) as schedule:
        simulator.schedule("1f1bb", 2, 2)
    with pytest.raises(InputError) as algorithm:
        collective(cluster="dgx_h100", op="all_reduce", sizes="1M", algorithm="rin")
    assert (schedule.value.fix, algorithm.value.fix) == ("1f1b", "ring")


def test_what_a_search_is_told_is_refused_without_one(tmp_path: Path) -> None:
    """Beside a schedule that searches, others go without it."""
    with pytest.raises(InputError, match="has no meaning with the schedule 1f1b") as caught:
        simulator.schedule("1f1b", 2, 2, zb_memory_limit=0.5)
    assert (caught.value.key, caught.value.fix) == ("zb_memory_limit", "schedule zb_auto")
    out = tmp_path / "out.json"
    arguments = ["--stages", "3", "--microbatches", "6", "--zb-memory-limit", "2", "--quiet", "--json", str(out)]
    for names, status in ((["1f1b"], 2), (["1f1b", "--compare", "gpipe"], 2), (["1f1b", "--compare", "zb_auto"], 0)):
        with pytest.raises(SystemExit) as done:
            main(["schedule", *names, *arguments])
        assert done.value.code == status
    peaks = [max(report["peak_activations"]) for report in json.loads(out.read_text())["schedules"]]
    assert peaks[0] == 3
    assert 3 < peaks[1] <= 6


@pytest.mark.parametrize("time", ["1e300", "1e9", "1e-9", "-1", "nan", "inf", "fast"])
def test_no_step_takes_so_long_or_short(time: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a row is skipped in one line; that nothing has been compared is said where the table is not printed, too."""
    table = tmp_path / "rows.csv"
    table.write_text(f"id,workload,measured_step_s\na,gpt22b_tp8,{time}\nb,gpt22b_tp,1\n")
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit):
        main(["validate", "--rows", str(table), "--quiet", "--json", str(out)])
    known = json.loads(out.read_text())
    first, second = (row["skipped"] for row in known["suites"][0]["rows"])
    assert f"measured_step_s '{time}' is no" in first
    assert second.startswith("no workload file of this name; found: 'gpt22b_tp'; allowed: a path, or one of ")
    assert "\n" not in second
    assert f"no row of {table} could be simulated" in known["warnings"][0]
    assert "nothing has been compared" in " ".join(capsys.readouterr().err.split())


def test_figures_of_a_table_are_not_beyond_all_bounds(tmp_path: Path) -> None:
    """An algbw of 1e300 would be a time of 0, and an error beyond all numbers."""
    rows = _table(tmp_path, "a,all_reduce,8MB,8,1,1e300,,,,dgx_h100", "b,all_reduce,8MB,8,1,,,1e300,,dgx_h100")
    reasons = [compared.outcome.skipped for compared in compare(rows, lambda _: Prediction(1.0, "ring", "ll", 1.0))]
    assert ["algbw '1e300'" in reasons[0], "latency_us '1e300'" in reasons[1]] == [True, True]
    assert all("is not a number above 0, and at most 1e+15" in reason for reason in reasons)


def test_files_that_would_take_minutes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Too many keys; an XML of 10,001 GPUs and one of 577, one more than a node can have; a chain of 5,000
    switches. Larger ones took a minute and more, or gigabytes."""
    keys, topology = tmp_path / "keys.yaml", tmp_path / "topology.conf"
    keys.write_text("\n".join(f"k{i}: {i}" for i in range(50_001)))
    with pytest.raises(InputError, match="more than 50,000 keys and values"):
        load_workload(keys)
    for count, message in ((10_001, "more than 20,000 elements"), (577, "<= 576")):
        gpus = "".join(
            f'<pci busid="{i:04x}:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">'
            f'<gpu dev="{i}" sm="90" rank="{i}" gdr="1"/></pci>'
            for i in range(count)
        )
        xml = tmp_path / "node.xml"
        xml.write_text(f'<system version="1"><cpu numaid="0" affinity="ff" arch="x86_64">{gpus}</cpu></system>')
        with pytest.raises(InputError, match=message):
            load_cluster(xml)
    chain = [f"SwitchName=s{i} Switches=s{i - 1}" for i in range(1, 5_000)]
    topology.write_text("\n".join(["SwitchName=s0 Nodes=n[0-3]", *chain]))
    with pytest.raises(InputError, match="s0 is under more than 15 switches"):
        load_cluster({"name": str(topology), "node": NODE})


def test_a_number_where_a_section_stands_is_meant_for_the_key_with_an_s() -> None:
    with pytest.raises(InputError, match=r"cluster\.node: must be a mapping of keys") as error:
        load_workload(
            {
                "model": {"preset": "llama3-8b"},
                "training": {"seq": 2048, "global_batch": 32},
                "cluster": {"name": "dgx_h100", "node": 4},
            }
        )
    assert error.value.fix == "nodes: 4"

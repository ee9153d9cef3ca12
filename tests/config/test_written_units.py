"""Numbers with units in files and options, and the schema that an editor checks them by."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.commands.schema import schema_of
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.input_files import parse_changes

JOB: dict[str, Any] = {
    "model": {"preset": "gpt2-124m"},
    "training": {"seq": 1024, "global_batch": 64},
    "cluster": {"name": "dgx_h100", "nodes": 1},
}


def read(key: str, text: object) -> Any:
    """Return what a job has under a dotted key that says ``text``."""
    job = load_workload(JOB, {key: text})
    return reduce(getattr, key.split("."), job)


@pytest.mark.parametrize(
    ("key", "text", "number"),
    [
        # Lengths of contexts are powers of two: 8k is 8 x 1024.
        ("training.seq", "1k", 1024),
        ("training.seq", "2K", 2048),
        # Tokens of a run are counted in thousands, millions, billions and trillions.
        ("training.total_tokens", "1T", 1e12),
        ("training.total_tokens", "1.5b", 1.5e9),
        # Bytes: MB is 10^6 of them, MiB 2^20.
        ("parallelism.bucket_bytes", "25MB", 25_000_000),
        ("parallelism.bucket_bytes", "25 MiB", 25 * 1024**2),
        # A card of 400 Gbit/s carries 50 GB/s, whichever of the two somebody writes.
        ("cluster.node.nics.bandwidth_bps", "400Gbps", 400e9),
        ("cluster.node.nics.bandwidth_bps", "50GB/s", 400e9),
        ("cluster.node.nvlink.bandwidth_Bps", "3.6Tbit/s", 450e9),
        ("cluster.node.nvlink.latency_s", "3us", 3e-6),
    ],
)
def test_a_number_has_the_unit_that_stands_behind_it(key: str, text: str, number: float) -> None:
    assert read(key, text) == number


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("training.seq", "8q"),
        ("training.seq", "8GB"),
        ("training.seq", "0.3k"),
        ("parallelism.tp", "1k"),
        ("training.seq", "1" * 99 + "k"),
    ],
)
def test_a_unit_that_the_key_has_not_is_refused(key: str, text: str) -> None:
    """0.3 x 1024 is no whole number of tokens, and ranks are counted one by one."""
    with pytest.raises(InputError, match=key):
        read(key, text)


def test_pieces_of_a_sequence_are_counted_like_sequences() -> None:
    job = load_workload(JOB, {"model.mixers": ["chunked"], "model.attention_chunk": "1k", "training.seq": "2k"})
    assert job.model.attention_chunk == 1024


def test_an_error_names_a_unit_that_may_stand_there() -> None:
    with pytest.raises(InputError, match="with a unit such as 400Gbps"):
        read("cluster.node.nics.bandwidth_bps", "fast")


def test_options_of_commands_take_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of a sweep has the number, by which its rows are ordered."""
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "gpt22b_tp8", "--gpus", "8", "--tokens", "1x"])
    assert "such as 1T, or 300B" in capsys.readouterr().err


def test_the_schema_allows_a_number_or_a_text_with_a_unit() -> None:
    defined = schema_of("workload")["$defs"]
    allowed = defined["Training"]["properties"]["seq"]["anyOf"]
    assert [one["type"] for one in allowed] == ["integer", "string"]
    assert defined["Training"]["properties"]["micro_batch"]["type"] == "integer"


def test_sequences_are_not_counted_in_tokens() -> None:
    """4M tokens are 4 x 1024^2; in sequences of 8,192 they are 512."""
    with pytest.raises(InputError, match="counts sequences") as refused:
        load_workload(JOB, {"training.global_batch": "4M", "training.seq": "8k"})
    assert refused.value.fix == "global_batch: 512, as 4M tokens are at seq 8192"
    with pytest.raises(InputError, match="counts sequences") as refused:
        load_workload(JOB, {"training.micro_batch": "3k"})
    assert refused.value.fix == "micro_batch: 3, as 3k tokens are at seq 1024"


@pytest.mark.parametrize(
    ("key", "text", "fix"),
    [
        ("cluster.node.nics.bandwidth_bps", "400G", "bandwidth_bps: 400Gbps"),
        # A small b is a bit, eight of which are a byte; capitals alone may mean either.
        ("cluster.node.nics.bandwidth_bps", "400gbps", "bandwidth_bps: 400Gbps"),
        ("cluster.node.nvlink.bandwidth_Bps", "450gbps", "bandwidth_Bps: 450Gbps"),
        ("cluster.node.nics.bandwidth_bps", "400GBPS", "bandwidth_bps: 400Gbps or 400GBps"),
        ("parallelism.bucket_bytes", "25mb", "bucket_bytes: 25MB"),
        ("parallelism.bucket_bytes", "25Mb", None),
        ("cluster.node.nvlink.bandwidth_Bps", "450G", "bandwidth_Bps: 450GB/s or 450GiB/s"),
        ("parallelism.bucket_bytes", "25M", "bucket_bytes: 25MB or 25MiB"),
        ("training.seq", "8Ki", "seq: 8K"),
        ("training.seq", "8GB", None),
    ],
)
def test_usual_spellings_are_told_the_nearest_one_that_is_read(key: str, text: str, fix: str | None) -> None:
    with pytest.raises(InputError, match="has no such unit") as refused:
        read(key, text)
    assert refused.value.fix == fix
    if fix is not None:
        read(key, fix.split(": ")[1].split(" or ")[0])


@pytest.mark.parametrize("key", ["model.hidden", "model.vocab", "cluster.nodes", "parallelism.tp"])
def test_a_key_without_units_says_so(key: str) -> None:
    """8k may be eight thousand or 8 x 1024: both are named, and none is chosen. So many ranks split no model."""
    with pytest.raises(InputError, match="takes no unit") as refused:
        read(key, "8k")
    assert refused.value.fix == (None if key == "parallelism.tp" else f"{key.split('.')[1]}: 8000 or 8192")


@pytest.mark.parametrize(
    ("text", "plain"), [("0x20", "32"), ("8__000", "8000"), ("8_", "8"), ("\u0668\u0660", "80"), ("\uff13\uff12", "32")]
)
def test_numbers_in_unusual_spellings_are_refused_with_the_usual_one(text: str, plain: str) -> None:
    """Languages read 0x20 as 32, as text or as 0. A file that means one number says it in digits."""
    with pytest.raises(InputError, match="unusual spelling") as refused:
        load_workload(JOB, parse_changes([f"training.seq={text}"]))
    assert refused.value.fix == f"seq: {plain}"


@pytest.mark.parametrize(
    ("key", "text", "fix", "number"),
    [
        ("training.seq", "8,192", "seq: 8192", 8192),
        ("training.total_tokens", "1,000,000", "total_tokens: 1000000", 1_000_000),
        ("training.total_tokens", "e12", "total_tokens: 1e12", 10**12),
        ("cluster.node.nvlink.bandwidth_Bps", "450,000MB/s", "bandwidth_Bps: 450000MB/s", 450e9),
        ("cluster.node.nvlink.latency_s", "e-6", "latency_s: 1e-6", 1e-6),
        ("training.total_tokens", "1,5T", "total_tokens: 1.5T", 1.5e12),
        ("training.grad_clip", "0,5", "grad_clip: 0.5", 0.5),
    ],
)
def test_commas_and_exponents_alone_are_told_the_number(key: str, text: str, fix: str, number: float) -> None:
    """A list of numbers joined by commas may be meant as well, where all are numbers: then a sweep is named too."""
    with pytest.raises(InputError, match="must be a") as refused:
        read(key, text)
    told, _, sweep = str(refused.value.fix).partition(", or ")
    assert told == fix
    assert sweep == (f"llmsim sweep WORKLOAD --grid {key}={text}, which tries each of them" if sweep else "")
    assert bool(sweep) == (text in ("8,192", "1,000,000", "0,5"))
    assert read(key, parse_changes([f"{key}={fix.split(': ')[1]}"])[key]) == number


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("8k", "--stages 8000 or 8192"),
        ("1,024", "--stages 1024"),
        ("e3", "--stages 1000"),
        ("0x8", "--stages 8"),
        ("\u0668", "--stages 8"),
        ("x", None),
    ],
)
def test_options_of_whole_numbers_name_the_plain_one(
    option: str, fix: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["schedule", "1f1b", "--stages", option, "--microbatches", "8"])
    error = capsys.readouterr().err
    assert "must be a whole number" in error
    assert error.rpartition("fix:")[2].strip() == fix if fix else "fix:" not in error


@pytest.mark.parametrize("sign", ["\u00b5", "\u03bc"])
def test_a_millionth_has_either_sign(sign: str) -> None:
    """Latin-1 has a micro sign, and keyboards write the Greek letter."""
    assert read("cluster.node.nvlink.latency_s", f"3{sign}s") == 3e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "--yes", "--batch", "4k"], "--batch: counts sequences"),
        (["init", "--yes", "--seq", "1.5"], "--seq: must be a whole number of tokens"),
        (["capture", "a:b", "--out", "a.json", "--seq", "-3"], "--seq: must be a whole number of tokens"),
        (["plan", "gpt22b_tp8", "--days", "30d"], "--days: must be a number\n  found:   '30d'"),
        (
            ["plan", "gpt22b_tp8", "--price", "2,5"],
            "--price: must be a number\n  found:   '2,5'\n  allowed: a number, without a unit\n  fix:     --price 2.5",
        ),
        (
            ["plan", "gpt22b_tp8", "--tokens", "1,000"],
            "--tokens: is no number\n  found:   '1,000'\n  allowed: a number, or such as 1T, or 300B\n  fix:     1000",
        ),
        (["init", "--gpus=8k"], "--gpus: must be a whole number\n  found:   '8k'"),
    ],
)
def test_options_of_numbers_refuse_others_in_one_form(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_a_long_list_of_keys_is_cut_by_the_rule_of_all_names() -> None:
    """An error lists five of more than 12 names: keys of a section, or names like the wrong one."""
    for changes in ({"parallelism": 3}, {"parallelism.tpp": 2}):
        with pytest.raises(InputError) as refused:
            load_workload(JOB, changes)
        listed, _, rest = str(refused.value.allowed).rpartition(": ")[0].rpartition(" ... ")
        assert rest.endswith("in all")
        assert len(listed.split(", ")) == 5

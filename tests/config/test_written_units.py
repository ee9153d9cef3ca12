"""Numbers with units in files and options, and the schema that an editor checks them by."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from simulator.cli.app import main
from simulator.commands.schema import schema_of
from simulator.config import load_workload
from simulator.errors import InputError

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
        ("training.global_batch", "2K", 2048),
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

"""Files of other kinds in a workload's place: the error names their kind, and the command that takes it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from simulator.config import load_workload
from simulator.config.misplaced_file import use_of
from simulator.errors import InputError
from simulator.launch_scripts import read_script
from simulator.traces.files import open_trace

#: Name of a file, what is in it, what takes it.
KINDS = [
    ("rank0.json", b'{"deviceProperties": [], "traceEvents": []}', "llmsim trace show FILE"),
    ("rank0.json.gz", gzip.compress(b'{"traceEvents": []}'), "llmsim trace show FILE"),
    ("et.json", b'{"schema": "1.0.1", "nodes": [{"rf_id": 1}]}', "llmsim trace show FILE"),
    ("chakra.0.et", b"\x08\x01", "llmsim trace show FILE"),
    ("job.parquet", b"PAR1rest", "llmsim trace stragglers FILE"),
    ("traces.tar.gz", gzip.compress(b"anything"), "unpacked"),
    ("net.json", b'{"format": 1, "widest_split": 1}', "model: {captured: FILE}"),
    ("config.json", b'{"model_type": "llama"}', "model: {hf_config: FILE}"),
    ("result.json", b'{"schema_version": 1}', "the workload file that it came from"),
    ("train.sh", b"torchrun train.py\n", "llmsim import FILE"),
    ("job.toml", b"[model]\n", "llmsim import FILE"),
    ("axolotl.yaml", b"base_model: my/model\n", "llmsim import FILE"),
    ("topo.xml", b"<system/>", "llmsim import FILE"),
    ("mine.yaml", b"name: mine\nnode:\n  gpus: {}\n", "cluster: FILE"),
    ("gpu.yaml", b"name: gpu\ngpu_spec:\n  sms: 1\n", "calibration: FILE"),
    ("plan.csv", b"0F0,0F1,\n,1F0,1F1\n", "schedule: FILE"),
]


@pytest.mark.parametrize(("name", "content", "use"), KINDS, ids=[name for name, _, _ in KINDS])
def test_a_file_of_another_kind_is_told_what_takes_it(name: str, content: bytes, use: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a workload file") as refused:
        load_workload(path)
    assert use.replace("FILE", str(path)) in str(refused.value.fix)


@pytest.mark.parametrize(
    "content", [b"model: {preset: gpt2-124m}\n", b"", b"TIMESTAMP,TOKENS\n1,2\n", b"\x1f\x8bbroken"]
)
def test_what_may_be_a_workload_or_cannot_be_told_is_left_to_its_reader(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert use_of(path) is None


def test_readers_of_scripts_and_traces_say_so_too(tmp_path: Path) -> None:
    """A captured model is no launch script, and a table of a whole job no trace of one rank."""
    captured, job = tmp_path / "net.json", tmp_path / "job.parquet"
    captured.write_bytes(b'{"widest_split": 1}')
    job.write_bytes(b"PAR1rest")
    with pytest.raises(InputError, match="is a captured model"):
        read_script(captured)
    with pytest.raises(InputError, match="is a Parquet table"):
        open_trace([str(job)])

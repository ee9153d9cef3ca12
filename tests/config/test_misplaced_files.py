"""Files of other kinds in a workload's place: the error names their kind, and the command that takes it."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from threading import Thread

import pytest

from simulator.config import load_workload
from simulator.config.misplaced_file import use_of
from simulator.errors import InputError
from simulator.launch_scripts import SUFFIXES as LAUNCH_SUFFIXES
from simulator.launch_scripts import is_launch_script, read_script
from simulator.traces.files import open_trace

_SMALL = b"model: {preset: gpt2-124m}\ntraining: {global_batch: 8, seq: 1024}\ncluster: {name: dgx_h100, nodes: 1}\n"
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
    ("train.sh.gz", gzip.compress(b"torchrun train.py\n"), "gunzip FILE"),
    ("utf16.json", '{"traceEvents": []}'.encode("utf-16"), "llmsim trace show FILE"),
    ("job.toml", b"[model]\n", "llmsim import FILE"),
    ("axolotl.yaml", b"base_model: my/model\nsequence_len: 4096\n", "llmsim import FILE"),
    ("accelerate.yaml", b"compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n", "llmsim import FILE"),
    ("ds.json", b'{"train_batch_size": 8, "zero_optimization": {"stage": 3}}', "llmsim import FILE"),
    ("train.sbatch", b"#!/bin/bash\nsrun torchrun train.py\n", "llmsim import FILE"),
    ("topo.log", b"        GPU0    GPU1\nGPU0     X      NV18\nGPU1    NV18     X\n", "cluster: FILE"),
    ("topo.xml", b"<system/>", "llmsim import FILE"),
    ("mine.yaml", b"name: mine\nnode:\n  gpus: {}\n", "cluster: FILE"),
    ("gpu.yaml", b"name: gpu\ngpu_spec:\n  sms: 1\n", "calibration: FILE"),
    (
        "collectives.yaml",
        b"name: a\ngpu: h100\nfabric: {kind: none}\nparameters: {}\n",
        "stack: FILE in a workload file",
    ),
    ("tour.ipynb", b'{"cells": [], "nbformat": 4}', "jupyter lab FILE"),
    ("points.db", b"SQLite format 3\0".ljust(68) + b"llms", "llmsim sweep WORKLOAD --grid KEY=V1,V2 --out FILE"),
    ("steps.csv", b"id,seq\na,2048\n", "llmsim validate --rows FILE"),
    ("gpus.csv", b"id,gpu,seq\na,B200,2048\n", "llmsim validate --rows FILE"),  # no backward pass 200
    ("model.safetensors", b"\x08\0\0\0\0\0\0\0{}", "hf_config: config.json"),
    ("page.html", b"<!DOCTYPE html><html></html>", "a browser"),
    ("plan.csv", b"0F0,0F1,\n,1F0,1F1\n", "schedule: FILE"),
]


@pytest.mark.parametrize(("name", "content", "use"), KINDS, ids=[name for name, _, _ in KINDS])
def test_a_file_of_another_kind_is_told_what_takes_it(name: str, content: bytes, use: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a workload file") as refused:
        load_workload(path)
    assert use.replace("FILE", str(path)) in str(refused.value.fix)


@pytest.mark.parametrize("content", [b"", b"TIMESTAMP,TOKENS\n1,2\n", b"\x1f\x8bbroken"])
def test_what_cannot_be_told_is_left_to_its_reader(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert use_of(path) is None


#: Key of a workload -> the kind of file for it.
PLACES = {
    "calibration": "a profile of a GPU",
    "stack": "a stack",
    "cluster": "a cluster file",
    "model.captured": "a captured model",
    "model.hf_config": "a model of Hugging Face",
    "parallelism.schedule": "a pipeline schedule",
}


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("job.yaml", _SMALL, "a workload file"),
        ("tour.ipynb", b'{"cells": [], "nbformat": 4}', "a notebook"),
        ("steps.csv", b"id,seq\na,2048\n", "a table"),
        ("points.db", b"SQLite format 3\0".ljust(68, b"\xff") + b"llms", "a database of finished points"),
        ("nsys.sqlite", b"SQLite format 3\0".ljust(100, b"\xff"), "a database of another program"),
    ],
)
def test_every_key_that_takes_a_file_names_a_file_of_another_kind(
    key: str, name: str, content: bytes, kind: str, tmp_path: Path
) -> None:
    """One error alone says what the file is, and what the key takes."""
    path, model = tmp_path / name, {} if key.startswith("model.") else {"preset": "gpt2-124m"}
    path.write_bytes(content)
    job = {"model": model, "training": {"global_batch": 8, "seq": 1024}, "cluster": {"name": "dgx_h100", "nodes": 1}}
    with pytest.raises(InputError) as refused:
        load_workload(job, {key: str(path)})
    assert str(refused.value).startswith(f"{path}: is {kind}, not {PLACES[key]}")
    assert str(refused.value).count("\n") == 1


@pytest.mark.parametrize("name", ["a.conf", "b.sh.yaml", "c.toml", "d.tar.yaml", "e.et"])
def test_a_workload_is_read_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    """What is in a file counts before its name."""
    path = tmp_path / name
    path.write_bytes(_SMALL)
    assert load_workload(path).model.layers == 12


def test_only_the_last_ending_of_a_name_counts(tmp_path: Path) -> None:
    """A file is no script, topology or archive by what its name says before the last ending."""
    for name in ("a.sh.yaml", "b.xml.yaml", "c.tar.yaml"):
        (tmp_path / name).write_bytes(b"seed: 1\n")
        assert use_of(tmp_path / name) is None


@pytest.mark.parametrize("suffix", LAUNCH_SUFFIXES)
def test_every_ending_of_scripts_is_a_launch_script_here(suffix: str, tmp_path: Path) -> None:
    """The importer of scripts and the errors share one list; keyed files are told by their keys."""
    path = tmp_path / f"train{suffix}"
    path.write_bytes(b'{"train_batch_size": 8}' if suffix in (".json", ".yaml", ".yml") else b"torchrun train.py\n")
    assert is_launch_script(path)
    use = use_of(path)
    assert use is not None
    assert use.kind == "a launch script"


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """A pipe's content is there for one reader, so that nothing may look into it before."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=(_SMALL,))
    writer.start()
    assert load_workload(pipe).model.layers == 12
    writer.join()


def test_readers_of_scripts_and_traces_say_so_too(tmp_path: Path) -> None:
    """A captured model is no launch script, and a table of a whole job no trace of one rank."""
    captured, job = tmp_path / "net.json", tmp_path / "job.parquet"
    captured.write_bytes(b'{"widest_split": 1}')
    job.write_bytes(b"PAR1rest")
    with pytest.raises(InputError, match="is a captured model"):
        read_script(captured)
    with pytest.raises(InputError, match="is a Parquet table"):
        open_trace([str(job)])

"""A step that is written as Chakra's traces, read back and played is the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.api import run_step
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.traces.execution.chakra import EXACT
from simulator.traces.execution.files import open_graphs
from simulator.traces.execution.graph import NodeKind
from simulator.traces.execution.messages import chakra_messages
from simulator.traces.execution.replay import replay_graphs
from tests.support.commands import command
from tests.support.grids import one_in
from tests.support.kineto import save_step
from tests.support.unadvised import without_advice  # noqa: F401

pytest.importorskip("google.protobuf")
SMALL = {"model.layers": 4, "training.global_batch": 8, "training.recompute": "none"}
JOBS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "interleaved pipeline": {
        "parallelism.pp": 2, "parallelism.vpp": 2, "parallelism.dp": 4, "parallelism.schedule": "interleaved",
    },
    "blocking pipeline of tensor ranks": {
        "parallelism.pp": 2, "parallelism.tp": 2, "parallelism.dp": 2, "parallelism.overlap.p2p": False,
    },
    "rings of context": {"parallelism.cp": 2, "parallelism.dp": 4},
    "updates on hosts": {"parallelism.offload.optimizer": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, JOBS))
def test_a_step_read_back_is_the_step(tmp_path: Path, name: str) -> None:
    """The step is the same as recorded, and on its cluster where kernels and communication leave each other alone."""
    job = load_workload("llama3_8b_dgx_h100", {**SMALL, **JOBS[name]})
    result = run_step(job, interference=False)
    result.save_chakra(tmp_path)
    graphs = open_graphs([str(tmp_path)])
    assert len(graphs.ranks) == 8
    assert replay_graphs(graphs).step_s == pytest.approx(result.spans.length_s, rel=1e-9)
    assert replay_graphs(graphs, "dgx_h100").step_s == pytest.approx(result.spans.length_s, rel=1e-9)


def test_gathers_beside_kernels_are_a_little_faster_read_back(tmp_path: Path) -> None:
    """Kernels that take the memory's bandwidth hold gathers of ZeRO-3 back; played as lengths they take nothing."""
    result = simulator.run("llama3_8b_dgx_h100", set={**SMALL, "parallelism.zero": 3})
    result.save_chakra(tmp_path)
    graphs = open_graphs([str(tmp_path)])
    assert replay_graphs(graphs).step_s == pytest.approx(result.spans.length_s, rel=1e-9)
    again = replay_graphs(graphs, "dgx_h100").step_s / result.spans.length_s
    assert 0.995 < again < 1


def test_files_have_what_astra_sim_asks_for(tmp_path: Path) -> None:
    """Types of attributes are those of mlcommons/chakra's feeder; groups are numbers from 1 on, 0 being all ranks.

    A reduce-scatter of bytes among 8 puts all of them in; an all-gather puts in an eighth of what it brings.
    """
    result = simulator.run("llama3_8b_dgx_h100", set=SMALL)
    files = result.save_chakra(tmp_path)
    assert [file.name for file in files] == [*(f"step.{rank}.et" for rank in range(8)), "comm_group.json"]
    groups = json.loads(files[-1].read_text())
    assert set(map(tuple, groups.values())) == {tuple(range(8))}
    assert "0" not in groups
    content, at, nodes = files[0].read_bytes(), 0, []
    while at < len(content):
        length = shift = 0
        while True:
            byte = content[at]
            length, at, shift = length | (byte & 0x7F) << shift, at + 1, shift + 7
            if byte < 0x80:
                break
        if at > 100:  # behind the metadata
            nodes.append(chakra_messages().node.FromString(content[at : at + length]))
        at += length
    kinds = {(one.type, attribute.name, attribute.WhichOneof("value")) for one in nodes for attribute in one.attr}
    assert kinds >= {
        (4, "is_cpu_op", "bool_val"), (4, "num_ops", "int64_val"), (4, "tensor_size", "uint64_val"),
        (7, "is_cpu_op", "bool_val"), (7, "comm_type", "int64_val"), (7, "comm_size", "int64_val"),
        (7, "pg_name", "string_val"),
    }  # fmt: skip
    kernels = [one for one in nodes if one.type == 4]
    exact_us = sum(attribute.double_val for one in kernels for attribute in one.attr if attribute.name == EXACT) / 1000
    assert sum(one.duration_micros for one in kernels) == pytest.approx(exact_us, abs=20)  # not half of one each
    gathers = [one.comm for one in open_graphs([str(tmp_path)]).ranks[0].nodes if one.kind == NodeKind.COLLECTIVE]
    scattered = sum(comm.nbytes for comm in gathers if comm is not None and comm.operation == "reduce_scatter")
    gathered = sum(comm.nbytes for comm in gathers if comm is not None and comm.operation == "all_gather")
    parameters = result.to_dict()["params_total"]
    assert scattered == pytest.approx(4 * parameters, rel=1e-3)  # gradients in fp32
    assert gathered == pytest.approx(2 * parameters / 8, rel=1e-3)  # parameters in bf16


@pytest.mark.usefixtures("without_advice")
def test_commands_write_and_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    small = [f"--set={key}={value}" for key, value in SMALL.items()]
    run = ("run", "llama3_8b_dgx_h100", *small, "--quiet")
    assert command(*run, "--chakra", tmp_path / "none" / "traces") == 2
    assert "mkdir -p" in capsys.readouterr().err
    folder = tmp_path / "traces"
    assert command(*run, "--chakra", folder, "--json", out) == 0
    step_s = json.loads(out.read_text())["step_time_s"]
    assert command("trace", "replay", folder, "--cluster", "dgx_h100", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(step_s)
    faster = ("--cluster", "dgx_h100", "--set", "node.nvlink.bandwidth_Bps=900e9")
    assert command("trace", "replay", folder, *faster, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["step_s"] < step_s
    assert command("trace", "show", folder) == 0
    assert "reduce_scatter" in capsys.readouterr().out
    (tmp_path / "groups.json").write_text(json.dumps({"1": [0, 1, 2]}))
    assert command("trace", "show", folder, "--groups", tmp_path / "groups.json", "--json", "-") == 0
    assert {one["group_size"] for one in json.loads(capsys.readouterr().out)["exchanges"]} >= {3}
    assert command("trace", "replay", folder, "--gpu", "h200-sxm-141gb") == 2
    assert "--cluster: its GPU decides" in capsys.readouterr().err
    assert command("trace", "replay", tmp_path / "missing", "--cluster", "dgx_h100") == 2
    assert "missing: cannot be read" in capsys.readouterr().err
    assert command("trace", "replay", folder, "--scale", "matmul=2") == 2
    assert "--scale: is of profilers' traces" in capsys.readouterr().err
    profiled = save_step(tmp_path)
    assert command("trace", "replay", *profiled, "--groups", folder / "comm_group.json") == 2
    assert "--groups: is of execution traces" in capsys.readouterr().err
    assert command(*run, "--chakra", folder, "--trace-dir", folder) == 2
    assert "--chakra: is the folder of --trace-dir too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["parallelism.pp=4", "parallelism.schedule=zb_h2"], "--chakra: steps that overlap"),
        (
            ["parallelism.data_parallel=async", "parallelism.zero=0", "training.grad_clip=null", "cluster.nodes=2"],
            "--chakra: steps that overlap",
        ),
        (
            [
                "parallelism.data_parallel=parameter_server",
                "parallelism.zero=0",
                "training.grad_clip=null",
                "parallelism.dp=8",
                "cluster.nodes=2",
            ],
            "no operations for servers and drives",
        ),
        (["parallelism.offload.optimizer=nvme"], "no operations for servers and drives"),
        ([], "holds traces of other ranks or steps"),
        (
            ["parallelism.dp=8192", "training.global_batch=1048576", "cluster.nodes=1024"],
            "8,192 ranks have 33,554,432 kernels",
        ),
    ],
)
def test_what_cannot_be_written_is_known_before_the_simulation(
    tmp_path: Path,
    changes: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A gzipped file of another rank would be read with the others."""
    (tmp_path / "step.8.et.gz").write_bytes(b"")
    monkeypatch.setattr(simulator, "run", None)
    small = [f"--set={key}={value}" for key, value in SMALL.items()]
    more = [f"--set={change}" for change in changes]
    assert command("run", "llama3_8b_dgx_h100", *small, *more, "--chakra", tmp_path) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("without_advice")
def test_a_result_beside_traces_is_none_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result is written into the folder of the traces; the next one is the same."""
    small = [f"--set={key}={value}" for key, value in {**SMALL, "parallelism.dp": 2}.items()]
    for option in ("--chakra", "--trace-dir"):
        folder = tmp_path / option[2:]
        folder.mkdir()
        assert command("run", "llama3_8b_dgx_h100", *small, "--quiet", option, folder) == 0
        for name in ("a.json", "z.json"):
            assert command("trace", "replay", folder, "--quiet", "--json", folder / name) == 0
        assert (folder / "a.json").read_text() == (folder / "z.json").read_text()
    assert command("trace", "compare", "llama3_8b_dgx_h100", tmp_path / "chakra") == 2
    assert "execution traces are shown and played, and not compared" in capsys.readouterr().err


def test_what_has_no_node_is_refused(tmp_path: Path) -> None:
    overlapping = simulator.run(
        "llama3_8b_dgx_h100", set={**SMALL, "parallelism.pp": 4, "parallelism.schedule": "zb_h2"}
    )
    with pytest.raises(InputError, match="no traces of one step"):
        overlapping.save_chakra(tmp_path)
    servers: dict[str, Any] = {
        "parallelism.data_parallel": "parameter_server",
        "parallelism.zero": 0,
        "training.grad_clip": None,
        "parallelism.dp": 8,
    }
    servers["cluster"] = {"name": "dgx_h100", "nodes": 2}
    served = simulator.run("llama3_8b_dgx_h100", set={**SMALL, **servers})
    with pytest.raises(InputError, match="Chakra's traces have no operation for it"):
        served.save_chakra(tmp_path)

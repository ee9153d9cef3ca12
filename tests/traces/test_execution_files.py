"""Execution traces of Chakra and PyTorch are read as they were written, and broken ones are named in a sentence."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from simulator.errors import InputError
from simulator.traces.execution.files import is_execution_trace, open_graphs
from simulator.traces.execution.graph import GraphNode, NodeKind
from simulator.traces.execution.messages import _FIELDS, _VALUES, chakra_messages
from simulator.traces.execution.operation_flops import operation_flops
from tests.support.chakra import COLLECTIVE, COMPUTE, SEND, ChakraNode, framed, node, save_chakra

pytest.importorskip("google.protobuf")
SHARED = Path(__file__).resolve().parents[3] / "shared/reference/files"


def nodes_of(path: str) -> tuple[GraphNode, ...]:
    return open_graphs([path]).ranks[0].nodes


def test_bytes_of_the_format_are_read(tmp_path: Path) -> None:
    """A message by hand has the id 300 (ac 02), the name k, type 4, link 1, 9 us, and the attribute is_cpu_op."""
    attribute = b"\x0a\x09is_cpu_op\xd8\x01\x01"
    message = b"\x08\xac\x02\x12\x01k\x18\x04\x2a\x01\x01\x38\x09\x52" + bytes([len(attribute)]) + attribute
    path = tmp_path / "a.3.et"
    path.write_bytes(framed(b"", b"\x08\x01\x18\x04", message))
    (rank,) = open_graphs([str(path)]).ranks
    assert rank.rank == 3
    assert rank.nodes[1] == GraphNode(300, "k", NodeKind.HOST, (1,), pytest.approx(9e-6))


def test_field_numbers_are_those_of_the_published_schema() -> None:
    schema = SHARED / "traces/chakra_et_def.proto"
    if not schema.exists():
        pytest.skip("the file of another project is not here")
    text = schema.read_text()
    for message, fields in _FIELDS.items():
        body = re.search(rf"message {message} {{(.*?)\n}}", text, re.DOTALL)
        assert body is not None
        numbers = dict(re.findall(r"(\w+) = (\d+);", body[1]))
        assert numbers == {name: str(number) for number, (name, _, _) in enumerate(fields, 1)}
    values = re.findall(r"(\w+)_val = (\d+);", text)
    assert values == [(kind, str(3 + 2 * place)) for place, kind in enumerate(_VALUES)]


def test_json_is_read_whatever_its_capitals(tmp_path: Path) -> None:
    told = [
        {"Id": 1, "Name": "load", "NodeType": 4, "is_cpu_op": True, "runtime": 5},
        {"Id": 2, "Name": "sum", "NodeType": 7, "ctrlDeps": [1], "comm_type": 7, "comm_size": 64, "runtime": 8},
    ]
    path = tmp_path / "job.0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"workload_graph": told, "ngpus": 2}).encode()))
    assert is_execution_trace(str(path))
    load, reduction = nodes_of(str(path))
    assert (load.kind, load.seconds) == (NodeKind.HOST, pytest.approx(5e-6))
    assert reduction.comm is not None
    assert (reduction.after, reduction.comm.operation, reduction.comm.nbytes) == ((1,), "reduce_scatter", 64)


def test_callers_count_unless_they_contradict_what_nodes_wait_for(tmp_path: Path) -> None:
    """Node 1 calls 2, which waits for 0; or node 1 waits for 2, which it calls, and only the waiting counts."""
    path = tmp_path / "a.0.et"
    called = ChakraNode(2, COMPUTE, 1, after=[0], callers=[1])
    agreed = save_chakra(path, node(0, COMPUTE, 1), node(1, COMPUTE, 1), called)
    assert {one.number: one.after for one in nodes_of(agreed)}[2] == (0, 1)
    contradicted = save_chakra(path, node(0, COMPUTE, 1), node(1, COMPUTE, 1, after=[2]), called)
    (rank,) = open_graphs([contradicted]).ranks
    assert [one.number for one in rank.nodes] == [0, 2, 1]
    assert rank.nodes[1].after == (0,)
    assert "callers" in rank.missing[0]


def test_an_exact_length_counts_until_somebody_changes_the_microseconds(tmp_path: Path) -> None:
    same = node(0, COMPUTE, 3, duration_nanos=2600.5)
    changed = node(1, COMPUTE, 30, duration_nanos=2600.5)
    lengths = [one.seconds for one in nodes_of(save_chakra(tmp_path / "a.0.et", same, changed))]
    assert lengths == pytest.approx([2600.5e-9, 30e-6])


def _shaped(number: int, parent: int, name: str, shapes: list[list[int]], result: list[int]) -> dict[str, Any]:
    """An operation on a GPU's tensors of its own, and a new one."""
    tensors = [[100 * number + at, 100 * number + at, 0, 8, 2, "cuda:0"] for at in range(len(shapes) + 1)]
    return {
        "id": number, "parent": parent, "rf_id": number, "name": f"aten::{name}", "inputs": tensors[:-1],
        "outputs": tensors[-1:], "input_shapes": shapes, "output_shapes": [result], "input_types": [],
        "output_types": [],
    }  # fmt: skip


def _pytorch(product: dict[str, Any], record: dict[str, Any] | None = None) -> dict[str, Any]:
    """A file of a product with other fields, and a record of a communication with others."""
    told = [_shaped(1, 0, "mm", [[2, 4], [4, 2]], [2, 2]) | product]
    if record is not None:
        comm = {"name": "record_param_comms", "collective_name": "allreduce", "input_shapes": [], "inputs": []}
        told.append(_shaped(2, 0, "", [], []) | comm | record)
    return {"schema": "1.1.0", "nodes": told}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (framed(b"", b"\x08\x01\x18\x04")[:-1], "is cut off in message 1"),
        (b"\xff" * 12, "is cut off in message 0"),
        (framed(b"", b"\x0b\x0b"), "message 1 cannot be read"),
        (framed(b"", b"\x08\x01\x18\x63"), "is no type of operation"),
        (framed(b"", b"\x08\x01", b"\x08\x01"), "two operations have one number"),
        (framed(b""), "has no operations"),
        (framed(b"", b"\x08\x01\x2a\x01\x02", b"\x08\x02\x2a\x01\x01"), "wait for each other in a circle"),
        (framed(b"", b"\x08\x01\x2a\x01\x01"), "wait for each other in a circle"),
        (framed(b"", b"\x08\x01\x18\x05"), "does not tell comm_dst"),
        (gzip.compress(framed(b"", b"\x08\x01" * 9), mtime=0)[:-9], "cannot be unpacked to its end"),
    ],
)
def test_broken_messages_are_named_in_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.0.et"
    path.write_bytes(content)
    with pytest.raises(InputError) as problem:
        open_graphs([str(path)])
    assert message in str(problem.value)
    assert str(path) in str(problem.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"workload_graph": 7}, "is no list of operations"),
        ({"workload_graph": [{"Id": "x"}]}, "is no whole number"),
        ({"workload_graph": [{"Id": 1, "NodeType": 4, "runtime": -3}]}, "is no amount"),
        ({"workload_graph": [{"Id": 1, "NodeType": 4, "runtime": 10**400}]}, "is no amount"),
        ({"workload_graph": [{"Id": 1, "NodeType": 4, "runtime": 1 << 62}]}, "is no length of an operation"),
        ({"schema": "1.1.0", "nodes": [{}]}, "has an operation that cannot be read"),
        (_pytorch({"id": math.inf}), "has an operation that cannot be read"),
        (_pytorch({"rf_id": math.inf}), "has an operation that cannot be read"),
        (_pytorch({"attrs": [{"name": [1]}]}), "has an operation that cannot be read"),
        (_pytorch({"inputs": [[{}, 1, 0, 8, 2, "cuda:0"]]}), "operation 1: has a tensor that cannot be read"),
        (_pytorch({"inputs": [[1, 1, 0, 10**400, 2, "cuda:0"]]}), "operation 1: has a tensor that cannot be read"),
        (_pytorch({"inputs": [[1, 1, 0, -8, 2, "cuda:0"]]}), "operation 1: has a tensor that cannot be read"),
        (_pytorch({"input_shapes": ["a", "b"]}), "operation 1: has sizes that no tensor has"),
        (_pytorch({"input_shapes": [[-2, 4], [4, 2]]}), "operation 1: has sizes that no tensor has"),
        (_pytorch({"input_shapes": [[1 << 40, 1 << 40], [1 << 40, 2]]}), "operation 1: has sizes that no tensor has"),
        (_pytorch({}, {"in_msg_nelems": -1}), "operation 2.in_msg_nelems: is no number of elements"),
        (_pytorch({}, {"inputs": [[["a", None, 0, "a", None, "cuda:0"]], 5]}), "operation 2: has a tensor"),
        (
            _pytorch({}, {"name": "## process_group:init ##", "inputs": ['[{"pg_name": "1", "ranks": [0, 0]}]']}),
            "group 1",
        ),
        ({"schema": "1.1.0", "nodes": []}, "has no operation with a tensor on a GPU"),
    ],
)
def test_broken_json_is_named_in_a_sentence(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        open_graphs([str(path)])
    path.write_text(json.dumps(content)[:-1])
    with pytest.raises(InputError, match="is cut off, or no JSON: line 1"):
        open_graphs([str(path)])


def test_groups_stand_beside_the_traces_or_in_a_file_that_is_named(tmp_path: Path) -> None:
    gathers = node(0, COLLECTIVE, comm_type=2, comm_size=8, pg_name="5")
    names = [save_chakra(tmp_path / f"a.{rank}.et", gathers) for rank in range(2)]
    assert open_graphs(names).members("5") == (0, 1)
    (tmp_path / "comm_group.json").write_text('{"5": [1, 0, 2]}')
    job = open_graphs([str(tmp_path)])
    assert job.members("5") == (1, 0, 2)
    comm = job.ranks[0].nodes[0].comm
    assert comm is not None
    assert job.message_bytes(comm) == 24  # what three ranks put in
    (tmp_path / "other.json").write_text('{"5": [0, 0]}')
    with pytest.raises(InputError, match="is no list of ranks, each once"):
        open_graphs(names, str(tmp_path / "other.json"))


def test_files_that_tell_no_rank_are_ranks_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """``et_2`` stands before ``et_10``, and it is said. What else is in the folder is left out, and named."""
    for rank in range(12):
        one = _shaped(1, 0, "mm", [[2, rank + 1], [rank + 1, 2]], [2, 2])
        (tmp_path / f"pytorch_et_{rank}.json").write_text(json.dumps({"schema": "1.1.0", "nodes": [one]}))
    (tmp_path / "a.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    (tmp_path / "r.json").write_text('{\n  "schema_version": 1, "command": "trace replay"}')
    assert is_execution_trace(str(tmp_path))
    job = open_graphs([str(tmp_path)])
    assert [rank.nodes[0].flops / 8 for rank in job.ranks] == list(range(1, 13))
    left_out, order = job.missing
    assert left_out.startswith("a.json in ")
    assert "pytorch_et_0.json is taken as rank 0, pytorch_et_11.json as rank 11" in order


def test_a_folder_without_execution_traces_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no execution traces"):
        open_graphs([str(tmp_path)])


def _operation(number: int, parent: int, name: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    def shapes(values: list[Any]) -> list[list[int]]:
        return [[4, 8] if value[0] == 1 else [8, 2] if value[0] == 2 else [4, 2] for value in values]

    return {
        "id": number, "parent": parent, "rf_id": number, "name": name, "inputs": inputs, "outputs": outputs,
        "input_shapes": shapes(inputs), "output_shapes": shapes(outputs), "input_types": ["Tensor(c10::Half)"],
        "output_types": [],
    }  # fmt: skip


def test_kernels_of_pytorch_are_the_innermost_operations(tmp_path: Path) -> None:
    """A linear layer calls a view, which runs nothing, and a product; an addition in place follows.

    The product does 2 * 4 * 8 * 2 FLOPs, and moves 32 + 16 + 8 elements of 2 bytes; the addition moves 8.
    """
    a, b, c = [1, 1, 0, 32, 2, "cuda:0"], [2, 2, 0, 16, 2, "cuda:0"], [3, 3, 0, 8, 2, "cuda:0"]
    view = [4, 2, 0, 16, 2, "cuda:0"]
    told = [
        _operation(12, 11, "aten::t", [b], [view]),
        _operation(13, 11, "aten::mm", [a, b], [c]),
        _operation(11, 10, "aten::linear", [a, b], [c]),
        _operation(14, 10, "aten::add_", [c], [c]),
    ]
    path = tmp_path / "rank1.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 1, "nodes": told}))
    (rank,) = open_graphs([str(path)]).ranks
    assert rank.rank == 1
    assert [(one.name, one.flops, one.nbytes, one.after, one.dtype) for one in rank.nodes] == [
        ("aten::mm", 128, 112, (), "fp16"),
        ("aten::add_", 0, 16, (13,), "fp16"),
    ]


def _pytorch_kernels(folder: Path, *operations: dict[str, Any]) -> list[tuple[str, float]]:
    path = folder / "rank0.json"
    path.write_text(json.dumps({"schema": "1.1.0", "nodes": list(operations)}))
    return [(one.name.removeprefix("aten::"), one.flops) for one in nodes_of(str(path))]


def test_a_wait_for_a_list_of_tensors_waits_for_all(tmp_path: Path) -> None:
    """A list names no call that can be looked up, as the number of a call would."""
    tensor = [3, 3, 0, 8, 2, "cuda:0"]
    record = {"name": "record_param_comms", "input_shapes": [], "inputs": [[tensor], 5], "in_msg_nelems": 8}
    told = [
        _shaped(1, 0, "mm", [[2, 4], [4, 2]], [2, 2]),
        _shaped(2, 0, "", [], []) | record | {"collective_name": "allreduce", "dtype": "Half"},
        _shaped(3, 0, "", [], []) | record | {"collective_name": "wait"},
        _shaped(4, 0, "mm", [[2, 4], [4, 2]], [2, 2]),
    ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schema": "1.1.0", "nodes": told}))
    assert nodes_of(str(path))[-1].after == (1, 2)


def test_attention_is_one_kernel_each_way(tmp_path: Path) -> None:
    """Heads stand before tokens outside, and behind them in the kernel's own call.

    Scores of 2 sequences, 3 heads and 16 by 16 tokens, of 8 elements each, and their sums: 4 * 2 * 3 * 16 * 16 * 8.
    Five products go back for two. Two packed sequences of 16 tokens take as much as a batch of two.
    """
    heads_first, tokens_first, packed = [2, 3, 16, 8], [2, 16, 3, 8], [32, 3, 8]
    forward = 4.0 * 2 * 3 * 16 * 16 * 8
    told = _pytorch_kernels(
        tmp_path,
        _shaped(1, 0, "scaled_dot_product_attention", [heads_first] * 3, heads_first),
        _shaped(2, 1, "_fused_sdp_choice", [heads_first] * 3, []) | {"outputs": [1]},
        _shaped(3, 1, "_scaled_dot_product_flash_attention", [heads_first] * 3, heads_first),
        _shaped(4, 3, "_flash_attention_forward", [tokens_first] * 3 + [[], []], tokens_first),
        _shaped(5, 0, "_scaled_dot_product_flash_attention_backward", [heads_first] * 4, heads_first),
        _shaped(6, 5, "_flash_attention_backward", [tokens_first] * 5 + [[2, 3, 16], [], []], tokens_first),
        _shaped(7, 0, "_scaled_dot_product_efficient_attention", [heads_first] * 3, heads_first),
        _shaped(8, 0, "_flash_attention_forward", [packed] * 3 + [[3], [3]], packed),
    )
    assert told == [
        ("_flash_attention_forward", forward), ("_flash_attention_backward", 2.5 * forward),
        ("_scaled_dot_product_efficient_attention", forward), ("_flash_attention_forward", forward),
    ]  # fmt: skip


def test_names_count_as_a_whole(tmp_path: Path) -> None:
    """``index_put_`` and ``sqrt_`` end like ``t_``, which only transposes; ``result_type`` has it inside, and asks."""
    kernels = ("index_put_", "_foreach_sqrt_", "native_dropout_backward", "repeat_interleave", "split_copy", "sum")
    idle = ("t_", "squeeze_", "resize_", "empty_like", "new_empty_strided", "result_type")
    operations = [_shaped(number, 0, name, [[8]], [8]) for number, name in enumerate((*kernels, *idle), 1)]
    assert [name for name, _ in _pytorch_kernels(tmp_path, *operations)] == list(kernels)


@pytest.mark.parametrize(
    ("name", "shapes", "results", "expected"),
    [
        ("mm", [[4, 8], [8, 2], [4, 2]], [[4, 2]], 2 * 4 * 8 * 2),  # written into a tensor that is there
        ("addmm", [[4, 2], [4, 8], [8, 2], [], []], [[4, 2]], 2 * 4 * 8 * 2),
        ("_scaled_mm", [[4, 8], [8, 2], [4, 1], [1, 2], []], [[4, 2]], 2 * 4 * 8 * 2),  # a scale for each row
        ("baddbmm", [[3, 4, 2], [3, 4, 8], [3, 8, 2]], [[3, 4, 2]], 2 * 3 * 4 * 8 * 2),
        ("convolution_backward", [[1, 6, 5, 5], [1, 3, 5, 5], [6, 3, 1, 1]], [[1, 3, 5, 5], [6, 3, 1, 1]], 4 * 150 * 3),
        ("convolution_backward", [[1, 6, 5, 5], [1, 3, 5, 5], [6, 3, 1, 1]], [[], [6, 3, 1, 1], []], 2 * 150 * 3),
    ],
)
def test_products_take_their_factors(
    name: str, shapes: list[list[int]], results: list[list[int]], expected: float
) -> None:
    """Neither scales nor buffers of results are factors. A gradient without a shape was not computed."""
    assert operation_flops(f"aten::{name}", shapes, results) == expected


#: File -> nodes by kind.
REAL = {
    "chakra/chakra.0.et.gz": {"host": 2448, "gpu": 1209, "collective": 7},
    "chakra/small_chakra.0.json": {"host": 5, "gpu": 1, "collective": 1},
    "traces/astra_custom_ring_allreduce.0.et": {"send": 14, "receive": 14, "gpu": 7},
    "traces/astra_custom_ring_allreduce.1.et": {"send": 14, "receive": 14, "gpu": 7},
    "traces/hta_pytorch_et_simple_add.json.gz": {"gpu": 4},
    "traces/param_linear_et.json.gz": {"gpu": 217},
    "traces/param_resnet_1gpu_et_1.0.3.json.gz": {"gpu": 3180, "collective": 21},
    "traces/param_resnet_2gpu_et_1.1.0.json.gz": {"gpu": 3180, "collective": 21},
}


#: A file that differs from another one in little but its size.
LIKE_ANOTHER = "traces/param_resnet_1gpu_et_1.0.3.json.gz"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == LIKE_ANOTHER else []) for name in REAL]
)
def test_real_files_are_read(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip("the file of another project is not here")
    assert is_execution_trace(str(SHARED / name))
    assert Counter(str(one.kind) for one in nodes_of(str(SHARED / name))) == REAL[name]


def test_protobuf_that_is_not_installed_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_chakra(tmp_path / "a.0.et", node(0, SEND, comm_dst=1))
    chakra_messages.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "google.protobuf", None)
    with pytest.raises(InputError, match="need protobuf"):
        open_graphs([path])
    chakra_messages.cache_clear()

"""PyTorch's execution traces (``ExecutionTraceObserver``) as graphs: operations in their order, without times.

Nodes are operations of the host with their tensors; each is a part of the one that called it. Kernels are taken to be
the innermost operations that read or write tensors on a GPU. They run in one stream, in the order of their calls. Their
FLOPs follow from shapes, and their bytes from the tensors. Fields are those of schemas 1.0.1 to 1.1.0 (pytorch,
``torch/csrc/profiler/standalone/execution_trace_observer.cpp``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from simulator.errors import InputError
from simulator.input_files import brief
from simulator.traces.classes import operation_of
from simulator.traces.comm_facts import collective_of
from simulator.traces.execution.graph import GraphComm, GraphNode, LinkedNode, NodeKind, RankGraph, in_running_order
from simulator.traces.execution.operation_flops import operation_flops
from simulator.traces.execution.process_groups import GROUPS_NODE, listed_groups
from simulator.units import counted

#: The host's record of a communication; its parts are NCCL's calls.
_COMM_CALL = "record_param_comms"
_WAIT = "wait"
#: Operations that only make tensors, change a tensor's shape in place, or ask about tensors. Views are told by what
#: they share.
_WITHOUT_KERNEL = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized", "new_empty"),
        *("new_empty_strided", "_efficientzerotensor", "lift", "lift_fresh", "detach", "retain_grad"),
        *("resize_", "resize_as_", "_resize_output_", "set_", "detach_", "as_strided_", "squeeze_", "unsqueeze_"),
        *("transpose_", "t_", "swapaxes_", "swapdims_", "requires_grad_", "rename_"),
        *("result_type", "_fused_sdp_choice", "is_same_size", "is_pinned", "numel", "sym_numel", "sym_size"),
    }
)
#: Largest number of a tensor, of its elements and its bytes that is believed.
_LARGEST = 1 << 63
#: Fields of a tensor's list: tensor, storage, offset, elements, bytes of an element, device.
_TENSOR_FIELDS = 6


@dataclass(frozen=True)
class _Operation:
    """An operation as the file has it. ``order``: its place among all calls. ``facts``: attributes by name."""

    number: int
    parent: int
    order: int
    name: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    shapes: Sequence[Any]
    output_shapes: Sequence[Any]
    types: Sequence[Any]
    facts: Mapping[str, Any]

    @property
    def has_kernel(self) -> bool:
        """True where it reads or writes a tensor on a GPU, and does more than make or shape it."""
        short = self.name.partition("::")[2]
        if not short or short in _WITHOUT_KERNEL or self.name.startswith("c10d::"):
            return False
        before, after = (_storages(values) for values in (self.inputs, self.outputs))
        changes_in_place = short.endswith("_") or short.endswith("out")
        return bool(before | after) and (changes_in_place or not after or not after <= before)


def read_operations(content: Mapping[str, Any], path: Path, rank: int) -> RankGraph:
    """Return the graph in a file whose nodes are operations. Raises `InputError` where it is no such file."""
    nodes = content.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise InputError("is no list of operations", file=path, key="nodes", found=brief(nodes))
    operations = sorted((_operation(node, path) for node in nodes), key=lambda one: one.order)
    groups: dict[str, tuple[int, ...]] = {}
    for one in operations:
        if one.name == GROUPS_NODE:
            groups |= listed_groups(str(one.inputs), path)
    linked = list(_linked(operations, path))
    if not any(one.node.kind == NodeKind.GPU for one in linked):
        raise InputError("has no operation with a tensor on a GPU", file=path, fix="record while the GPU works")
    ordered, missing = in_running_order(linked, path)
    notes = ["the trace has no times: lengths follow from FLOPs and bytes by the roofline of a GPU"]
    communications = sum(one.node.kind == NodeKind.COLLECTIVE for one in linked)
    if communications and not any(_is_wait(one) for one in operations):
        notes.append(f"no kernel waits for {counted(communications, 'communication')}: the trace tells no waits")
    return RankGraph(rank, str(path), "PyTorch", ordered, groups, (*missing, *notes))


def _operation(node: Mapping[str, Any], path: Path) -> _Operation:
    try:
        number = int(node["id"])
        parent = int(node["parent"] if "parent" in node else node.get("ctrl_deps", number))
        facts = {one["name"]: one.get("value") for one in node.get("attrs", ())} or dict(node)
        order = int(facts.get("rf_id") or 0)
        values, results = node.get("inputs", []), node.get("outputs", [])
        split = isinstance(values, dict)
        operation = _Operation(
            number, parent, order, str(node.get("name", "")),
            list(values["values"] if split else values), list(results["values"] if split else results),
            list(values["shapes"] if split else node.get("input_shapes", ())),
            list(results["shapes"] if split else node.get("output_shapes", ())),
            list(values["types"] if split else node.get("input_types", ())), facts,
        )  # fmt: skip
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise InputError("has an operation that cannot be read", file=path, found=brief(dict(node))) from None
    _check_sizes(operation, path)
    return operation


def _check_sizes(operation: _Operation, path: Path) -> None:
    """Raise `InputError` where a tensor's numbers, or sizes, are no whole numbers of a tensor that can be."""
    where = f"operation {operation.number}"
    for tensor in _tensors([operation.inputs, operation.outputs]):
        if not all(_is_size(one) for one in tensor[:-1]):
            raise InputError("has a tensor that cannot be read", file=path, key=where, found=brief(tensor))
    for shape in _shapes([operation.shapes, operation.output_shapes]):
        if not all(_is_size(size) for size in shape) or not _is_size(prod(shape)):
            raise InputError("has sizes that no tensor has", file=path, key=where, found=brief(shape))


def _shapes(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the innermost lists among values, which are shapes; those of an operation may be lists of them."""
    inside = [value for value in values if isinstance(value, list)]
    if not inside:
        yield [value for value in values if value is not None and value != ""]
    for value in inside:
        yield from _shapes(value)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _tensors(values: object) -> Iterator[Sequence[Any]]:
    """Yield the tensors on GPUs among the values of an operation, those in lists too."""
    if not isinstance(values, list):
        return
    if len(values) == _TENSOR_FIELDS and isinstance(values[-1], str) and not isinstance(values[0], list):
        if values[-1].startswith(("cuda", "hip")):
            yield values
        return
    for value in values:
        yield from _tensors(value)


def _storages(values: object) -> set[int]:
    return {tensor[1] for tensor in _tensors(values)}


def _is_wait(operation: _Operation) -> bool:
    return operation.name == _COMM_CALL and operation.facts.get("collective_name", _told_name(operation)) == _WAIT


def _told_name(operation: _Operation) -> str:
    """Return the name of a communication among the inputs of its record, for schemas without attributes."""
    return next((value for value in operation.inputs if isinstance(value, str)), "")


def _linked(operations: Sequence[_Operation], path: Path) -> Iterator[LinkedNode]:
    """Yield kernels one behind another, and communication behind the kernels before it."""
    computing = _innermost(operations)
    last: tuple[int, ...] = ()
    waited: tuple[int, ...] = ()
    on_the_way: dict[int | None, int] = {}
    for one in operations:
        if one.number in computing:
            yield LinkedNode(_kernel(one, (*last, *waited)))
            last, waited = (one.number,), ()
        elif _is_wait(one):
            call = one.inputs[0] if one.inputs and isinstance(one.inputs[0], int) else None
            chosen = [call] if call in on_the_way else list(on_the_way)
            waited = (*waited, *[on_the_way.pop(key) for key in chosen])
        elif one.name == _COMM_CALL and (node := _communication(one, (*last, *waited), path)) is not None:
            yield LinkedNode(node)
            on_the_way[one.inputs[1] if len(one.inputs) > 1 and isinstance(one.inputs[1], int) else one.number] = (
                one.number
            )


def _innermost(operations: Sequence[_Operation]) -> set[int]:
    """Return the operations with a kernel: those with FLOPs, and those without that call no other one with a kernel.

    Of two with FLOPs, one inside the other, the inner one has the kernel.
    """
    parents = {one.number: one.parent for one in operations}
    with_kernel = {one.number: bool(_flops(one)) for one in operations if one.has_kernel}
    outer: set[int] = set()
    for number, has_flops in with_kernel.items():
        parent, passed = parents[number], {number}
        while parent in parents and parent not in passed:
            passed.add(parent)
            if has_flops or not with_kernel.get(parent, False):
                outer.add(parent)
            parent = parents[parent]
    return set(with_kernel) - outer


def _flops(operation: _Operation) -> float:
    return operation_flops(operation.name, operation.shapes, operation.output_shapes)


def _kernel(operation: _Operation, after: tuple[int, ...]) -> GraphNode:
    tensors = {tensor[0]: tensor for tensor in _tensors([*operation.inputs, *operation.outputs])}
    nbytes = float(sum(tensor[3] * tensor[4] for tensor in tensors.values()))
    return GraphNode(
        operation.number, operation.name, NodeKind.GPU, after, None, _flops(operation), nbytes, dtype=_dtype(operation)
    )


def _dtype(operation: _Operation) -> str:
    """Return the type of the first tensor, as GPUs' peaks are told by it; empty for any other."""
    text = next((str(kind) for kind in operation.types if str(kind).startswith("Tensor(")), "").lower()
    names = {"bfloat16": "bf16", "half": "fp16", "float8": "fp8", "float": "fp32"}
    return next((dtype for part, dtype in names.items() if part in text), "")


def _communication(operation: _Operation, after: tuple[int, ...], path: Path) -> GraphNode | None:
    """Return the node of a collective; None of other records, as those of waits and of batches are."""
    facts = operation.facts
    if not _is_size(facts.get("in_msg_nelems", 0)):
        where = f"operation {operation.number}.in_msg_nelems"
        raise InputError("is no number of elements", file=path, key=where, found=brief(facts["in_msg_nelems"]))
    name = str(facts.get("collective_name") or _told_name(operation))
    kind = operation_of(name)
    if not kind or kind == "send_recv":
        return None
    if "in_msg_nelems" in facts:
        collective = collective_of({"In msg nelems": facts["in_msg_nelems"], "dtype": facts.get("dtype", "")}, kind)
        nbytes = collective.nbytes
    else:
        first = operation.inputs[0] if operation.inputs else []
        nbytes = float(sum(tensor[3] * tensor[4] for tensor in _tensors(first)))
    comm = GraphComm(kind, nbytes, str(facts.get("pg_name") or ""))
    return GraphNode(operation.number, name, NodeKind.COLLECTIVE, after, comm=comm)

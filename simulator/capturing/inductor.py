"""Kernels that Inductor plans for a graph of operations, asked for without a GPU and without Triton.

Inductor lowers the graph and decides which operations share a kernel, as it does before it writes code (torch 2.13:
torch/_inductor/graph.py, ``GraphLowering``; scheduler.py, ``Scheduler.fuse_nodes``). No code is written. Products stay
calls of a library, as they are without ``max-autotune``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simulator.capturing.calls import DTYPES, Call, Launch
from simulator.capturing.fused_classes import fused_kernel
from simulator.capturing.kernels import launches

#: Products that a library computes. To choose among libraries Inductor would ask the GPU.
_LEFT_TO_LIBRARIES = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "convolution")
#: An H100, by whose SMs and threads Inductor splits sums (NVIDIA, H100 white paper, tables 2 and 4).
_GPU: dict[str, Any] = {
    **{"type": "cuda", "index": 0, "multi_processor_count": 132, "cc": 90, "major": 9, "warp_size": 32},
    **{"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024},
}


@dataclass(frozen=True)
class PlannedStep:
    """A kernel of Inductor's, or a call that it leaves to a library.

    ``reads`` and ``writes`` name buffers, in the order of the call's tensors; None stands for no tensor.
    """

    name: str
    launches: tuple[Launch, ...]
    reads: tuple[str, ...]
    writes: tuple[str | None, ...]


@dataclass(frozen=True)
class PlannedOutput:
    """An output of a graph: the buffer that it lies in, its type and how it lies there."""

    buffer: str
    dtype: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class GraphPlan:
    """Steps of a graph in their order. ``inputs`` and ``outputs`` are its buffers, ``sizes`` has the bytes of all."""

    steps: tuple[PlannedStep, ...]
    inputs: tuple[str, ...]
    outputs: tuple[PlannedOutput | None, ...]
    sizes: Mapping[str, float]


def partitioned(joint: Any, inputs: Any, weights: Sequence[int] = (), **options: Any) -> tuple[Any, Any]:
    """Return the graphs of the forward and the backward pass of a ``joint`` one, as on a GPU.

    ``weights``: which of its inputs stay whatever is kept of them, so that no copy of them is kept.
    """
    import torch
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.fx_passes import joint_graph

    on_gpu = _on_gpu(joint)
    joint_graph.lazy_init(torch.device("cpu"))  # patterns, which are traced on tensors of the device
    placeholders = _placeholders(on_gpu)
    with _as_on_a_gpu(placeholders[0].fake_mode):
        options["static_lifetime_input_indices"] = list(weights)
        forward, backward = partition_fn(on_gpu, placeholders, **options)
    return forward, backward


def planned(graph: Any, *, backward: bool) -> GraphPlan:
    """Return what Inductor makes of ``graph``, a ``torch.fx.GraphModule`` of `partitioned`."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    on_gpu = _on_gpu(graph)
    inputs = _placeholders(on_gpu)
    outputs = [one.meta["val"] if hasattr(one, "meta") else None for one in on_gpu.graph.output_node().args[0]]
    with _as_on_a_gpu(inputs[0].fake_mode), V.set_debug_handler(DebugContext()):
        view_to_reshape(on_gpu)
        post_grad_passes(on_gpu, is_inference=False)
        lowering = GraphLowering(on_gpu, example_inputs=inputs, is_backward=backward)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            return _Reading(lowering, backward=backward).plan(outputs)


def _placeholders(graph: Any) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def _on_gpu(graph: Any) -> Any:
    """Return a copy of ``graph`` whose tensors are said to be on a GPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._pytree import tree_map_only

    device = torch.device("cuda:0")

    def there(tensor: Any) -> Any:
        with unset_fake_temporarily():
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(tensor.fake_mode, empty, device)

    copied = torch.fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    moved = torch.fx.GraphModule(graph, copied)
    for old, node in zip(graph.graph.nodes, copied.nodes, strict=True):
        node.meta = {**old.meta, "val": tree_map_only(torch.Tensor, there, old.meta.get("val"))}
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    return moved


def _operations(node: Any) -> set[str]:
    """Return the names of the operations of a kernel, as they were called and as they were taken apart."""
    origins = (origin for one in node.get_nodes() for origin in one.node.get_origins() if origin.op == "call_function")
    called = (target for origin in origins for target in (origin.target, origin.meta.get("original_aten")))
    return {target._schema.name.split("::")[1] for target in called if hasattr(target, "_schema")}


@contextmanager
def _as_on_a_gpu(mode: Any) -> Iterator[None]:
    """Have Inductor take the machine for one with `_GPU` and Triton, while the context lasts.

    ``mode``: the ``FakeTensorMode`` of the tensors without data.
    """
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from torch._inductor.fx_passes import joint_graph, reinplace
    from torch._inductor.lowering import fallback_handler, lowerings
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    gpu = DeviceProperties(**_GPU)
    operations = [getattr(torch.ops.aten, name).default for name in _LEFT_TO_LIBRARIES]
    calls = {operation: fallback_handler(operation, add_to_fallback_set=False) for operation in operations}
    before = dict(lowerings)
    with ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))  # numbers that Inductor works out itself
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(config.patch(joint_graph_constant_folding=False))
        stack.enter_context(_replaced(DeviceProperties, "create", classmethod(lambda cls, device: gpu)))
        stack.enter_context(_replaced(CudaInterface, "is_available", staticmethod(lambda: True)))
        stack.enter_context(_replaced(CudaInterface, "current_device", staticmethod(lambda: 0)))
        stack.enter_context(_replaced(CudaInterface, "get_compute_capability", staticmethod(lambda device=None: 90)))
        stack.enter_context(_replaced(scheduler, "has_triton", lambda *_: True))
        stack.enter_context(_replaced(reinplace, "_inplace_generalized_scatter", lambda target, *_: target))
        stack.enter_context(_replaced(joint_graph, "lazy_init", lambda device: None))
        stack.callback(lowerings.update, before)
        stack.callback(lowerings.clear)
        lowerings.update(calls)
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have ``owner`` another attribute ``name``, while the context lasts."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Reading:
    """Reads the plan of a graph that Inductor has lowered and scheduled."""

    def __init__(self, lowering: Any, *, backward: bool) -> None:
        self.lowering, self.backward = lowering, backward
        self.nodes: Sequence[Any] = lowering.scheduler.nodes
        self.steps: list[PlannedStep] = []
        self.sizes: dict[str, float] = {}

    @cached_property
    def results(self) -> dict[str, list[tuple[int, str]]]:
        """Buffer of a call with several results -> the place of each, and its own buffer."""
        from torch._inductor.ir import MultiOutput

        results: dict[str, list[tuple[int, str]]] = {}
        for node in self.nodes:
            if isinstance(node.node, MultiOutput):
                indices = node.node.indices
                call = node.node.inputs[0].get_name()
                results.setdefault(call, []).append((int(indices[0][1]) if indices else 0, node.node.get_name()))
        return results

    def plan(self, outputs: Sequence[Any]) -> GraphPlan:
        """Return the plan of a graph that gives such ``outputs``."""
        from torch._inductor.ir import MultiOutput
        from torch._inductor.scheduler import NopKernelSchedulerNode

        for node in self.nodes:
            if not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, MultiOutput):
                self.steps.append(self._call(node) if node.is_extern() else self._kernel(node))
        inputs = tuple(self._note_size(self._real(name)) for name in self.lowering.graph_input_names)
        placed = tuple(map(self._output, self.lowering.graph_outputs, outputs))
        return GraphPlan(tuple(self.steps), inputs, placed, self.sizes)

    def _output(self, one: Any, tensor: Any) -> PlannedOutput | None:
        """Return where an output of the graph lies; None of a number or of nothing."""
        import torch

        if not isinstance(tensor, torch.Tensor):
            return None
        buffer = self._note_size(self._real(one.get_name()))
        return PlannedOutput(buffer, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def _real(self, name: str) -> str:
        """Return the buffer that ``name`` stands for, which is another where a buffer is written to."""
        return str(self.lowering.scheduler.mutation_real_name.get(name, name))

    def _note_size(self, name: str) -> str:
        import torch

        if name not in self.sizes:
            dtype: torch.dtype = self.lowering.get_dtype(name)
            self.sizes[name] = float(int(self.lowering.get_numel(name)) * dtype.itemsize)
        return name

    def _kernel(self, node: Any) -> PlannedStep:
        """Return a kernel of Inductor's own."""
        from torch._inductor.utils import get_fused_kernel_name

        reads = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
        writes = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
        written = tuple(self._note_size(self._real(name)) for name in writes)
        largest = max(writes, key=lambda name: writes[name])
        groups, row = (int(size) for size in node.group[1])
        kernel = fused_kernel(
            _operations(node),
            read=float(sum(reads.values())),
            written=float(sum(writes.values())),
            elements=groups * row,
            row=row,
            dtype=DTYPES.get(str(self.lowering.get_dtype(largest)).removeprefix("torch."), "fp32"),
            backward=self.backward,
            narrow=self._narrow(node, writes),
        )
        name = get_fused_kernel_name(node.get_nodes(), "original_aten")
        return PlannedStep(f"triton {name}", (Launch(kernel),), tuple(map(self._real, reads)), written)

    def _narrow(self, node: Any, writes: Mapping[str, int]) -> set[bool]:
        """Return, of the tensors in 8 bits that a kernel writes, whether their order is another than what it reads."""
        turned: set[bool] = set()
        for one in node.get_nodes():
            reads = [dep for dep in one.read_writes.reads if self.lowering.get_numel(dep.name) > 1]
            for write in one.read_writes.writes:
                if write.name in writes and "float8" in str(self.lowering.get_dtype(write.name)):
                    order = write.stride1_for_last_dim()
                    turned.add(any(dep.stride1_for_last_dim() != order for dep in reads))
        return turned

    def _call(self, node: Any) -> PlannedStep:
        """Return a call that is left to a library, with the kernels that it launches."""
        import torch
        from torch.utils._pytree import tree_leaves, tree_map_only

        operation, buffer = node.node, node.node.get_name()
        origins = [one for one in operation.get_origins() if one.op == "call_function"]
        origin = next((one for one in origins if one.target is operation.op_overload), origins[0])
        args, kwargs = tree_map_only(
            torch.fx.Node, lambda one: one.meta["val"], (tuple(origin.args), dict(origin.kwargs))
        )
        outputs = [one if isinstance(one, torch.Tensor) else None for one in tree_leaves(origin.meta["val"])]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = origin.target._schema.name.split("::")[1]
        written = dict(self.results.get(buffer, [(0, buffer)]))
        writes = tuple(
            self._note_size(self._real(written[place])) if place in written else None for place in range(len(outputs))
        )
        reads = tuple(dict.fromkeys(self._real(one.name) for one in node.read_writes.reads))
        return PlannedStep(name, launches(origin.target, Call(name, args, kwargs, tensors, outputs)), reads, writes)

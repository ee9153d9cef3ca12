"""Layers under ``torch.compile``: each is one graph forward and one backward, with the kernels that Inductor plans.

Layers are compiled one by one, as torchtitan does, and Hugging Face's accelerate by ``use_regional_compilation``.
What runs between them stays as it is. AOTAutograd traces a layer, and decides what is kept and what is computed again
(torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from simulator.capturing.gpu_operations import norms_taken_apart
from simulator.capturing.inductor import GraphPlan, partitioned, planned
from simulator.capturing.parts import Parts, distinct_parts
from simulator.capturing.recorder import Entry, Running, TapeRecorder, Use
from simulator.errors import InputError

#: The version of PyTorch whose private functions of Inductor are called: there are no public ones for its kernels.
PYTORCH_VERSION = "2.13"
#: Why tensor parallelism does not split compiled layers.
UNSPLIT = "kernels that several operations share are not split over ranks"


def layers_compiled(parts: Parts) -> Running:
    """Return how a module of these ``parts`` runs with its layers compiled; equal ones are compiled once.

    Raises `InputError` where PyTorch is not of `PYTORCH_VERSION`, or a layer that runs twice does so in two ways.
    """
    import torch

    if not torch.__version__.startswith(f"{PYTORCH_VERSION}."):
        raise InputError(
            "Inductor of another version is not known",
            key="compile",
            found=torch.__version__,
            allowed=f"{PYTORCH_VERSION}.*",
        )
    _, numbers = distinct_parts([parts.part(number) for number in range(parts.sections.behind + 1)])
    kinds: dict[str, int] = {}
    for call, kind in zip(parts.sections.layers, numbers[1:-1], strict=True):
        if kinds.setdefault(call.path, kind) != kind:
            raise InputError("runs twice, in two ways, and is not compiled", key=call.path)
    return partial(_compiled, kinds)


@contextmanager
def _compiled(kinds: Mapping[str, int], module: Any, recorder: TapeRecorder) -> Iterator[None]:
    """Have layers of ``module`` run compiled, while the context lasts. ``kinds``: path of a layer -> its kind."""
    layers: dict[int, _CompiledLayer] = {}
    modules = dict(module.named_modules())
    with ExitStack() as stack:
        for path, kind in kinds.items():
            stack.enter_context(_with_forward(modules[path], path, kind, layers, recorder))
        yield


@contextmanager
def _with_forward(
    layer: Any, path: str, kind: int, layers: dict[int, _CompiledLayer], recorder: TapeRecorder
) -> Iterator[None]:
    """Have the ``layer`` run as the one of ``layers`` of its kind, which its first run compiles."""
    uncompiled, instance_forward = layer.forward, vars(layer).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if recorder.paused:  # it is being traced
            return uncompiled(*args, **kwargs)
        if kind not in layers:
            layers[kind] = _CompiledLayer(layer, path, recorder)
        return layers[kind].run(layer, path, args, kwargs)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
        if instance_forward is not None:  # a forward pass that was put into the object
            layer.forward = instance_forward


class _CompiledLayer:
    """A layer as its graphs. ``function`` takes weights and tensors, and returns the tensors of its output."""

    def __init__(self, layer: Any, path: str, recorder: TapeRecorder) -> None:
        self.layer, self.recorder, self.path = layer, recorder, path
        self.paths: dict[int, str] = {}
        self.with_gradient: set[int] = set()
        self.names: list[str] = []
        self.output: tuple[list[Any], Any] = [], None
        self.function: Callable[..., Any] | None = None

    def run(self, layer: Any, path: str, args: Any, kwargs: Any) -> Any:
        """Return what ``layer``, which is of the same kind, gives, and write its kernels down."""
        import torch
        from torch.utils._pytree import tree_flatten, tree_unflatten

        leaves, inputs = tree_flatten((args, kwargs))
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[number] for number in places]
        weights = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        if self.function is None:
            self.names = list(weights)
            self.function = self._traced(leaves, places, inputs, list(weights.values()), tensors)
        self.path = path
        self.with_gradient = {self.recorder.number(tensor) for tensor in tensors if tensor.requires_grad}
        results = iter(self.function(list(weights.values()), tensors))
        output = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.output[0]]
        return tree_unflatten(output, self.output[1])

    def _traced(self, leaves: Sequence[Any], places: Sequence[int], inputs: Any, weights: Any, tensors: Any) -> Any:
        """Return the layer as a function of its weights and tensors, compiled."""
        import torch
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.decomposition import select_decomp_table
        from torch.utils._python_dispatch import _disable_current_modes
        from torch.utils._pytree import tree_flatten, tree_unflatten

        def function(weights: Any, tensors: Any) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, kwargs = tree_unflatten(filled, inputs)
            output = torch.func.functional_call(self.layer, dict(zip(self.names, weights, strict=True)), args, kwargs)
            self.output = tree_flatten(output)
            return [leaf for leaf in self.output[0] if isinstance(leaf, torch.Tensor)]

        compiled = aot_function(
            function,
            fw_compiler=lambda graph, _: self._graph(graph, backward=False),
            bw_compiler=lambda graph, _: self._graph(graph, backward=True),
            partition_fn=partial(partitioned, weights=range(len(self.names))),
            decompositions=select_decomp_table() | norms_taken_apart(),
        )
        with self.recorder.pause(), _disable_current_modes(), _compiling(self.path):
            compiled(*([_fresh(one) for one in ones] for ones in (weights, tensors)))
        return compiled

    def _graph(self, graph: Any, *, backward: bool) -> Any:
        """Return the function of a graph, which writes its kernels down."""
        from torch._functorch.aot_autograd import make_boxed_func
        from torch.utils._python_dispatch import _disable_current_modes

        with self.recorder.pause(), _disable_current_modes(), _compiling(self.path):
            plan = planned(graph, backward=backward)

        def run(*inputs: Any) -> Any:
            with _disable_current_modes():
                results = _results(plan, inputs)
            if not self.recorder.paused:
                self._write(plan, inputs, results)
            return results

        return make_boxed_func(run)

    def _write(self, plan: GraphPlan, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        """Write the kernels of a graph down, which had the tensors ``inputs`` and gave ``results``."""
        import torch

        recorder = self.recorder
        outputs = [None if one is None else one.buffer for one in plan.outputs]
        named_tensors = (*zip(outputs, results, strict=True), *zip(plan.inputs, inputs, strict=True))
        tensors = {name: tensor for name, tensor in named_tensors if name is not None}
        numbers = {name: recorder.number(tensor) for name, tensor in tensors.items()}
        path = self.paths.setdefault(recorder.node, self.path)
        owners = self._owners(plan, numbers, path)
        if not recorder.backward:
            passed = sum(isinstance(leaf, torch.Tensor) for leaf in self.output[0])
            recorder.tape.passed |= {recorder.number(tensor) for tensor in results[:passed]}

        def use(name: str) -> Use:
            if name not in numbers:
                numbers[name] = recorder.add_storage(plan.sizes.get(name, 0.0))
            shape = tuple(tensors[name].shape) if name in tensors else ()
            return Use(numbers[name], shape, numbers[name] in self.with_gradient)

        for step in plan.steps:
            named = {owners[name] for name in (*step.reads, *step.writes) if name in owners}
            module = named.pop() if len(named) == 1 else path
            reads = tuple(map(use, step.reads))
            writes = tuple(None if name is None else use(name) for name in step.writes)
            entry = Entry(
                step.name, module, recorder.node, recorder.backward, step.launches, reads, writes, is_view=False
            )
            recorder.tape.entries.append(entry)

    def _owners(self, plan: GraphPlan, numbers: Mapping[str, int], path: str) -> dict[str, str]:
        """Return by buffer the module whose weight, or whose weight's gradient, it is."""
        weights = self.recorder.tape.weights
        owners = {name: weights[number].rpartition(".")[0] for name, number in numbers.items() if number in weights}
        if self.recorder.backward:
            for output, weight in zip(plan.outputs, self.names, strict=False):
                if output is not None:
                    inside = weight.rpartition(".")[0]
                    owners[output.buffer] = ".".join(filter(None, (path, inside)))
        return owners


@contextmanager
def _compiling(path: str) -> Iterator[None]:
    """Have errors of PyTorch's compiler name the layer ``path``, while the context lasts.

    What PyTorch warns of is its own code.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except Exception as error:  # whatever AOTAutograd and Inductor raise
        first = next(iter(str(error).splitlines()), "")
        raise InputError(f"torch.compile fails: {type(error).__name__}: {first}", key=path or "compile") from error


def _results(plan: GraphPlan, inputs: Sequence[Any]) -> list[Any]:
    """Return the outputs of a graph that was called with ``inputs``; those of one buffer share their storage."""
    import torch

    tensors = dict(zip(plan.inputs, inputs, strict=True))
    results: list[Any] = []
    for output in plan.outputs:
        if output is None:
            results.append(None)
        elif output.buffer not in tensors:
            tensor = torch.empty_strided(output.size, output.stride, dtype=output.dtype, device="meta")
            results.append(tensors.setdefault(output.buffer, tensor))
        else:
            results.append(tensors[output.buffer].as_strided(output.size, output.stride))
    return results


def _fresh(tensor: Any) -> Any:
    """Return a tensor like ``tensor`` that nothing else has."""
    import torch

    sizes = tuple(tensor.shape), tuple(tensor.stride())
    return torch.empty_strided(*sizes, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

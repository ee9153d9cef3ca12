"""A module's forward and backward pass, recorded operation by operation on tensors without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from simulator.capturing.calls import Call, Launch
from simulator.capturing.gpu_operations import fused_as_on_gpus, without_copy
from simulator.capturing.kernels import launches
from simulator.capturing.known_values import KnownValues
from simulator.errors import InputError


@dataclass(frozen=True)
class Use:
    """A tensor that an operation reads or writes: its storage's number, its shape, and whether autograd follows it."""

    storage: int
    shape: tuple[int, ...]
    has_gradient: bool


@dataclass(frozen=True)
class Entry:
    """One operation of the tape. ``node`` is the number that autograd gave the operation that it belongs to."""

    name: str
    module: str
    node: int
    backward: bool
    launches: tuple[Launch, ...]
    inputs: tuple[Use, ...]
    outputs: tuple[Use | None, ...]
    is_view: bool


@dataclass(frozen=True)
class ModuleCall:
    """A module's forward pass: its first entry of the tape and node of autograd, and those behind its last."""

    path: str
    entries: tuple[int, int]
    nodes: tuple[int, int]


@dataclass(frozen=True)
class Kept:
    """A tensor that autograd keeps: its storage, and the number of the node that keeps it."""

    storage: int
    node: int


@dataclass
class Tape:
    """Operations, modules and kept tensors of a recorded pass.

    ``storages`` are the bytes of each by its number. ``weights`` and ``gradients`` name the weights that storages are
    of; ``inputs`` are those of the module's own inputs, ``passed`` those that compiled layers give.
    """

    entries: list[Entry] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    storages: list[float] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    gradients: dict[int, str] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)


class TapeRecorder:
    """Numbers storages, follows modules, and writes operations down as they are dispatched."""

    def __init__(self, values: KnownValues) -> None:
        self.tape, self.values = Tape(), values
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no storage has the address of another
        self._modules: list[str] = [""]
        self.backward = False
        self.paused = False

    @property
    def module(self) -> str:
        """Dotted name of the module that runs."""
        return self._modules[-1]

    def number(self, tensor: Any) -> int:
        """Return the number of a tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._alive)
            self._alive.append(storage)
            self.tape.storages.append(float(storage.nbytes()))
        return self._numbers[key]

    def add_storage(self, nbytes: float) -> int:
        """Return the number of a storage of so many bytes that no tensor here has."""
        self._alive.append(None)
        self.tape.storages.append(nbytes)
        return len(self._alive) - 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Write nothing down, while the context lasts."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def keep(self, tensor: Any) -> Any:
        """Note that autograd keeps ``tensor``."""
        import torch

        if self.paused:
            return tensor
        self.tape.kept.append(Kept(self.number(tensor), torch.autograd._get_sequence_nr() - 1))
        return tensor

    def enter(self, path: str) -> tuple[int, int]:
        """Note that a module begins; return the entry and the node that come next."""
        import torch

        if self.backward and not self.paused:
            raise InputError(
                "runs forward again in the backward pass",
                key=path,
                fix="capture it without activation checkpointing, and write training.recompute: full",
            )
        self._modules.append(path)
        return len(self.tape.entries), torch.autograd._get_sequence_nr()

    def leave(self, begun: tuple[int, int]) -> None:
        """Note that the module that began so has ended."""
        import torch

        path = self._modules.pop()
        if self.paused:
            return
        nodes = (begun[1], torch.autograd._get_sequence_nr())
        self.tape.calls.append(ModuleCall(path, (begun[0], len(self.tape.entries)), nodes))

    def write(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Write an operation down that gave ``result``."""
        import torch
        from torch.utils._pytree import tree_leaves

        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [
            leaf if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(result, lambda x: x is None)
        ]
        read = tuple(self._use(tensor) for tensor in inputs)
        written = tuple(None if tensor is None else self._use(tensor) for tensor in outputs)
        storages = {use.storage for use in read}
        mutates = func._schema.is_mutable
        is_view = not mutates and bool(written) and all(use is None or use.storage in storages for use in written)
        name = func._schema.name.split("::")[1]
        call = Call(name, tuple(args), kwargs, inputs, outputs)
        tape, node = self.tape, self.node
        entry = Entry(
            name,
            self.module,
            node,
            self.backward,
            () if is_view else launches(func, call),
            read,
            written,
            is_view,
        )
        tape.entries.append(entry)

    def unknown(self, tensor: Any) -> InputError:
        """Return the error of a module that reads a value which is not known."""
        why = "branches on, or reads, a value that only real data have"
        if self.values.is_chance(tensor):
            why = "branches on a value that chance decides, as layers do that are left out at random (layerdrop)"
        return InputError(why, key=self.module)

    def check_rows(self, func: Any, args: Sequence[Any]) -> None:
        """Raise `InputError` where known numbers, such as positions, are beyond the rows of a table."""
        import torch

        if func is not torch.ops.aten.embedding.default:
            return
        table, numbers = args[:2]
        value = self.values.value_of(numbers)
        if value is not None and value.numel() and int(value.max()) >= table.shape[0]:
            raise InputError(
                f"reads row {int(value.max()):,} of a table of {table.shape[0]:,} rows, such as of positions",
                key=self.module,
                fix="shorter example inputs, or a model of more positions",
            )

    def _use(self, tensor: Any) -> Use:
        return Use(self.number(tensor), tuple(tensor.shape), bool(tensor.requires_grad))

    @property
    def node(self) -> int:
        """Return the number of autograd's node that an operation belongs to; of accumulated gradients the last one."""
        import torch

        if not self.backward:
            return int(torch.autograd._get_sequence_nr()) - 1
        node = torch._C._current_autograd_node()
        number = math.inf if node is None else node._sequence_nr()
        if number < 1 << 62:
            return int(number)
        entries = self.tape.entries
        return entries[-1].node if entries else -1


def _dispatching(recorder: TapeRecorder) -> Any:
    """Return the dispatch mode that hands operations to ``recorder``, and answers questions on known values."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dispatching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if recorder.paused or func.namespace == "prim":
                return func(*args, **kwargs)
            if recorder.backward:
                func = without_copy(func, args)
            value = None if recorder.backward else recorder.values.worked_out(func, args, kwargs)
            if func is torch.ops.aten._local_scalar_dense.default:
                if value is None:
                    raise recorder.unknown(args[0])
                return value
            recorder.check_rows(func, args)
            result = _result(func, args, kwargs, value)
            try:
                recorder.values.note(result, value)
                recorder.values.follow_chance(func, args, kwargs, result)
                recorder.write(func, args, kwargs, result)
            except InputError:
                raise
            except Exception as error:  # which `record` would take for one of the module
                raise AssertionError(f"a fault of the simulator: {func} was not written down") from error
            return result

    return Dispatching()


def _result(func: Any, args: Any, kwargs: Any, value: Any) -> Any:
    """Return what an operation gives on tensors without data; where its shape follows from data, as its ``value``."""
    import torch
    from torch.utils._pytree import tree_map_only

    try:
        return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        if value is None:
            raise
        return tree_map_only(torch.Tensor, lambda one: torch.empty_like(one, device="meta"), value)


#: Has a module run in another way, which the recorder is told of.
Running = Callable[[Any, TapeRecorder], AbstractContextManager[None]]


def as_it_is(module: Any, recorder: TapeRecorder) -> AbstractContextManager[None]:
    """Have a module run as it is."""
    return nullcontext()


def record(
    module: Any,
    weights: Mapping[str, Any],
    inputs: tuple[Any, Any],
    loss: Any,
    values: KnownValues,
    running: Running,
) -> Tape:
    """Return the tape of a forward and backward pass of ``module`` with the tensors ``weights`` in place of its own.

    Weights that the module does not have are of its adapters.
    ``inputs`` are its arguments and keywords, ``values`` what is known of these.
    ``loss`` is a function of its output, or None; ``running`` says how it runs. Raises `InputError` where the module
    cannot run without data.
    """
    import torch

    recorder = TapeRecorder(values)
    for name, weight in weights.items():
        recorder.tape.weights.setdefault(recorder.number(weight), name)
    recorder.tape.inputs |= {recorder.number(one) for one in _tensors(inputs)}
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    named = {name: weight for name, weight in weights.items() if name in names}
    dispatching = _dispatching(recorder)
    with fused_as_on_gpus(), torch.device("meta"), _followed(module, recorder), running(module, recorder):
        try:
            with dispatching, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda tensor: tensor):
                output = torch.func.functional_call(module, named, *inputs)
                results = _results(output, loss)
                recorder.backward = True
                torch.autograd.backward(results, [None if one.dim() == 0 else torch.empty_like(one) for one in results])
        except InputError as error:
            raise _at(error, module) from None
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError) as error:
            first = next(iter(str(error).splitlines()), "")
            kind = type(error).__name__
            raise InputError(
                f"{type(module).__name__} fails as it runs on tensors without data: {kind}: {first}",
                key=recorder.module or None,
            ) from error
    for name, weight in weights.items():
        if weight.requires_grad and weight.grad is not None:
            recorder.tape.gradients.setdefault(recorder.number(weight.grad), name)
    _note_addends(recorder.tape)
    return recorder.tape


def _note_addends(tape: Tape) -> None:
    """Note the gradients that autograd adds up to that of a weight which several operations read."""
    for entry in reversed(tape.entries):
        name = next((tape.gradients.get(use.storage) for use in entry.outputs if use is not None), None)
        if entry.backward and name is not None and entry.name == "add":
            for use in entry.inputs:
                tape.gradients.setdefault(use.storage, name)


def _at(error: InputError, module: Any) -> InputError:
    """Return ``error`` with the class of the module in place of a file."""
    error.file = error.file or type(module).__name__
    return error


def _followed(module: Any, recorder: TapeRecorder) -> Any:
    """Return a context in which ``recorder`` is told of every module that begins and ends."""
    from contextlib import ExitStack

    stack = ExitStack()
    begun: list[tuple[int, int]] = []
    for path, one in module.named_modules():
        before = one.register_forward_pre_hook(lambda *_, path=path: begun.append(recorder.enter(path)))
        after = one.register_forward_hook(lambda *_: recorder.leave(begun.pop()))
        stack.callback(before.remove)
        stack.callback(after.remove)
    return stack


def _results(output: Any, loss: Any) -> list[Any]:
    """Return the tensors that the backward pass starts from: the loss, or all outputs with gradients."""
    chosen = loss(output) if loss is not None else getattr(output, "loss", None)
    results = [one for one in _tensors(output if chosen is None else chosen) if one.requires_grad]
    if not results:
        raise InputError("no output has a gradient: no weight leads to it", key="the module's output")
    return results


def _tensors(tree: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

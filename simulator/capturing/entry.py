"""`capture`: a PyTorch module becomes a model that plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from traceback import extract_tb
from typing import Any

from simulator.captured import CapturedInput, CapturedModel, CapturedPart, CapturedType, heads_of, sample_of
from simulator.capturing.adapters import AdapterChoice, adapter_weights, beside
from simulator.capturing.calls import DTYPES
from simulator.capturing.compiled import UNSPLIT, layers_compiled
from simulator.capturing.known_values import KnownValues, without_device
from simulator.capturing.parts import Parts, distinct_parts
from simulator.capturing.recorder import Running, Tape, as_it_is, record
from simulator.capturing.sections import chain_of_layers, sections
from simulator.capturing.splitting import Shares, check_plan, shares
from simulator.errors import InputError, install_extra


def capture(
    module: Any,
    example_inputs: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    dtype: str | None = None,
    layers: str | None = None,
    tp_plan: Mapping[str, str] | None = None,
    seq: int | None = None,
    adapters: Mapping[str, Any] | None = None,
    compile: bool = False,
    values: KnownValues | None = None,
) -> CapturedModel:
    """Return ``module``, a PyTorch module, as a model that workload files name once it is saved.

    Its forward and backward pass run once on tensors without data: neither a GPU nor weights are needed, and the module
    itself is not changed. ``example_inputs`` is a tensor, a sequence of arguments, or a mapping of keywords, with the
    sizes of one micro-batch. Modules run as in training, with dropout.

    ``loss`` is a function of the module's output. Without it the backward pass starts from ``output.loss``, or else
    from gradients of all outputs. ``dtype`` is the type of weights and inputs, such as ``bf16``: the module's own. The
    children of the list of modules named ``layers`` are what pipelines split: the list with most weights. ``tp_plan``
    says how tensor parallelism splits modules, by patterns of their names: a Hugging Face model's own. ``seq`` is the
    number of tokens of a sample: the second size of integer inputs, else 1. ``adapters`` freezes all weights and puts
    thin trained matrices beside linear layers, as peft does: ``{"rank": 16, "targets": ["q_proj", "v_proj"]}``. It has
    ``dtype`` and ``dropout`` too. ``compile``: each layer runs as ``torch.compile`` makes it, forward and backward; it
    cannot be split over ranks. ``values`` are those of example inputs that are on no device.

    Raises `InputError` where PyTorch is missing or, with ``compile``, of another version than 2.13, or the module
    cannot run on tensors without data.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise InputError("is no torch.nn.Module", key="module", found=type(module).__name__)
    if compile and adapters is not None:
        raise InputError("are not put beside compiled layers", key="adapters", fix="wrap the module by peft")
    kind = _type(torch, dtype)
    choice = None if adapters is None else AdapterChoice.from_mapping(adapters)
    values = KnownValues() if values is None else values
    inputs = _inputs(torch, *_arguments(example_inputs), kind, values)
    recorded = _recorded_inputs(torch, inputs)
    recording = partial(_recording, module, kind, choice, inputs, loss, values)
    tape, weights = recording(as_it_is)
    tokens = _tokens(tape, recorded, seq)
    if tp_plan:
        check_plan(module, tape, tp_plan)
    places = sections(module, tape, layers)
    plan = tp_plan if tp_plan is not None else getattr(module, "_tp_plan", None)
    rank_shares = shares(module, tape, plan) if choice is None else Shares(reason="adapters are not split over ranks")
    parts = Parts(tape, places, rank_shares, weights)
    if compile:
        tape, weights = recording(layers_compiled(parts))
        parts = Parts(tape, sections(module, tape, layers), Shares(reason=UNSPLIT), weights)
    return replace(_captured_model(type(module).__name__, parts, recorded, tokens), compiled=compile)


def _recording(
    module: Any,
    kind: Any,
    choice: AdapterChoice | None,
    inputs: tuple[Any, Any],
    loss: Any,
    values: KnownValues,
    running: Running,
) -> tuple[Tape, dict[str, Any]]:
    """Return the tape of ``module`` with its weights of the type ``kind``, and these and its adapters' by name."""
    tensors = _without_data(_torch(), module, kind, frozen=choice is not None)
    thin = {} if choice is None else adapter_weights(module, choice, tensors)
    added = {name: weight for pair in thin.values() for name, weight in pair.items()}
    with beside(module, thin, 0.0 if choice is None else choice.dropout), _in_training(module):
        tape = record(module, {**tensors, **added}, inputs, loss, values, running)
    return tape, {**{name: tensors[name] for name, _ in module.named_parameters()}, **added}


def _captured_model(name: str, builder: Parts, inputs: tuple[CapturedInput, ...], tokens: int) -> CapturedModel:
    """Return the model of a module's parts, and of its inputs with so many tokens in a sample."""
    tape, layers, weights = builder.tape, builder.sections, builder.weights
    parts, places = distinct_parts([builder.part(number) for number in range(layers.behind + 1)])
    chain = chain_of_layers(tape, layers)
    heads, kv_heads = heads_of(parts)
    batch, _ = sample_of(inputs)
    return CapturedModel(
        format=1,
        name=name,
        torch=str(_torch().__version__),
        micro_batch=batch,
        seq=tokens,
        dtype=_main_type(tape, weights),
        hidden=chain.width,
        heads=heads,
        kv_heads=kv_heads,
        vocab=_vocabulary(tape, weights),
        passed_bytes=chain.nbytes,
        one_piece=chain.broken or _tied_inside(parts, places),
        unsplit=builder.shares.reason,
        widest_split=max(builder.shares.divisor, 1),
        parts=parts,
        before=places[0],
        layers=tuple(places[1:-1]),
        after=places[-1],
        inputs=inputs,
        layer_list=layers.layer_list,
    )


def capture_made(make: Callable[[], Any], named: str, options: Mapping[str, Any]) -> CapturedModel:
    """Return the model that a function makes, which runs with no device.

    It returns a module with example inputs, or a mapping of what `capture` takes, beside which ``options`` stand.
    Raises `InputError` that names the function as ``named``.
    """
    _torch()
    if options.get("adapters") is not None:
        AdapterChoice.from_mapping(options["adapters"])
    with without_device() as values:
        answer = _answer(make, named)
    if isinstance(answer, tuple) and len(answer) == 2:
        answer = {"module": answer[0], "example_inputs": answer[1]}
    if not isinstance(answer, Mapping):
        raise InputError(
            "returns neither a module with example inputs nor a mapping", file=named, found=type(answer).__name__
        )
    words = {**answer, **options}
    try:
        signature(capture).bind(**words, values=values)
    except TypeError as error:
        raise InputError(f"returns what capture does not take: {error}", file=named) from None
    return capture(**words, values=values)


def _answer(make: Callable[[], Any], named: str) -> Any:
    """Return what the user's function returns. Raises `InputError` with the line at which it failed."""
    try:
        return make()
    except Exception as error:  # whatever a user's own code raises
        last = extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"failed: {type(error).__name__}: {error}", file=named, found=f"line {last.lineno} of {last.filename}"
        ) from error


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise InputError("needs PyTorch, which is not installed", key="capture", fix=install_extra("capture")) from None
    return torch


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keywords that ``example_inputs`` mean."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, list | tuple):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _type(torch: Any, dtype: str | None) -> Any:
    if dtype is None:
        return None
    names = {name: getattr(torch, kind) for kind, name in DTYPES.items()}
    if dtype not in names:
        raise InputError("is no type of weights here", key="dtype", found=dtype, allowed=", ".join(names))
    return names[dtype]


def _without_data(torch: Any, module: Any, kind: Any, *, frozen: bool) -> dict[str, Any]:
    """Return the parameters and buffers of ``module`` by name as tensors without data, ``frozen`` without gradients."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: _like(torch, tensor, kind) for name, tensor in named.items()}
    return {name: one.requires_grad_(False) for name, one in tensors.items()} if frozen else tensors


def _like(torch: Any, tensor: Any, kind: Any) -> Any:
    """Return a tensor like ``tensor`` without data, floating ones of the type ``kind``."""
    chosen = kind if kind is not None and tensor.is_floating_point() else tensor.dtype
    sizes = tuple(tensor.shape), tuple(tensor.stride())
    return torch.empty_strided(*sizes, dtype=chosen, device="meta", requires_grad=tensor.requires_grad)


def _inputs(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: Any, values: KnownValues) -> Any:
    """Return the arguments and keywords as tensors without data. ``values`` then has what they held."""
    from torch.utils._pytree import tree_map_only

    def without_data(tensor: Any) -> Any:
        empty = _like(torch, tensor, kind)
        value = values.value_of(tensor)
        if value is not None and not tensor.is_floating_point():
            values.set(empty, value)
        return empty

    return tree_map_only(torch.Tensor, without_data, (args, kwargs))


@contextmanager
def _in_training(module: Any) -> Iterator[None]:
    """Have ``module`` in training mode while the context lasts, and leave it in its own."""
    modes = [(one, one.training) for one in module.modules()]
    module.train()
    try:
        yield
    finally:
        for one, training in modes:
            one.training = training


def _main_type(tape: Tape, weights: Mapping[str, Any]) -> CapturedType:
    """Return the type that most elements of the weights have that are read.

    Raises `InputError` of types that are not simulated.
    """
    elements: Counter[CapturedType] = Counter()
    read = {tape.weights.get(use.storage) for entry in tape.entries for use in entry.inputs}
    for name, weight in weights.items():
        if name not in read:
            continue
        kind = str(weight.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise InputError("weights of this type are not simulated", key=name, found=kind, allowed=", ".join(DTYPES))
        elements[DTYPES[kind]] += weight.numel()
    return elements.most_common(1)[0][0]


def _recorded_inputs(torch: Any, inputs: Any) -> tuple[CapturedInput, ...]:
    """Return the inputs that have a batch dimension. Raises `InputError` where there are none, or one is empty."""
    from torch.utils._pytree import tree_leaves

    tensors = [one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor) and one.dim()]
    if not tensors:
        raise InputError("have no tensor with a batch dimension", key="example_inputs")
    for one in tensors:
        if not one.numel():
            raise InputError("have a tensor without elements", key="example_inputs", found=tuple(one.shape))
    return tuple(
        CapturedInput(shape=tuple(one.shape), tokens=not one.is_floating_point() and one.dim() == 2) for one in tensors
    )


def _tokens(tape: Tape, inputs: Sequence[CapturedInput], asked: int | None) -> int:
    """Return the tokens of a sample. Raises `InputError` where ``asked`` is a number that the module does not have."""
    _, tokens = sample_of(inputs)
    if asked is None or asked == tokens:
        return tokens
    if any(one.tokens for one in inputs):
        raise InputError(
            "is another than of the example inputs, which say how long sequences are",
            key="seq",
            found=asked,
            allowed=str(tokens),
        )
    forward = (entry for entry in tape.entries if not entry.backward)
    sizes = {size for entry in forward for use in entry.outputs if use is not None for size in use.shape}
    if isinstance(asked, bool) or asked not in sizes:
        near = ", ".join(map(str, sorted(sizes - {1})[:12]))
        raise InputError("is no size of a tensor of the forward pass", key="seq", found=asked, allowed=f"1, or {near}")
    return asked


def _vocabulary(tape: Tape, weights: Mapping[str, Any]) -> int:
    """Return the rows of the largest embedding; 1 without any."""
    names = (
        tape.weights.get(use.storage) for entry in tape.entries if entry.name == "embedding" for use in entry.inputs
    )
    rows = [weights[name].shape[0] for name in names if name is not None and name in weights]
    return max(rows, default=1)


def _tied_inside(parts: Sequence[CapturedPart], places: Sequence[int]) -> str:
    """Return why layers cannot be split over a pipeline where weights are shared but for one by both ends."""
    first = {weight.name for node in parts[places[0]].nodes for weight in node.weights}
    ends = [weight.tied_to for node in parts[places[-1]].nodes for weight in node.weights if weight.tied_to]
    layers = [
        weight.tied_to
        for place in places[1:-1]
        for node in parts[place].nodes
        for weight in node.weights
        if weight.tied_to
    ]
    shared = [*layers, *(name for name in ends if name not in first), *ends[1:]]
    return f"its parts share the weight {shared[0]}" if shared else ""

"""``capture``: a PyTorch module as the file of a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from simulator.cli.options import Quiet
from simulator.cli.outputs import check_outputs
from simulator.cli.terminal import say
from simulator.errors import InputError
from simulator.units import counted

Maker = Annotated[
    str,
    typer.Argument(metavar="MODULE:FUNCTION", help="A Python function that returns a module and its example inputs."),
]
Out = Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the captured model (.json).")]
WeightType = Annotated[
    str | None, typer.Option("--dtype", metavar="TYPE", help="bf16, fp16 or fp32 [the module's own].")
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="NAME", help="The list of modules that pipelines split [that with most weights]."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--seq", metavar="TOKENS", help="Tokens of a sample [the second size of integer inputs, or 1]."),
]
ThinMatrices = Annotated[
    str | None,
    typer.Option(
        "--adapters",
        metavar="RANK:NAME,...",
        help="Freeze all weights and put LoRA's matrices beside linear layers, such as 16:q_proj,v_proj or "
        "16:all-linear.",
    ),
]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Record each layer as torch.compile runs it: Inductor says its kernels.")
]


def command(
    maker: Maker,
    out: Out,
    dtype: WeightType = None,
    layers: Layers = None,
    seq: Tokens = None,
    adapters: ThinMatrices = None,
    compile: Compiled = False,
    quiet: Quiet = False,
) -> None:
    """Record a PyTorch module as a model that plays.

    FUNCTION takes no arguments. It returns the module and example inputs of one micro-batch, or a mapping of what
    `simulator.capture` takes. It runs with no device, so that its weights take no memory. A workload file then says
    `model: {captured: FILE}`. PyTorch is in the extra `capture`.

    \b
    Examples:
      llmsim capture my_model:job --dtype bf16 --out my_model.json
      llmsim capture my_model:job --adapters 16:q_proj,v_proj --out my_lora.json
      llmsim capture my_model:job --dtype bf16 --compile --out my_compiled.json
    """
    from simulator.capturing.entry import capture_made
    from simulator.quantities import read_length

    check_outputs({"--out": out}, {"--out": (".json",)})
    thin = None if adapters is None else _adapters(adapters)
    chosen = (
        ("dtype", dtype),
        ("layers", layers),
        ("seq", None if seq is None else read_length(seq, "--seq")),
        ("adapters", thin),
        ("compile", compile or None),
    )
    captured = capture_made(_function(maker), maker, {key: value for key, value in chosen if value is not None})
    captured.save(out)
    if not quiet:
        distinct = len(set(captured.layers))
        trained = captured.trained_parameters
        frozen = f", {trained:,} trained" if trained < captured.parameters else ""
        chosen_list = f"; the list {captured.layer_list}" if captured.layer_list else ""
        say(f"{captured.name}: {captured.parameters:,} parameters in {captured.dtype}{frozen}")
        compiled = ", compiled" if captured.compiled else ""
        say(f"  layers        {len(captured.layers):,}, of {counted(distinct, 'kind')}{compiled}{chosen_list}")
        say(f"  micro-batch   {captured.micro_batch:,} x {captured.seq:,} tokens")
        say(f"  tensor par.   {captured.unsplit or f'up to {captured.widest_split} ranks'}")
        say(f"  pipeline      {captured.one_piece or 'splits between layers'}")
        say(f"written: {out}; a workload names it by  model: {{captured: {out}}}")


def _adapters(text: str) -> dict[str, Any]:
    """Return what an option such as ``16:q_proj,v_proj`` says. Raises `InputError`.

    >>> _adapters("16:q_proj,v_proj")
    {'rank': 16, 'targets': ['q_proj', 'v_proj']}
    """
    rank, colon, names = text.partition(":")
    if not colon or not rank.strip().isdecimal():
        raise InputError("is no RANK:NAME,...", file="--adapters", found=text, allowed="such as 16:q_proj,v_proj")
    return {"rank": int(rank), "targets": [name.strip() for name in names.split(",")]}


def _function(maker: str) -> Callable[[], Any]:
    """Return the function that MODULE:FUNCTION names, modules of the current directory among them."""
    name, colon, attribute = maker.partition(":")
    if not colon or not name or not attribute:
        raise InputError("is no MODULE:FUNCTION", file="capture", found=maker, allowed="such as my_model:job")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"cannot be imported: {error}", file="capture", found=name) from None
    finally:
        sys.path.pop(0)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError("has no such function", file=name, found=attribute)
    maker_function: Callable[[], Any] = function
    return maker_function

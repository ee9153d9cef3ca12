"""``check``: is a workload legal, and what do its defaults come to?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from simulator.cli.options import Json, Quiet, Set, options_named
from simulator.cli.outputs import STDOUT, check_outputs, shows_summary, write_json
from simulator.cli.terminal import say, warn
from simulator.errors import InputError
from simulator.units import counted, format_encoder, format_parameters

#: Groups of an axis, and ranks of a group, on the terminal; the JSON has all.
_SHOWN_GROUPS, _SHOWN_RANKS = 3, 16

if TYPE_CHECKING:
    from simulator.config import Workload
    from simulator.config.model import Model


def command(
    workload: Annotated[str | None, typer.Argument(metavar="WORKLOAD", help="A file, or a name in workloads/.")] = None,
    set_: Set = None,
    json: Json = None,
    schema: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Print the JSON Schema of a workload, a cluster or a run's result instead."),
    ] = None,
    groups: Annotated[
        bool, typer.Option("--groups", help="Print the groups of ranks that communicate, and their members.")
    ] = False,
    quiet: Quiet = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on any warning.")] = False,
) -> None:
    """Check a workload without simulating it.

    Sizes of the model and of the layout are printed. --json writes the whole workload with every default filled in.
    With --groups it has all members of all groups too.

    \b
    Examples:
      llmsim check gpt175b_3d --set parallelism.pp=16
      llmsim check llama3_70b --groups
      llmsim check --schema workload > workload.schema.json
    """
    if schema is not None:
        check_outputs({"--json": json})
        if workload or set_:
            raise InputError("checks no workload", file="--schema", fix="leave WORKLOAD and --set out")
        from simulator.commands.schema import schema_of

        with options_named(kind="--schema"):
            content = schema_of(schema)
        write_json(STDOUT, content)
        return
    if not workload:
        raise InputError("is missing", file="WORKLOAD", allowed="a file, a name in workloads/, or --schema")

    from simulator.commands.check import check
    from simulator.config import load_workload, parse_changes
    from simulator.config.loading import written_in
    from simulator.errors import located

    changes = parse_changes(set_ or ())
    job = load_workload(workload, changes)
    check_outputs({"--json": json})
    with located(written_in(workload, changes)):
        result = check(job)
    members = result.groups if groups else {}
    write_json(json, {**result.report, **({"groups": members} if groups else {})})
    if shows_summary(json, quiet):
        _say_sizes(job, result.params_total, result.params_active)
        for axis, axis_groups in members.items():
            say(f"  {axis:<13} {_described(axis, axis_groups)}")
    warn(result.warnings)
    if strict and result.warnings:
        raise typer.Exit(1)


def _say_sizes(job: Workload, total: int, active: int) -> None:
    """Print the sizes of a job: of its model, with ``total`` and ``active`` parameters, and of its layout."""
    layout, cluster = job.parallelism, job.cluster
    say(f"{job.name}: legal")
    say(f"  model         {format_parameters(total, active)}, {', '.join(_traits(job.model))}")
    if job.model.mtp_layers or job.model.padded_vocab(layout.tp) != job.model.vocab:
        say("                parameters without padding of the vocabulary and layers for multi-token prediction")
    context = f" x cp {layout.cp}" if layout.cp > 1 else ""
    folded = f", experts over ep {layout.ep} x etp {layout.etp}" if job.model.moe else ""
    say(f"  ranks         {job.n_ranks} = tp {layout.tp}{context} x pp {layout.pp} x dp {layout.dp}{folded}")
    types = ", ".join(cluster.gpu_types)
    say(f"  cluster       {cluster.n_nodes} x {cluster.name}: {counted(cluster.n_gpus, 'GPU')}, {types}")
    say(f"  calibration   {', '.join(job.calibrations.values())}" + (f", stack {job.stack}" if job.stack else ""))
    if recipe := job.training.product_recipe:
        from simulator.precisions import in_words

        first, *more = in_words(recipe, job.training.fp8.gather if job.training.fp8 else "")
        say(f"  {recipe.bits} bits        {recipe.name}: {first}")
        for line in more:
            say(f"                {line}")
    say(f"  micro-batches {job.microbatches} of {job.training.micro_batch} x {job.training.seq} tokens")
    say(f"  stages        {_runs(layout.layers_per_stage)} layers")


def _described(axis: str, groups: list[list[int]]) -> str:
    """Return a line that says how many groups an axis has, why, and who is in the first ones."""
    from simulator.program.vocabulary import AXES, Axis

    facts = AXES[Axis(axis.rstrip("0123456789"))]
    shown = "; ".join(_members(members) for members in groups[:_SHOWN_GROUPS])
    more = f"; {len(groups) - _SHOWN_GROUPS:,} more" if len(groups) > _SHOWN_GROUPS else ""
    size = counted(len(groups), "group") + f" of {len(groups[0]):,}"
    return f"{size}, {facts.members}: {shown}{more}"


def _members(ranks: list[int]) -> str:
    """
    >>> _members([4, 5, 6, 7]), _members([0, 8, 16, 24]), _members([0, 3]), _members([0, 1, 8])
    ('4-7', '0-24 by 8', '0, 3', '0, 1, 8')
    """
    step = ranks[1] - ranks[0]
    if len(ranks) > 2 and step > 0 and ranks == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    return ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (" ..." if len(ranks) > _SHOWN_RANKS else "")


def _traits(model: Model) -> Iterator[str]:
    """Yield the model's sizes and options. Defaults are among them: not everyone who leaves a key out means GPT's."""
    yield f"{model.layers:,} layers"
    yield f"hidden {model.hidden:,}"
    yield f"{model.heads:,} heads" + (
        f" ({model.kv_heads:,} of keys and values)" if model.kv_heads != model.heads else ""
    )
    if model.moe is not None:
        yield f"{model.moe.experts:,} experts (top {model.moe.top_k:,})"
    if model.mla is not None:
        yield "latent attention"
    if encoder := model.encoder:
        yield format_encoder(encoder.layers, encoder.images, encoder.patches_per_image)
    if model.captured_model:
        compiled = ", compiled" if model.captured_model.compiled else ""
        yield f"captured from {model.captured_model.name} of PyTorch {model.captured_model.torch}{compiled}"
        return
    counts = Counter(model.mixer(layer).name for layer in range(model.layers))
    if set(counts) != {"attention"}:
        yield "mixers " + ", ".join(f"{name} {count:,}" for name, count in counts.items())
    yield from (model.activation, model.norm)
    if model.position != "none":
        yield {"learned": "learned positions"}.get(model.position, model.position)
    if model.bias:
        yield "biases"
    if model.tied_embeddings:
        yield "tied embeddings"


def _runs(numbers: tuple[int, ...]) -> str:
    """
    >>> _runs((2, 4, 4, 2))
    '1 of 2, 2 of 4, 1 of 2'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][0] += 1
        else:
            runs.append([1, number])
    return ", ".join(f"{count} of {number}" for count, number in runs)

"""Context parallelism, and what a sequence is split into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.rules.numbers import divisors, listed, nearest, nearest_multiple
from simulator.config.rules.scale import fills_cluster
from simulator.config.rules.tensor import other_tp, sequence_unit
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Sequences that do not split, and attention that cannot be spread over cp ranks."""
    layout = workload.parallelism
    if layout.cp_layout == "contiguous" and layout.cp_method != "ring":
        yield InputError(
            f"{layout.cp_method} gives every rank whole sequences to attend to",
            key="parallelism.cp_layout",
            found=layout.cp_layout,
            allowed="zigzag (the default, without meaning here), or cp_method: ring",
        )
    yield from _sequence_does_not_split(workload)
    if layout.cp > 1:
        yield from _ring_problems(workload) if layout.cp_method == "ring" else _ulysses_problems(workload)


def _sequence_does_not_split(workload: Workload) -> Iterator[InputError]:
    layout, seq = workload.parallelism, workload.training.seq
    unit = sequence_unit(layout)
    if seq % unit == 0 or workload.model.heads % layout.tp:  # another tp will mend that
        return
    instead = f"seq: {nearest_multiple(seq, unit)}"
    works = [
        cp
        for cp in divisors(seq)[1:]
        if seq % sequence_unit(layout.model_copy(update={"cp": cp})) == 0 and fills_cluster(workload, cp=cp)
    ]
    if layout.cp > 1 and works:
        instead = f"cp: {nearest(layout.cp, works)}"
    elif layout.tp > 1 and (tp := other_tp(workload)) > 1:
        instead = f"tp: {tp}"
    split = [f"context parallelism over cp {layout.cp}"] if layout.cp > 1 else []
    split += [f"sequence parallelism over tp {layout.tp}"] if layout.sequence_parallel else []
    other = "sequence_parallel: false" if layout.cp == 1 else "a smaller cp"
    yield InputError(
        f"{' and '.join(split)} splits it into pieces of 1/{unit}, which is no whole number of tokens",
        key="training.seq",
        found=seq,
        allowed=f"a multiple of {unit}, or {other}",
        fix=instead,
    )


def _ring_problems(workload: Workload) -> Iterator[InputError]:
    """The partial results of a ring are merged by their log-sum-exp, which flash attention gives; TransformerEngine's
    ring and PyTorch's know no window."""
    model, seq = workload.model, workload.training.seq
    seen = [model.keys_seen(layer, seq) for layer in range(model.layers)]
    if model.attention != "flash":
        yield InputError(
            "ring attention merges the results of flash attention",
            key="model.attention",
            found=model.attention,
            allowed="flash, or cp_method: ulysses",
            fix="attention: flash",
        )
    bounds = (
        ("sliding_window", "windows", max(one.window for one in seen)),
        ("attention_chunk", "pieces", max(one.chunk for one in seen)),
    )
    for key, what, length in bounds:
        if length and (key != "sliding_window" or model.sliding_window):
            yield InputError(
                f"a ring does not know {what}: {length} is shorter than the sequence of {seq}",
                key=f"model.{key}",
                found=length,
                allowed=f">= {seq}, or cp_method: ulysses",
                fix="cp_method: ulysses",
            )


def _ulysses_problems(workload: Workload) -> Iterator[InputError]:
    model, layout = workload.model, workload.parallelism
    if model.heads % layout.tp:  # said elsewhere
        return
    heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    allowed = [cp for cp in divisors(heads) if kv_heads % cp == 0 or cp % kv_heads == 0]
    if layout.cp not in allowed:
        each = "" if layout.tp == 1 else f" of each of tp {layout.tp}"
        yield InputError(
            f"ulysses gives each rank whole heads: {heads} query and {kv_heads} KV heads{each} do not split over it",
            key="parallelism.cp",
            found=layout.cp,
            allowed=listed(allowed),
            fix=_cp_or_ring(workload, allowed),
        )


def _cp_or_ring(workload: Workload, allowed: list[int]) -> str:
    """Return the change of cp, where one of ``allowed`` leaves no GPU over, and the other method."""
    sizes = [cp for cp in allowed if fills_cluster(workload, cp=cp)]
    other = [f"cp: {nearest(workload.parallelism.cp, sizes)}"] if sizes else []
    return ", or ".join([*other, "cp_method: ring"])

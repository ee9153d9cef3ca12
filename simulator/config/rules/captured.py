"""Captured models: what they were recorded with, and what cannot be changed of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.config.section import Section
from simulator.errors import InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.captured import CapturedModel
    from simulator.config.workload import Workload

#: Dotted keys that would change operations -> the values that leave these as they were recorded.
UNCHANGED: dict[str, tuple[object, ...]] = {
    "training.fp8": (None,),
    "training.fp4": (None,),
    "training.adapters": (None,),
    "training.freeze": (None,),
    "training.base": (None,),
    "training.fused_rms_norm": (True,),
    "training.gradient_accumulation_fusion": (False,),
    "parallelism.cp": (1,),
    "parallelism.ep": (1,),
    "parallelism.sequence_parallel": (False,),
    "parallelism.scatter_gather_p2p": (False,),
    "parallelism.overlap.tp": (False,),
    "parallelism.vocab_parallel": (True,),
    "framework.version": (None,),
}
#: Key -> how to capture the model with what it asks for.
_CAPTURED_SO = {
    "training.adapters": "capture it so: llmsim capture ... --adapters RANK:NAMES",
    "training.fp8": "convert its layers by torchao.float8, and capture it so: llmsim capture ... --compile",
}


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield keys that ask for something else than what was recorded, and layouts that cannot split it."""
    captured = workload.model.captured_model
    if captured is None:
        return
    training = workload.training
    for name, value in captured.recorded.items():
        if (asked := getattr(training, name)) != value:
            yield InputError(
                "the captured model was recorded otherwise; capture it again for another",
                key=f"training.{name}",
                found=asked,
                allowed=str(value),
            )
    if workload.software.compiles != captured.compiled:
        yield InputError(
            "the captured model was recorded otherwise; capture it again for another",
            key="framework.compile",
            found=brief(workload.software.compiles),
            allowed=brief(captured.compiled),
            fix=None if captured.compiled else "capture it so: llmsim capture ... --compile",
        )
    yield from _changes(workload)
    yield from _splits(workload, captured)


def layout_problems(workload: Workload) -> Iterator[InputError]:
    """Yield autocast, which would cast what was recorded."""
    captured = workload.model.captured_model
    if captured is not None and workload.software.autocasts(workload.traits):
        yield InputError(
            f"the captured weights are in {captured.dtype}, and autocast would keep them in fp32",
            key="training.optimizer.master_weights",
            found=brief(True),
            allowed="false",
        )


def _changes(workload: Workload) -> Iterator[InputError]:
    """Yield keys that would change operations that are recorded."""
    for key, allowed in UNCHANGED.items():
        value: object = workload
        for name in key.split("."):
            value = getattr(value, name)
        if value not in allowed:
            yield InputError(
                "changes operations, and those of a captured model are as they were recorded",
                key=key,
                found=brief(value.model_dump(exclude_unset=True) if isinstance(value, Section) else value),
                allowed=brief(allowed[0]) or "null",
                fix=_CAPTURED_SO.get(key),
            )
    training = workload.training
    if training.recompute.granularity not in ("none", "full"):
        yield InputError(
            "a captured model keeps all that it has recorded, or the inputs of layers alone",
            key="training.recompute.granularity",
            found=training.recompute.granularity,
            allowed="none, full",
        )
    if training.loss.model_fields_set:
        yield InputError(
            "the loss of a captured model is what was recorded: capture(..., loss=...)",
            key="training.loss",
            found=training.loss.name,
            allowed="to be left out",
        )


def _splits(workload: Workload, captured: CapturedModel) -> Iterator[InputError]:
    """Yield layouts that the captured operations do not allow."""
    layout = workload.parallelism
    if layout.tp > 1 and captured.unsplit:
        yield InputError(
            f"{captured.name} cannot be split: {captured.unsplit}", key="parallelism.tp", found=layout.tp, allowed="1"
        )
    elif captured.widest_split % layout.tp and layout.tp > 1:
        yield InputError(
            f"the split sizes of {captured.name} do not divide by it",
            key="parallelism.tp",
            found=layout.tp,
            allowed=f"a divisor of {captured.widest_split}",
        )
    if layout.pp * layout.vpp > 1 and captured.one_piece:
        yield InputError(
            f"the layers of {captured.name} are no chain: {captured.one_piece}",
            key="parallelism.pp",
            found=layout.pp,
            allowed="1",
        )
    distinct = len(set(captured.layers)) > 1
    if workload.model.layers != len(captured.layers) and distinct:
        yield InputError(
            f"the {len(captured.layers)} layers of {captured.name} are of several kinds, so that no more can follow",
            key="model.layers",
            found=workload.model.layers,
            allowed=str(len(captured.layers)),
        )

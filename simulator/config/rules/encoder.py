"""Encoders of images: sizes that do not divide, and layouts that have no place for one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulator.errors import Bare, InputError
from simulator.input_files import brief

if TYPE_CHECKING:
    from simulator.config.encoder import Encoder
    from simulator.config.workload import Workload


def problems(workload: Workload) -> Iterator[InputError]:
    """Yield sizes of an encoder that are wrong, and layouts that have no place for one."""
    encoder = workload.model.encoder
    if encoder is None:
        return
    yield from _size_problems(encoder)
    tokens = encoder.images * encoder.tokens
    if tokens > workload.training.seq:
        yield InputError(
            f"{tokens:,} tokens of images are more than a sequence has",
            key="training.seq",
            found=workload.training.seq,
            allowed=f">= {tokens:,}, or less model.encoder.images or patches_per_image",
        )
    layout, training = workload.parallelism, workload.training
    for key in ("heads", "ffn_hidden"):
        if getattr(encoder, key) % layout.tp:
            yield InputError(
                f"does not divide model.encoder.{key} {getattr(encoder, key)}",
                key="parallelism.tp",
                found=layout.tp,
                allowed=f"a divisor of {math.gcd(encoder.heads, encoder.ffn_hidden)}",
            )
            break
    if layout.cp > 1:
        yield InputError(
            "images are not spread over context-parallel ranks", key="parallelism.cp", found=layout.cp, allowed="1"
        )
    for key, present in (("adapters", training.adapters is not None), ("freeze", bool(training.freeze))):
        if present:
            yield InputError(
                "is not simulated beside an encoder: both models are trained whole, or the text model is by itself",
                key=f"training.{key}",
                found=Bare("given"),
                allowed="left out, or no model.encoder",
                fix="encoder: null",
            )


def _size_problems(encoder: Encoder) -> Iterator[InputError]:
    """Yield sizes of an encoder that do not fit each other."""
    for divisor, divided in (("heads", "hidden"), ("patches_per_token", "patches_per_image")):
        part, whole = getattr(encoder, divisor), getattr(encoder, divided)
        if whole % part:
            yield InputError(
                f"does not divide {divided} {whole}",
                key=f"model.encoder.{divisor}",
                found=part,
                allowed=f"a divisor of {whole}",
            )
    if encoder.window is not None and encoder.window > encoder.rows:
        yield InputError(
            "is more than an image has",
            key="model.encoder.window",
            found=encoder.window,
            allowed=f"at most {encoder.rows}",
        )
    if encoder.global_layers and encoder.window is None:
        yield InputError(
            "all layers see whole images without a window",
            key="model.encoder.global_layers",
            found=brief(list(encoder.global_layers)),
            allowed="left out, or beside window",
        )
    if beyond := [layer for layer in encoder.global_layers if layer >= encoder.layers]:
        yield InputError(
            f"the encoder has no layer {beyond[0]}",
            key="model.encoder.global_layers",
            found=brief(list(encoder.global_layers)),
            allowed=f"numbers from 0 to {encoder.layers - 1}",
        )

"""Optimizers: the kernels of an update, the states that it keeps, by the library that runs it. A new one is a file with
an `UpdateRule`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.optimizers import adafactor, adam, adamw_8bit, lion, muon, sgd
from simulator.optimizers.update import Implementation, Kernels, UpdatedTensor, UpdateRule, UpdateTypes

#: By name, the default first.
OPTIMIZERS: Mapping[str, UpdateRule] = {
    optimizer.name: optimizer
    for optimizer in (
        adam.ADAMW,
        adam.ADAM,
        adamw_8bit.OPTIMIZER,
        adafactor.OPTIMIZER,
        lion.OPTIMIZER,
        lion.IN_8_BITS,
        muon.OPTIMIZER,
        sgd.PLAIN_SGD,
        sgd.MOMENTUM_SGD,
    )
}

__all__ = ["OPTIMIZERS", "Implementation", "Kernels", "UpdateRule", "UpdateTypes", "UpdatedTensor"]

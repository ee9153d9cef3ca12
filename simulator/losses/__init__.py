"""Ways to compute the cross-entropy. A new one is a file with a `Loss`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.losses import chunked, compiled, eager, fused, fused_linear, loss_parallel, vocab_parallel
from simulator.losses.loss import Loss, LossOptions

#: By name.
LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        eager.LOSS,
        eager.NARROW,
        compiled.LOSS,
        chunked.LOSS,
        fused.LOSS,
        fused.IN_PLACE,
        fused_linear.LOSS,
        vocab_parallel.LOSS,
        loss_parallel.LOSS,
    )
}

__all__ = ["LOSSES", "Loss", "LossOptions"]

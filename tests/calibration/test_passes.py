"""A clock tells the seconds of backward passes, and leaves PyTorch as it was."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from calibration.train.passes import BackwardClock  # noqa: E402

PAUSE_S = 0.02


class _Slow(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """Doubles; its gradient takes `PAUSE_S`, and calls autograd once more inside."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        time.sleep(PAUSE_S)
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True)
            (3 * inner).sum().backward()
        return 2 * grad


def test_backward_passes_are_timed_and_forward_ones_are_not() -> None:
    """Two passes have a pause each. One in the forward pass, and one behind the clock, do not count."""
    x = torch.ones(2, requires_grad=True)
    with BackwardClock() as clock:
        for _ in range(2):
            loss = _Slow.apply(x).sum()
            time.sleep(5 * PAUSE_S)
            loss.backward()
    told = clock.seconds
    assert 2 * PAUSE_S <= told < 7 * PAUSE_S
    _Slow.apply(x).sum().backward()
    assert clock.seconds == told


def test_an_error_in_a_pass_leaves_pytorch_as_it_was() -> None:
    before = torch.autograd._engine_run_backward
    with pytest.raises(RuntimeError), BackwardClock():
        torch.ones(1).sum().backward()
    assert torch.autograd._engine_run_backward is before

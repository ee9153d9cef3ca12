"""The picture of memory: its layers add up to the peak that is reported, below the GPU's capacity."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.analysis.holdings import Holdings
from simulator.analysis.memory import memory_of_ranks
from simulator.model import StateBytes
from simulator.output.gantt import save_gantt
from simulator.output.memory_plot import memory_plot
from simulator.units import GiB
from tests.timelines import pipeline


def test_layers_add_up_to_the_peak(tmp_path: Path) -> None:
    """Stage 0 of 4 holds four micro-batches of 1 GiB beside 19 GiB of state."""
    play = pipeline("1f1b", 4, 8, activation=GiB)
    state = StateBytes(weights=2 * GiB, gradients=5 * GiB, optimizer=12 * GiB)
    memories = memory_of_ranks(play, dict.fromkeys(range(4), Holdings(state)))
    figure = memory_plot(play, memories, 40 * GiB, title="tiny")
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "tiny: rank 0, stage 0"
    names = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert names == ["workspace", "activations", "buffers", "optimizer", "gradients", "weights"]
    tops = [layer.get_paths()[0].vertices[:, 1].max() for layer in axes.collections]
    context = memories[0].holdings.overhead / GiB
    assert tops == pytest.approx([2, 7, 19, 19 + context, 23 + context, 23 + context])
    assert tops[-1] == pytest.approx(memories[0].total / GiB)
    save_gantt(figure, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")

"""The picture of memory: its layers add up to the peak that is reported, below the GPU's capacity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simulator.analysis.time.memory_curve import memory_curve
from simulator.analysis.training.memory import memory_of_ranks
from simulator.analysis.training.memory_contents import activation_bytes
from simulator.analysis.training.static_memory import StaticMemory
from simulator.api import run
from simulator.models import StateBytes
from simulator.output.gantt import save_gantt
from simulator.output.memory_plot import memory_plot
from simulator.units import GiB
from tests.support.timelines import pipeline


def test_layers_add_up_to_the_peak(tmp_path: Path) -> None:
    """Stage 0 of 4 holds four micro-batches of 1 GiB beside 19 GiB of state."""
    play = pipeline("1f1b", 4, 8, activation=GiB)
    state = StateBytes(weights=2 * GiB, gradients=5 * GiB, optimizer=12 * GiB)
    memories = memory_of_ranks(play, dict.fromkeys(range(4), StaticMemory(state)), dict.fromkeys(range(4), 40 * GiB))
    figure = memory_plot(play, memories, title="tiny")
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "tiny: rank 0, stage 0"
    names = [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[union-attr]
    assert names == ["activations", "buffers", "optimizer", "gradients", "weights"]
    tops = [layer.get_paths()[0].vertices[:, 1].max() for layer in axes.collections]
    context = memories[0].static.overhead / GiB
    assert tops == pytest.approx([2, 7, 19, 19 + context, 23 + context])
    assert tops[-1] == pytest.approx(memories[0].total / GiB)
    save_gantt(figure, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_gathered_parameters_are_no_activations() -> None:
    """Zero 3: a layer in 16 bits is whole from the start of its gather; what is left of the peak without them is what
    the report calls activations, workspace apart."""
    layers, hidden = 8, 1024
    work = {
        "model": {"layers": layers, "hidden": hidden, "heads": 8, "vocab": 1024},
        "training": {"seq": 512, "global_batch": 8},
        "parallelism": {"dp": 4, "zero": 3},
        "cluster": "dgx_h100",
    }
    result = run(work)
    axes = result.memory().axes[0]
    names = [str(layer.get_label()) for layer in axes.collections]
    assert names == ["weights", "gradients", "optimizer", "buffers", "gathered", "activations", "workspace"]
    tops = {name: layer.get_paths()[0].vertices for name, layer in zip(names, axes.collections, strict=True)}
    fullest = max(result.memories, key=lambda memory: memory.total)
    gathered = GiB * (tops["gathered"][:, 1].max() - tops["gathered"][:, 1].min())
    assert gathered >= 2 * 12 * hidden**2  # at least one layer, 12 h^2 parameters of 2 bytes
    at = np.argmax(tops["workspace"][:, 1])
    assert tops["workspace"][at, 1] == pytest.approx(fullest.total / GiB)
    curve = memory_curve(result.spans, fullest.rank)
    held = activation_bytes(result.spans, curve, fullest.static)
    peak = int(np.argmax(curve.held_bytes + curve.workspace_bytes))
    assert held[peak] == pytest.approx(fullest.activations)
    assert curve.held_bytes[peak] - held[peak] == pytest.approx(fullest.gathered, rel=1e-6)


def test_gradients_that_steps_make_are_drawn_once() -> None:
    """Plain PyTorch on one GPU: gradients come with the first backward pass and go with the optimizer, so that none are
    there when the step begins, and at the peak the layers add up to the rank's total."""
    work = {
        "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024},
        "training": {"seq": 512, "global_batch": 2, "grad_dtype": "bf16"},
        "framework": "pytorch",
        "cluster": "dgx_h100",
    }
    result = run(work)
    (fullest,) = result.memories
    assert fullest.static.step_gradients > 0 == fullest.static.gradients
    axes = result.memory().axes[0]
    tops = {str(layer.get_label()): layer.get_paths()[0].vertices[:, 1] for layer in axes.collections}
    assert max(top.max() for top in tops.values()) == pytest.approx(fullest.total / GiB)
    assert GiB * (tops["gradients"].max() - tops["gradients"].min()) == pytest.approx(fullest.static.step_gradients)
    assert "gathered" not in tops


def test_a_long_step_is_drawn_again_around_its_peak() -> None:
    """64 micro-batches on 4 stages are too narrow for numbers, 4 are not; both panels have the peak's marker."""
    for microbatches, panels in ((4, 1), (64, 2)):
        play = pipeline("1f1b", 4, microbatches, activation=GiB)
        state = StateBytes(weights=GiB, gradients=GiB, optimizer=GiB)
        memories = memory_of_ranks(
            play, dict.fromkeys(range(4), StaticMemory(state)), dict.fromkeys(range(4), 40 * GiB)
        )
        figure = memory_plot(play, memories, title="tiny")
        assert len(figure.axes) == panels
        peak = max(memories, key=lambda memory: memory.total).peak_at_s
        for axes in figure.axes:
            low, high = axes.get_xlim()
            assert low <= peak <= high
    assert high - low < 0.4 * play.step_time_s

"""Layers of FSDP are named in Gantt charts."""

from __future__ import annotations

import pytest

import simulator
from simulator.output.gantt_boxes import Picture

SHARDED = {"model.layers": 3, "training.recompute": "none", "parallelism.zero": 3}


def texts(result: simulator.StepResult) -> list[str]:
    (axes,) = result.gantt().axes
    return [text.get_text() for text in axes.texts]


def test_boxes_of_a_single_micro_batch_name_their_layer() -> None:
    """Embedding and projection are of the root unit, and no layer; backward passes come to the last layer first."""
    result = simulator.run("llama3_8b_dgx_h100", set={**SHARDED, "training.global_batch": 8})
    boxes = Picture.arrange(result.spans, "").boxes
    order = boxes.start_s.argsort()
    layers = [(str(boxes.phase[box]), int(boxes.layer[box])) for box in order if boxes.layer[box]]
    assert layers == [("F", 1), ("F", 2), ("F", 3), ("B", 3), ("B", 2), ("B", 1)]
    assert sorted(texts(result)) == ["L1", "L1", "L2", "L2", "L3", "L3"]
    assert "L1, L2" in result.gantt().legends[0].get_title().get_text()


@pytest.mark.parametrize("change", [{"training.global_batch": 16}, {"training.global_batch": 8, "parallelism.zero": 1}])
def test_micro_batches_are_numbered_where_there_are_several(change: dict[str, int]) -> None:
    """Without units there are no layers either."""
    result = simulator.run("llama3_8b_dgx_h100", set={**SHARDED, **change})
    assert not any(text.startswith("L") for text in texts(result))
    boxes = Picture.arrange(result.spans, "").boxes
    assert boxes.layer.any() == ("parallelism.zero" not in change)

"""Layers of boxes whose weights are gathered layer by layer (FSDP, ZeRO-3)."""

from __future__ import annotations

import numpy as np

from simulator.arrays import Ints
from simulator.timeline import Timeline

#: Beginning of the label of the gather before a piece of a pass (`simulator.lowering.passes`).
_GATHER = "gather "


def gathered_layers(timeline: Timeline, spans: Ints) -> Ints:
    """Return for each of ``spans`` the layer that it computes, from 1 on in its stage; 0 where it is none.

    A piece of a pass is a layer where a gather is for it alone. Forward passes have them in order, backward passes the
    other way round.
    """
    gathered = {label.removeprefix(_GATHER) for label in timeline.labels if label.startswith(_GATHER)}
    layers = np.zeros(len(spans), dtype=np.int64)
    passes: dict[tuple[int, str], list[int]] = {}
    for place, span in enumerate(spans.tolist()):
        label = timeline.labels[span]
        if label in gathered and timeline.parts[span]:
            passes.setdefault((int(timeline.rank[span]), label.partition(".")[0]), []).append(place)
    for places in passes.values():
        ordered = sorted(places, key=lambda place: (float(timeline.start_s[spans[place]]), place))
        if timeline.phase[spans[ordered[0]]] != "F":
            ordered.reverse()
        labels = list(dict.fromkeys(timeline.labels[spans[place]] for place in ordered))
        for place in ordered:
            layers[place] = labels.index(timeline.labels[spans[place]]) + 1
    return layers

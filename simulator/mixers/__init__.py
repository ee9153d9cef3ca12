"""Ways in which tokens act on each other. A new one is a file with a `Mixer`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.mixers import (
    attention,
    chunked,
    compressed_sparse,
    gated_delta,
    heavily_compressed,
    kimi_delta,
    mamba2,
    no_rope,
    nothing,
    shared_key,
    sparse,
    window,
)
from simulator.mixers.gated_delta import GatedDelta
from simulator.mixers.kimi_delta import KimiDelta
from simulator.mixers.mamba2 import Mamba2
from simulator.mixers.mixer import Mixer, MixerProduct, Operations, Refusal, Split
from simulator.mixers.shared_key import SharedKey
from simulator.mixers.sparse import Indexer

#: By name.
MIXERS: Mapping[str, Mixer] = {
    mixer.name: mixer
    for mixer in (
        attention.MIXER,
        window.MIXER,
        chunked.MIXER,
        no_rope.MIXER,
        sparse.MIXER,
        shared_key.MIXER,
        compressed_sparse.MIXER,
        heavily_compressed.MIXER,
        gated_delta.MIXER,
        kimi_delta.MIXER,
        mamba2.MIXER,
        nothing.MIXER,
    )
}

__all__ = [
    "MIXERS",
    "GatedDelta",
    "Indexer",
    "KimiDelta",
    "Mamba2",
    "Mixer",
    "MixerProduct",
    "Operations",
    "Refusal",
    "SharedKey",
    "Split",
]

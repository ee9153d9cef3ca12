"""Attention to all tokens before (arXiv 1706.03762, section 3.2)."""

from __future__ import annotations

from simulator.mixers.mixer import Attends, Mixer

MIXER = Mixer("attention", "softmax attention to every token before", Attends())

"""Attention to the last tokens alone: a sliding window (Mistral, arXiv 2310.06825, section 2)."""

from __future__ import annotations

from simulator.mixers.mixer import Attends, Mixer

MIXER = Mixer("window", "attention to the last `sliding_window` tokens", Attends(mask="window"))

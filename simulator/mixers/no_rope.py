"""Attention to every token before, without positions (arXiv 2501.18795; every fourth layer of Llama 4 and SmolLM3)."""

from __future__ import annotations

from simulator.mixers.mixer import Attends, Mixer

MIXER = Mixer("no_rope", "attention to every token before, without positions", Attends(rotates=False))

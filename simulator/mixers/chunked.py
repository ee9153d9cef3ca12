"""Attention inside pieces of a sequence, as in most layers of Llama 4 (transformers 5.17, modeling_llama4.py)."""

from __future__ import annotations

from simulator.mixers.mixer import Attends, Mixer

MIXER = Mixer("chunked", "attention inside pieces of `attention_chunk` tokens", Attends(mask="chunk"))

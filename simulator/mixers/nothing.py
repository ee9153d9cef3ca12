"""No mixer: a layer that is an MLP alone, as in Nemotron-H (arXiv 2504.03624, section 2.1)."""

from __future__ import annotations

from simulator.mixers.mixer import Mixer

MIXER = Mixer("none", "no mixer: a layer that is an MLP alone")

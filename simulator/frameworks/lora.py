"""Adapters as modules of Python run them, a kernel per operation: PEFT, torchtune, NeMo.

github.com/huggingface/peft, src/peft/tuners/lora: layer.py, bnb.py.
"""

from __future__ import annotations

from simulator.frameworks.framework import AdapterKernels, Traffic

ADAPTERS = AdapterKernels(
    added=(Traffic(" scale", "activation", 1, 1), Traffic(" add", "residual", 2, 1)),
    added_backward=(Traffic(" scale", "activation", 1, 1),),
    input_summed=Traffic(" input grad", "residual", 2, 1),
)
#: PEFT clones what a product of a 4-bit weight gives (``Linear4bit.forward``).
COPIED = (Traffic(" clone", "copy", 1, 1),)

"""Rotary positions of Megatron-Core where no kernel is fused (``apply_rope_fusion`` false).

github.com/NVIDIA/Megatron-LM, core_v0.19, megatron/core/models/common/embeddings/rope_utils.py.
"""

from __future__ import annotations

from simulator.frameworks.framework import Traffic

#: Kernels that make cosines and sines of angles and cast them, once for queries and once for keys. They are of the size
#: of a row of the table: next to nothing.
TABLES = tuple(
    Traffic(f" {step}", "activation", 0, 0)
    for step in ("cosine", "cosine scale", "cosine cast", "sine", "sine scale", "sine cast")
)
#: ``t * cos + rotate_half(t) * sin``, and the join with the part of a head that is not turned, which is empty
#: (``_apply_rotary_pos_emb_bshd``).
FORWARD = (
    *TABLES,
    Traffic(" cos", "rope", 1, 1),
    Traffic(" negate", "rope", 0.5, 0.5),
    Traffic(" join", "transposed", 1, 1),
    Traffic(" sin", "rope", 1, 1),
    Traffic(" add", "residual", 2, 1),
    Traffic(" whole", "copy", 1, 1),
)
#: Autograd adds zeros for the part that is not turned.
BACKWARD = (
    Traffic(" sin", "rope", 1, 1),
    Traffic(" negate", "rope", 0.5, 0.5),
    Traffic(" join", "transposed", 1, 1),
    Traffic(" cos", "rope", 1, 1),
    Traffic(" add", "rope", 2, 1),
    Traffic(" zero", "zero", 0, 1),
    Traffic(" whole", "residual", 2, 1),
)
ROTATION = (FORWARD, BACKWARD)
#: Latent attention first puts elements with even numbers before those with odd ones (``mla_rotary_interleaved``).
#: Autograd puts the gradient of each half into zeros of the whole size, and adds these.
LATENT_ROTATION = (
    (Traffic(" order", "transposed", 1, 1), *FORWARD),
    (
        *BACKWARD[:-2],
        Traffic(" zero even", "zero", 0, 1),
        Traffic(" even", "rope", 0.5, 0.5),
        Traffic(" zero odd", "zero", 0, 1),
        Traffic(" odd", "rope", 0.5, 0.5),
        Traffic(" order", "residual", 2, 1),
        *BACKWARD[-2:],
    ),
)

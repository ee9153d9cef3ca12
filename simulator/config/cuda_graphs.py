"""Parts of a step that CUDA graphs hold, under the names that Megatron-Core gives them."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class GraphPart(StrEnum):
    """A value of Megatron-Core's ``--cuda-graph-modules``, or of ``--cuda-graph-impl`` where one graph holds all."""

    ATTENTION = "attn"
    MLP = "mlp"
    ROUTER = "moe_router"
    PREPROCESS = "moe_preprocess"
    MAMBA = "mamba"
    WHOLE_STEP = "full_iteration"


#: Parts of layers. `GraphPart.PREPROCESS`, which stands behind the router, counts tokens for experts.
PARTS_OF_LAYERS = tuple(part for part in GraphPart if part is not GraphPart.WHOLE_STEP)


def parts_in_model(mixers: Collection[str], mlps: Collection[str]) -> tuple[GraphPart, ...]:
    """Return the parts that layers with these mixers and MLPs have.

    >>> [str(part) for part in parts_in_model(["mamba2", "none"], ["moe", "none"])]
    ['moe_router', 'moe_preprocess', 'mamba']
    """
    experts = "moe" in mlps
    has = {
        GraphPart.ATTENTION: any(mixer not in ("none", "mamba2") for mixer in mixers),
        GraphPart.MLP: "dense" in mlps,
        GraphPart.ROUTER: experts,
        GraphPart.PREPROCESS: experts,
        GraphPart.MAMBA: "mamba2" in mixers,
    }
    return tuple(part for part in PARTS_OF_LAYERS if has[part])

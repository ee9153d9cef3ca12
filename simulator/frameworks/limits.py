"""Limits of what a framework is simulated with, by keys of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Limit(NamedTuple):
    """Values of a workload's ``key`` that a framework is simulated with, and what to say of others.

    ``where``: dotted keys and their values for which alone this holds. ``each``: a value is one for each layer, of
    which every one must be among the allowed.
    """

    key: str
    allowed: tuple[object, ...]
    message: str
    where: Mapping[str, object] = {}
    each: bool = False

    def allows(self, value: object) -> bool:
        """Return True for a value that the framework is simulated with.

        >>> limit = Limit("model.mixers", ("attention", "window"), "", each=True)
        >>> limit.allows(("window", "attention")), limit.allows(("window", "mamba2")), limit.allows(None)
        (True, False, True)
        """
        if not self.each:
            return value in self.allowed
        return value is None or (isinstance(value, tuple) and set(value) <= set(self.allowed))


def plain_layers(
    whose: str, alike: str = "plain causal attention and a norm before each block, all of one kind"
) -> tuple[Limit, ...]:
    """Return the limits of a framework whose layers were looked at with attention to all tokens before, and a norm
    before each block. The name of the layers is ``whose``; what is simulated of them is said by ``alike``. Experts and
    latent attention have limits of their own.
    """
    usual: dict[str, tuple[object, ...]] = {
        "model.mixers": (None,),
        "model.mlps": (None,),
        "model.norm_place": ("before",),
        "model.qk_norm_kind": ("head",),
        **dict.fromkeys(("model.attention_sinks", "model.attention_gate", "model.value_norm"), (False,)),
        "model.keys_as_values": (False,),
        "model.attention_softcap": (None,),
        "model.logit_softcap": (None,),
        "model.indexer": (None,),
        "model.residual_streams": (1,),
        "model.encoder": (None,),
        "model.layer_inputs": (None,),
        "model.reused_keys": (None,),
        "model.moe.shared_gate": (None, False),
        "model.moe.beside_dense": (None, False),
    }
    message = f"{whose} are simulated with {alike}"
    return tuple(Limit(key, allowed, message) for key, allowed in usual.items())

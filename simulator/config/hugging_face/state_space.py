"""Models with state-space layers: signs of their layers, and the sizes of Mamba 2 under the names that files have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.config.hugging_face.keys import Fields, Keys, shortest

#: Sign of a layer of Nemotron-H and of Megatron-LM's hybrids -> its name (megatron/core/ssm, `Symbols`).
SIGNS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
#: Name of a layer -> its mixer and its MLP: a layer is one of the two.
_PARTS = {
    "mamba": ("mamba2", "none"),
    "linear_attention": ("mamba2", "none"),
    "attention": ("attention", "none"),
    "full_attention": ("attention", "none"),
    "mlp": ("none", "dense"),
    "moe": ("none", "moe"),
}


def single_parts(names: Sequence[str]) -> Fields:
    """Return the keys `mixers` and `mlps` of layers that are a mixer or an MLP alone. Raises `KeyError` on others.

    >>> single_parts(["mamba", "mlp", "mamba", "mlp"])
    {'mixers': ['mamba2', 'none'], 'mlps': ['none', 'dense']}
    """
    kinds, mlps = zip(*(_PARTS[name] for name in names), strict=True)
    return {"mixers": shortest(kinds), "mlps": shortest(mlps)}


@dataclass(frozen=True)
class Mamba2Names:
    """Keys of a config.json for the sizes of Mamba 2, each one or several names.

    ``expand``: of how many times the model's width the heads are together, where the file leaves their width open.
    """

    heads: str
    head_dim: str
    state: str
    biases: tuple[str, ...]
    groups: str = "n_groups"
    conv_width: str = "conv_kernel"
    chunk: str = "chunk_size"
    conv_bias: str = "use_conv_bias"
    expand: str | None = None


NEMOTRON = Mamba2Names(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state="ssm_state_size",
    biases=("use_bias", "mamba_proj_bias"),
)
BAMBA = Mamba2Names(
    heads="mamba_n_heads",
    head_dim="mamba_d_head",
    state="mamba_d_state",
    groups="mamba_n_groups",
    conv_width="mamba_d_conv",
    chunk="mamba_chunk_size",
    conv_bias="mamba_conv_bias",
    biases=("mamba_proj_bias",),
    expand="mamba_expand",
)
MAMBA = Mamba2Names(heads="num_heads", head_dim="head_dim", state="state_size", biases=("use_bias",))


def mamba2_section(keys: Keys, names: Mamba2Names, hidden: int) -> Fields:
    """Return the section `mamba2` of a model so wide; ``names``: of the keys in its file."""
    heads = keys.size(names.heads)
    biases = [keys.flag(name) for name in names.biases]  # each is checked
    if names.expand and keys.get(names.head_dim, default="auto") == "auto":
        width = keys.size(names.expand, default=2) * hidden // heads
    else:
        width = keys.size(names.head_dim)
    return {
        "heads": heads,
        "head_dim": width,
        "state": keys.size(names.state),
        "groups": keys.size(names.groups),
        "conv_width": keys.size(names.conv_width),
        "chunk": keys.size(names.chunk),
        "conv_bias": keys.flag(names.conv_bias, default=True),
        "bias": any(biases),
    }

"""The encoder section of a model: a vision tower in front of the text model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from simulator.bounds import MAX_LAYERS
from simulator.config.section import AsTuple, Integral, Section
from simulator.config.sizes import Number, Size


class Encoder(Section):
    """An encoder of images, whose output takes the place of some tokens of a sequence."""

    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS), Integral]
    """layers of the encoder, all on the first stage"""
    hidden: Size
    """width of its rows"""
    heads: Size
    """heads of its attention, which sees later patches too"""
    ffn_hidden: Size
    """width inside its MLPs"""
    patch_values: Size
    """values of a patch: channels x frames x pixels"""
    patches_per_image: Size
    """patches of an image"""
    images: Size = 1
    """images of a sequence [1]"""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """of its MLPs [gelu]"""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """[layernorm]"""
    position: Literal["rope", "none"] = "none"
    """rotary positions in its attention [none]"""
    learned_positions: Number = 0
    """rows of a table of learned positions [0]"""
    class_token: bool = False
    """one more row of an image, which is learned [false]"""
    bias: bool = True
    """whether linear layers of its layers have biases [true]"""
    patch_bias: bool = False
    """whether the product of patches has one [false]"""
    input_norm: bool = False
    """a norm stands before its first layer [false]"""
    output_norm: bool = False
    """a norm stands behind its last layer [false]"""
    window: Size | None = None
    """patches of a window; in most layers a patch sees its window alone [null: its image]"""
    global_layers: Annotated[tuple[Number, ...], AsTuple] = ()
    """with window, numbers of layers in which a patch sees its image [none]"""
    patches_per_token: Size = 1
    """patches that become one token of the text model [1]"""
    merge_by: Literal["side_by_side", "mean"] = "side_by_side"
    """how they become one row [side_by_side]"""
    merge_norm: bool = False
    """an RMSNorm as wide as a patch stands before that, or of means behind it [false]"""
    projector: Annotated[tuple[Size, ...], AsTuple] = ()
    """widths inside the projection to the text model, with GELU between its products [none: one product]"""
    projector_bias: bool = False
    """whether its products have biases [false]"""

    @property
    def rows(self) -> int:
        """Rows of an image in the encoder."""
        return self.patches_per_image + self.class_token

    @property
    def tokens(self) -> int:
        """Tokens of an image in the text model."""
        return self.patches_per_image // self.patches_per_token

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths from merged patches to the last product of the projection, without the text model's.

        >>> sizes = dict(layers=1, hidden=8, heads=1, ffn_hidden=8, patch_values=4, patches_per_image=16)
        >>> Encoder(patches_per_token=4, projector=[12], **sizes).widths
        (32, 12)
        >>> Encoder(patches_per_token=4, merge_by="mean", **sizes).widths
        (8,)
        """
        return (self.hidden * (self.patches_per_token if self.merge_by == "side_by_side" else 1), *self.projector)

    def sees(self, layer: int) -> int:
        """Return the rows that a row sees in a layer."""
        return self.rows if self.window is None or layer in self.global_layers else self.window

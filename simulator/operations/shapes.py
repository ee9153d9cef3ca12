"""Sizes of one tensor-parallel rank's share of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from simulator.operations.tuning import ALL_TRAINED, Tuning
from simulator.units import DTYPE_BYTES, FP32_BYTES

GATED = ("swiglu", "geglu")


class Seat(NamedTuple):
    """Place of a rank on the axes along which the work of ranks can differ: its positions in its cp and ep groups."""

    cp: int = 0
    ep: int = 0


#: The seat of ranks whose work does not differ.
ANY_SEAT = Seat()


class Turn(NamedTuple):
    """Place of a micro-batch in its step: it may make the first gradients of a stage, or the last."""

    first: bool = False
    last: bool = False


#: The turn of micro-batches in the middle.
ANY_TURN = Turn()


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a rank's share of the tensors, and how its kernels are put together.

    ``tokens`` are those of a micro-batch (b s, or b s / cp with context parallelism); ``rows`` are the tokens that a
    rank's norms, dropouts and residuals work on: all of them, or 1/t with sequence parallelism. ``seq`` is the length
    of whole sequences, ``window`` what of it a query sees, 0 for all; ``cp_rank`` is the rank's place on axis cp, where
    that makes a difference. ``overlaps_tp``: tensor-parallel communication runs beside products.
    ``heads``, ``kv_heads``, ``ffn`` and ``vocab`` are the rank's own; KV heads fewer than tp ranks are replicated, one
    to a rank. Heads of values may have a width of their own.
    ``dtype`` is the working precision, of which an element takes ``element`` bytes.
    ``has_window``: there is a window no longer than a sequence, even one of the same length, which hides nothing.
    ``chunk``: tokens of a piece of a sequence whose queries see no other piece, 0 for all. ``biases``: linear layers
    that have some. ``joined_products``: the model itself joins queries, keys and values, and gate and up, to a product.
    ``qk_norm``: over what queries and keys are normed, empty for not. ``norm_place``: where norms of blocks stand.
    ``sinks``, ``softcap`` and ``gate`` are of attention; ``softcaps_logits``: so are the logits capped.
    ``value_norm``: heads of values are normed. ``keys_as_values``: values are the keys as their product leaves them.
    ``compressed_queries`` is the width that latent attention compresses queries to. ``autocast``: weights, sums of
    blocks and norms are in fp32, and products cast what they read to the working precision.
    ``adds_gradients`` to those of micro-batches before; ``fills_buckets``: gradients are complete and go into buckets,
    those of experts if ``fills_expert_buckets``. ``tuning`` says which weights are trained. ``streams``: of
    the residual, between layers. ``bidirectional``: queries see later keys too.
    ``reuses_keys``: keys and values are those of another layer, which ``lends_keys``. ``layer_input``: numbers of a
    token that a layer gets of a second embedding.
    """

    tp: int
    sequence_parallel: bool
    vocab_parallel: bool
    overlaps_tp: bool
    cp: int
    cp_method: str
    cp_layout: str
    cp_rank: int
    batch: int
    seq: int
    tokens: int
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    ffn: int
    vocab: int
    activation: str
    norm: str
    position: str
    dtype: str
    grad_dtype: str
    adds_gradients: bool
    fills_buckets: bool
    fills_expert_buckets: bool
    accumulates_in_product: bool
    keeps_gradients: bool
    norm_by_operations: bool
    autocast: bool
    # What only some models have.
    window: int = 0
    has_window: bool = False
    chunk: int = 0
    kv_replicas: int = 1
    biases: frozenset[str] = frozenset()
    joined_products: bool = False
    attention: str = "flash"
    dropout: float = 0.0
    qk_norm: str = ""
    norm_place: str = "before"
    sinks: bool = False
    softcap: bool = False
    softcaps_logits: bool = False
    gate: bool = False
    value_norm: bool = False
    keys_as_values: bool = False
    compressed_queries: int = 0
    tuning: Tuning = ALL_TRAINED
    streams: int = 1
    bidirectional: bool = False
    reuses_keys: bool = False
    lends_keys: bool = False
    layer_input: int = 0

    @property
    def element(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def weight_element(self) -> int:
        """Bytes of an element of weights, of their gradients as autograd hands them over, and of sums of blocks."""
        return FP32_BYTES if self.autocast else self.element

    @property
    def row_bytes(self) -> float:
        """One residual-stream tensor: rows x hidden."""
        return float(self.weight_element * self.rows * self.hidden)

    @property
    def stream_bytes(self) -> float:
        """All residual streams, which layers pass on."""
        return self.streams * self.row_bytes

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projected_v_width(self) -> int:
        """Columns of the product that makes values alone; none where they are the keys."""
        return 0 if self.keys_as_values else self.v_width

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.v_head_dim

    @property
    def context_width(self) -> int:
        return self.heads * self.v_head_dim

"""What one tensor-parallel rank sees of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from simulator.models.routing import routing
from simulator.units import DTYPE_BYTES

if TYPE_CHECKING:
    from simulator.config import Workload

GATED = ("swiglu", "geglu")


class Seat(NamedTuple):
    """Where a rank sits on the axes along which the work of ranks can differ: its positions in its cp and ep groups."""

    cp: int = 0
    ep: int = 0


#: The seat of ranks whose work does not differ.
ANY_SEAT = Seat()


class Turn(NamedTuple):
    """Whether a micro-batch makes the first or the last gradients of its step."""

    first: bool = False
    last: bool = False


#: The turn of micro-batches in the middle.
ANY_TURN = Turn()


def telling_seat(workload: Workload, seat: Seat) -> Seat:
    """``seat`` with 0 for what makes no difference to the work, so that ranks with equal ones do the same."""
    layout = workload.parallelism
    uneven = layout.cp_method == "ring" and layout.cp_layout == "contiguous"
    ep = routing(workload).telling(seat.ep) if workload.model.moe else 0
    return Seat(cp=seat.cp if uneven else 0, ep=ep)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a rank's share of the tensors, and how its kernels are put together.

    ``tokens`` are those of a micro-batch (b s, or b s / cp with context parallelism); ``rows`` are the tokens that a
    rank's norms, dropouts and residuals work on: all of them, or 1/t with sequence parallelism. ``seq`` is the length
    of whole sequences, ``window`` what of it a query sees, 0 for all; ``cp_rank`` is the rank's place on axis cp, where
    that makes a difference. ``overlaps_tp``: tensor-parallel communication runs beside products.
    ``heads``, ``kv_heads``, ``ffn`` and ``vocab`` are the rank's own; KV heads fewer than tp ranks are replicated, one
    to a rank. Heads of values may have a width of their own.
    ``dtype`` is the working precision, of which an element takes ``element`` bytes.
    ``adds_gradients`` to those of micro-batches before; ``fills_buckets``: gradients are complete and go into buckets,
    those of experts if ``fills_expert_buckets``.
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
    window: int
    tokens: int
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    kv_replicas: int
    head_dim: int
    v_head_dim: int
    ffn: int
    vocab: int
    activation: str
    norm: str
    position: str
    bias: bool
    attention: str
    dropout: float
    implementation: str
    dtype: str
    grad_dtype: str
    adds_gradients: bool
    fills_buckets: bool
    fills_expert_buckets: bool
    accumulates_in_product: bool
    keeps_gradients: bool
    compiles_loss: bool
    norm_by_ops: bool

    @property
    def element(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def fused(self) -> bool:
        return self.implementation == "fused"

    @property
    def eager(self) -> bool:
        return self.implementation == "eager"

    @property
    def compiled(self) -> bool:
        return self.implementation == "compiled"

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def row_bytes(self) -> float:
        """One residual-stream tensor: rows x hidden."""
        return float(self.element * self.rows * self.hidden)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def v_width(self) -> int:
        return self.kv_heads * self.v_head_dim

    @property
    def context_width(self) -> int:
        return self.heads * self.v_head_dim


def shapes(workload: Workload, seat: Seat = ANY_SEAT, turn: Turn = ANY_TURN) -> Shapes:
    """The `Shapes` of a workload, whose sizes divide (the configuration has checked it), for a rank at ``seat`` and a
    micro-batch whose turn it is."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    tp = layout.tp
    sequence_parallel = bool(layout.sequence_parallel) and tp > 1
    tokens = workload.rank_tokens
    vocab = model.padded_vocab(tp)
    kv_heads = model.heads if model.mla else model.kv_heads
    return Shapes(
        tp=tp,
        sequence_parallel=sequence_parallel,
        vocab_parallel=layout.vocab_parallel,
        overlaps_tp=layout.overlap.tp and tp > 1,
        cp=layout.cp,
        cp_method=layout.cp_method,
        cp_layout=layout.cp_layout,
        cp_rank=telling_seat(workload, seat).cp,
        batch=training.micro_batch,
        seq=training.seq,
        window=model.window(training.seq),
        tokens=tokens,
        rows=tokens // tp if sequence_parallel else tokens,
        hidden=model.hidden,
        heads=model.heads // tp,
        kv_heads=max(1, kv_heads // tp),
        kv_replicas=max(1, tp // kv_heads),
        head_dim=model.qk_head_dim,
        v_head_dim=model.v_head_dim,
        ffn=model.ffn_hidden // tp,
        vocab=vocab // tp if layout.vocab_parallel else vocab,
        activation=model.activation,
        norm=model.norm,
        position=model.position,
        bias=model.bias,
        attention=model.attention,
        dropout=model.dropout,
        implementation=training.implementation,
        dtype=training.precision,
        grad_dtype=training.grad_dtype,
        # Plain autograd hands over the first gradient as it is; a buffer of another type, and Megatron's, is zeroed and
        # added to. FSDP adds up what it has reduced.
        adds_gradients=training.implementation == "fused"
        or (not workload.fully_shards and (not turn.first or training.grad_dtype != training.precision)),
        fills_buckets=turn.last and workload.wrapped_in_ddp and layout.replicas("dp") > 1,
        fills_expert_buckets=turn.last and workload.wrapped_in_ddp and layout.replicas("edp") > 1,
        accumulates_in_product=training.gradient_accumulation_fusion,
        keeps_gradients=training.keep_gradients,
        compiles_loss=training.compile_loss and training.implementation == "compiled",
        norm_by_ops=not training.fused_rms_norm and model.norm == "rmsnorm",
    )


def activation_bytes(workload: Workload) -> float:
    """What passes between layers: b s h elements, of which a context-parallel rank has its share."""
    return float(workload.rank_tokens * workload.model.hidden * DTYPE_BYTES[workload.training.precision])


def passed_bytes(workload: Workload) -> float:
    """What one rank sends to the next stage: with sequence parallelism or scatter/gather its share of tp."""
    layout = workload.parallelism
    shared = layout.sequence_parallel or layout.scatter_gather_p2p
    return activation_bytes(workload) / (layout.tp if shared else 1)

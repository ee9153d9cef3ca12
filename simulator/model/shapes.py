"""What one tensor-parallel rank sees of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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


def telling_seat(workload: Workload, seat: Seat) -> Seat:
    """``seat`` with 0 for what makes no difference to the work, so that ranks with equal ones do the same."""
    return ANY_SEAT


@dataclass(frozen=True)
class Shapes:
    """Sizes of a rank's share of the tensors, and how its kernels are put together.

    ``tokens`` are those of a micro-batch (b s); ``rows`` are the tokens that a rank's norms, dropouts and residuals
    work on: b s, or b s / t with sequence parallelism. ``heads``, ``kv_heads``, ``ffn`` and ``vocab`` are the rank's
    own; KV heads fewer than tp ranks are replicated, one to a rank.
    ``dtype`` is the working precision, of which an element takes ``element`` bytes.
    """

    tp: int
    sequence_parallel: bool
    vocab_parallel: bool
    batch: int
    seq: int
    tokens: int
    rows: int
    hidden: int
    heads: int
    kv_heads: int
    kv_replicas: int
    head_dim: int
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
    accumulates_in_product: bool
    keeps_gradients: bool

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


def shapes(workload: Workload, seat: Seat = ANY_SEAT) -> Shapes:
    """The `Shapes` of a workload, whose sizes divide (the configuration has checked it), for a rank at ``seat``."""
    model, training, layout = workload.model, workload.training, workload.parallelism
    tp = layout.tp
    sequence_parallel = bool(layout.sequence_parallel) and tp > 1
    tokens = training.micro_batch * training.seq
    vocab = model.padded_vocab(tp)
    return Shapes(
        tp=tp,
        sequence_parallel=sequence_parallel,
        vocab_parallel=layout.vocab_parallel,
        batch=training.micro_batch,
        seq=training.seq,
        tokens=tokens,
        rows=tokens // tp if sequence_parallel else tokens,
        hidden=model.hidden,
        heads=model.heads // tp,
        kv_heads=max(1, model.kv_heads // tp),
        kv_replicas=max(1, tp // model.kv_heads),
        head_dim=model.head_dim,
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
        # Plain autograd hands over the first gradient as it is; Megatron always adds to its zeroed buffer.
        adds_gradients=training.implementation == "fused"
        or workload.microbatches > 1
        or training.grad_dtype != training.precision,
        accumulates_in_product=training.gradient_accumulation_fusion,
        keeps_gradients=training.keep_gradients,
    )

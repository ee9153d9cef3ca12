"""Kernels that a GPU computes, as plain data: FLOPs and bytes follow from their shapes."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.units import DTYPE_BYTES, OPERAND_BYTES


@dataclass(frozen=True, slots=True)
class Matmul:
    """``batch`` products (m x k) @ (k x n) -> (m x n).

    ``role`` is ``fwd``, ``dgrad`` or ``wgrad``: the operand layouts (NN, NT, TN) differ, and with them the speed.
    ``out_dtype`` is the output's type where it differs from ``dtype`` (gradients accumulated in fp32 are read too).
    ``scaling``: of operands in 8 bits; each has a scale for the whole tensor, for rows, or for blocks.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    role: str = "fwd"
    out_dtype: str = ""
    accumulate: bool = False
    scaling: str = ""

    kind = "matmul"

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        out = OPERAND_BYTES[self.out_dtype or self.dtype] * (2 if self.accumulate else 1)
        return float(
            self.batch * (OPERAND_BYTES[self.dtype] * (self.m * self.k + self.k * self.n) + out * self.m * self.n)
        )


def causal_pairs(q_len: int, kv_len: int, offset: int = 0, window: int = 0) -> float:
    """Query-key pairs under a causal mask, half of the diagonal counted as in the s^2 / 2 of the literature.

    Query i sees the keys up to i + ``offset``. A ``window`` leaves it only so many of the last of these.
    Pairs are the area between two lines of slope 1, cut to q_len x kv_len, so that half of the diagonal counts:

    >>> causal_pairs(4, 4), causal_pairs(4, 4, window=2), causal_pairs(4, 4, window=9), causal_pairs(4, 4, offset=4)
    (8.0, 6.0, 8.0, 16.0)
    """

    def below(x: int) -> float:
        """Integral of the keys up to x, of kv_len."""
        inside = min(max(x, 0), kv_len)
        return inside * inside / 2 + kv_len * max(x - kv_len, 0)

    seen = below(q_len + offset) - below(offset)
    if window:
        seen -= below(q_len + offset - window) - below(offset - window)
    return seen


def chunked_pairs(length: int, chunk: int) -> float:
    """Query-key pairs under causal masks inside each ``chunk`` of a sequence, the last of which may be shorter.

    >>> chunked_pairs(8, 4), chunked_pairs(10, 4), chunked_pairs(4, 16)
    (16.0, 18.0, 8.0)
    """
    whole, rest = divmod(length, chunk)
    return (whole * chunk * chunk + rest * rest) / 2


@dataclass(frozen=True, slots=True)
class GroupedMatmul:
    """One kernel of a product per expert: group i has ``tokens[i]`` tokens and a weight of n x k.

    ``role`` fwd and dgrad: (tokens x k) @ (k x n); wgrad: (n x tokens) @ (tokens x k). ``out_dtype``, ``accumulate``
    and ``scaling`` are as in `Matmul`. Groups without tokens are skipped.
    """

    tokens: tuple[int, ...]
    n: int
    k: int
    dtype: str = "bf16"
    role: str = "fwd"
    out_dtype: str = ""
    accumulate: bool = False
    scaling: str = ""

    kind = "grouped_matmul"

    @property
    def products(self) -> tuple[Matmul, ...]:
        """The products of all groups."""
        return tuple(
            Matmul(self.n, self.k, tokens, 1, self.dtype, self.role, self.out_dtype, self.accumulate, self.scaling)
            if self.role == "wgrad"
            else Matmul(tokens, self.n, self.k, 1, self.dtype, self.role, self.out_dtype, self.accumulate, self.scaling)
            for tokens in self.tokens
            if tokens
        )

    @property
    def flops(self) -> float:
        return 2.0 * sum(self.tokens) * self.n * self.k

    @property
    def bytes(self) -> float:
        return sum(product.bytes for product in self.products)


@dataclass(frozen=True, slots=True)
class Attention:
    """One fused (flash) attention kernel over ``batch`` sequences; masked products are not computed.

    ``offset``: positions that the first query stands after the first key. Under a causal mask a query sees the keys
    that are not after it, and of those only the last ``window`` where that is not 0.
    The forward kernel does two products, the backward kernel five, as it recomputes the scores (arXiv 2205.14135,
    section 3.2). Of the five, three are as wide as a head of queries and keys, two as wide as a head of values.
    A head of values is ``v_head_dim`` wide (0: like ``head_dim``). ``dropout``: probabilities are dropped on the way.
    ``bias``: a tensor of the scores' size is added to them, as the mask that it may be. ``chunk``: the sequence is cut
    into pieces of so many tokens that do not see each other (0: one piece). ``sinks``: the softmax of each head has one
    more score, which is learned. ``softcap``: scores pass through a tanh.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool = True
    backward: bool = False
    dtype: str = "bf16"
    offset: int = 0
    window: int = 0
    v_head_dim: int = 0
    dropout: bool = False
    bias: bool = False
    chunk: int = 0
    sinks: bool = False
    softcap: bool = False

    kind = "attention"

    @property
    def pairs(self) -> float:
        """Query-key pairs that are computed, per head and sequence."""
        if not self.causal:
            return float(self.q_len) * self.kv_len
        if self.chunk:
            return chunked_pairs(self.q_len, self.chunk)
        return causal_pairs(self.q_len, self.kv_len, self.offset, self.window)

    @property
    def flops(self) -> float:
        value_dim = self.v_head_dim or self.head_dim
        width = 3 * self.head_dim + 2 * value_dim if self.backward else self.head_dim + value_dim
        return 2.0 * self.batch * self.heads * self.pairs * width

    @property
    def bytes(self) -> float:
        value_dim = self.v_head_dim or self.head_dim
        q, context = self.q_len * self.heads * self.head_dim, self.q_len * self.heads * value_dim
        kv = self.kv_len * self.kv_heads * (self.head_dim + value_dim)
        tensors = 2 * (q + context + kv) if self.backward else q + context + kv
        return float(self.batch * tensors * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True, slots=True)
class Tiled:
    """Kernels that multiply tiles and work on them between, other than attention.

    Linear attention takes a state along a sequence so, in pieces of ``chunk`` tokens, with products of matrices
    ``width`` wide inside a piece. ``launches``: kernels that all of it takes, one behind another.
    """

    flops: float
    read_bytes: float
    write_bytes: float
    chunk: int
    width: int
    launches: int = 1
    backward: bool = False
    dtype: str = "bf16"

    kind = "tiled"

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """A kernel bound by memory traffic. ``op`` is its cost class (`simulator.hardware.kernels.MemoryClass`); ``width``
    the elements of a row where it works on whole rows, as norms and softmax do, and where that is known; ``parts`` the
    tensors that the host cuts and lists one by one for it to join them. ``launches``: kernels that all of it takes, one
    tensor after another; 0 is one kernel. ``elements`` are those that it works on, where they are not those written."""

    op: str
    read_bytes: float
    write_bytes: float
    flops: float = 0.0
    dtype: str = "bf16"
    width: int = 0
    parts: int = 0
    launches: int = 0
    elements: float = 0.0

    @property
    def normalizes(self) -> bool:
        """True for LayerNorm and RMSNorm, which are bound by arithmetic too."""
        return "norm" in self.op

    @property
    def kind(self) -> str:
        return self.op

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, slots=True)
class Fixed:
    """Work of a known length: the unit costs of ``schedule``, or a kernel read from a trace."""

    seconds: float
    flops: float = 0.0
    bytes: float = 0.0

    kind = "fixed"


Kernel = Matmul | GroupedMatmul | Attention | Tiled | Memory | Fixed
KERNELS: dict[str, type[Matmul] | type[GroupedMatmul] | type[Attention] | type[Tiled] | type[Memory] | type[Fixed]] = {
    "matmul": Matmul,
    "grouped_matmul": GroupedMatmul,
    "attention": Attention,
    "tiled": Tiled,
    "memory": Memory,
    "fixed": Fixed,
}

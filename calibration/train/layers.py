"""A transformer in plain PyTorch, as one rank holds it: the pre-norm layers that `simulator.models` describes.

Activations are (tokens, width), tokens of one sequence after another. Every parameter is drawn whole from a seed of its
own and cut to the rank's share, so that all layouts start from the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from calibration.train.experts import ExpertsModule
from calibration.train.tensor_parallel import LayerSplit, TensorGroup, cross_entropy, embed, linear
from simulator.config.model import Model
from simulator.config.workload import Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INIT_STD = 0.02
ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class ReplicaPlace:
    """A rank's place inside its replica, as far as its parameters and communication go."""

    device: torch.device
    tensor: TensorGroup = field(default_factory=TensorGroup)
    expert_group: dist.ProcessGroup | None = None
    ep: int = 1
    ep_rank: int = 0


class Builder:
    """Draws parameters and puts modules together for one rank."""

    def __init__(self, workload: Workload, place: ReplicaPlace) -> None:
        self.workload, self.model, self.place = workload, workload.model, place
        self.dtype = DTYPES[workload.training.precision]
        #: FSDP keeps its shards as the optimizer works on them, and casts what it gathers.
        self.kept_dtype = torch.float32 if workload.replication.weights_are_masters else self.dtype
        #: Parameters whose gradients are to be summed over the tensor-parallel ranks once a step.
        self.partial: list[nn.Parameter] = []
        #: Parameters that every tensor-parallel rank holds.
        self.whole: list[nn.Parameter] = []
        #: Parameters of experts, which data-parallel ranks hold different ones of.
        self.of_experts: list[nn.Parameter] = []

    def draw(self, name: str, *shape: int, cut: Callable[[Tensor], Tensor] = lambda whole: whole) -> nn.Parameter:
        """A parameter of normal numbers, of which ``cut`` takes this rank's share."""
        seed = zlib.crc32(f"{self.workload.seed} {name}".encode())
        generator = torch.Generator(self.place.device).manual_seed(seed)
        whole = torch.randn(*shape, generator=generator, device=self.place.device) * INIT_STD
        return nn.Parameter(cut(whole).to(self.kept_dtype).contiguous().clone())

    def constant(self, value: float, size: int) -> nn.Parameter:
        return nn.Parameter(torch.full((size,), value, dtype=self.kept_dtype, device=self.place.device))

    def shared(self, parameter: nn.Parameter) -> nn.Parameter:
        """``parameter``, which every tensor-parallel rank holds, and with sequence parallelism computes a part of the
        gradient of, from its own rows."""
        self.whole.append(parameter)
        if self.place.tensor.sequence_parallel:
            self.partial.append(parameter)
        return parameter

    def cut(self, whole: Tensor, dim: int, groups: int = 1) -> Tensor:
        """This rank's part along ``dim`` of each of ``groups`` equal parts."""
        t = self.place.tensor
        return torch.cat([part.chunk(t.size, dim)[t.rank] for part in whole.chunk(groups, dim)], dim)


class Norm(nn.Module):
    """LayerNorm or RMSNorm."""

    def __init__(self, b: Builder) -> None:
        super().__init__()
        size = b.model.hidden
        self.weight = b.shared(b.constant(1.0, size))
        self.bias = b.shared(b.constant(0.0, size)) if b.model.norm == "layernorm" else None
        self.rms = b.model.norm == "rmsnorm"

    def forward(self, x: Tensor) -> Tensor:
        if self.rms:
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias)


class Linear(nn.Module):
    """out x in, split over the tensor-parallel ranks; ``groups``: parts of a column-split layer that are split each."""

    def __init__(self, b: Builder, name: str, n: int, k: int, split: LayerSplit, groups: int = 1) -> None:
        super().__init__()
        dim = {"column": 0, "row": 1}.get(split)
        share: Callable[[Tensor], Tensor] = lambda whole: whole if dim is None else b.cut(whole, dim, groups)  # noqa: E731
        self.weight = b.draw(name, n, k, cut=share)
        self.bias: nn.Parameter | None = None
        if b.model.bias:
            mine = len(self.weight) if split == "column" else n
            self.bias = b.constant(0.0, mine)
            if split == "row":
                b.shared(self.bias)
        self.split: LayerSplit = split
        self.tensor = b.place.tensor

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.tensor, self.split)


class QkvLinear(Linear):
    """Queries, keys and values in one product: the rank's heads of each."""

    def __init__(self, b: Builder, name: str) -> None:
        m = b.model
        super().__init__(b, name, (m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden, "none")
        q, k, v = self.weight.data.split([m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim])
        self.weight = nn.Parameter(torch.cat([b.cut(part, 0) for part in (q, k, v)]))
        if self.bias is not None:
            self.bias = b.constant(0.0, len(self.weight))
        self.split = "column"


class AttentionModule(nn.Module):
    """Causal attention by `F.scaled_dot_product_attention`."""

    def __init__(self, b: Builder, name: str) -> None:
        super().__init__()
        m, t = b.model, b.place.tensor
        self.qkv = QkvLinear(b, f"{name}.qkv")
        self.proj = Linear(b, f"{name}.proj", m.hidden, m.heads * m.head_dim, "row")
        self.heads, self.kv_heads, self.head_dim = m.heads // t.size, m.kv_heads // t.size, m.head_dim
        self.seq, self.rope = b.workload.training.seq, m.position == "rope"
        self.again = b.workload.training.recompute.granularity == "selective"
        self.dropout = m.dropout
        if self.rope:
            frequency = ROPE_BASE ** -(torch.arange(0, self.head_dim, 2, device=b.place.device) / self.head_dim)
            angle = torch.outer(torch.arange(self.seq, device=b.place.device).float(), frequency)
            angle = torch.cat((angle, angle), -1)[:, None, :]
            self.register_buffer("cos", angle.cos().to(b.dtype), persistent=False)
            self.register_buffer("sin", angle.sin().to(b.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = self.qkv(x).split(widths, -1)
        q, k, v = (part.view(-1, self.seq, part.shape[-1] // self.head_dim, self.head_dim) for part in parts)
        if self.rope:
            q, k = self._rotated(q), self._rotated(k)
        context = checkpoint(self._core, q, k, v, use_reentrant=False) if self.again else self._core(q, k, v)
        out: Tensor = self.proj(context)
        return out

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, seq, heads, head_dim) -> (tokens, heads x head_dim)"""
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            dropout_p=self.dropout,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        return out.transpose(1, 2).reshape(-1, self.heads * self.head_dim)

    def _rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin


def activation(m: Model) -> Callable[[Tensor], Tensor]:
    """Gated ones halve the width: gate first, then up."""

    def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def apply(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, -1)
            return function(gate) * up

        return apply

    chosen: Callable[[Tensor], Tensor]
    chosen = {"gelu": F.gelu, "relu": F.relu, "swiglu": gated(F.silu), "geglu": gated(F.gelu)}[m.activation]
    return chosen


def is_gated(m: Model) -> bool:
    return m.activation in ("swiglu", "geglu")


class Mlp(nn.Module):
    def __init__(self, b: Builder, name: str) -> None:
        super().__init__()
        m, groups = b.model, 2 if is_gated(b.model) else 1
        self.fc1 = Linear(b, f"{name}.fc1", groups * m.ffn_hidden, m.hidden, "column", groups)
        self.fc2 = Linear(b, f"{name}.fc2", m.hidden, m.ffn_hidden, "row")
        self.activation = activation(m)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


def mixture(b: Builder, name: str) -> ExpertsModule:
    """The rank's experts, drawn one by one."""
    m, moe, place = b.model, b.model.moe, b.place
    assert moe is not None
    local = moe.experts // place.ep
    mine = slice(place.ep_rank * local, (place.ep_rank + 1) * local)
    width = moe.ffn_hidden * (2 if is_gated(m) else 1)
    fc1 = b.draw(f"{name}.fc1", moe.experts, width, m.hidden, cut=lambda whole: whole[mine])
    fc2 = b.draw(f"{name}.fc2", moe.experts, m.hidden, moe.ffn_hidden, cut=lambda whole: whole[mine])
    b.of_experts += [fc1, fc2]
    return ExpertsModule(
        b.shared(b.draw(f"{name}.router", moe.experts, m.hidden)),
        fc1,
        fc2,
        top_k=moe.top_k,
        router_dtype=DTYPES[moe.router_dtype],
        activation=activation(m),
        group=place.expert_group,
        ep=place.ep,
    )


class Layer(nn.Module):
    """x + attention(norm(x)), then x + MLP or experts(norm(x)), each behind dropout."""

    def __init__(self, b: Builder, number: int) -> None:
        super().__init__()
        name, moe = f"layer{number}", b.model.moe
        self.attn_norm, self.attn = Norm(b), AttentionModule(b, f"{name}.attn")
        self.mlp_norm = Norm(b)
        self.mlp = mixture(b, f"{name}.moe") if moe is not None and moe.here(number) else Mlp(b, f"{name}.mlp")
        self.dropout = b.model.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attn(self.attn_norm(x)))
        return x + self._dropped(self.mlp(self.mlp_norm(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class Embedding(nn.Module):
    """Words, and learned positions."""

    def __init__(self, b: Builder) -> None:
        super().__init__()
        m, self.tensor = b.model, b.place.tensor
        self.table = _table(b, "table")
        self.positions = b.draw("positions", b.workload.training.seq, m.hidden) if m.position == "learned" else None
        if self.positions is not None:
            b.whole.append(self.positions)
        self.dropout = m.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, seq) -> (this rank's rows, hidden)"""
        places = None
        if self.positions is not None:
            numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            places = F.embedding(numbers.reshape(-1), self.positions)
        x = embed(tokens.reshape(-1), self.table, self.tensor, positions=places)
        return F.dropout(x, self.dropout) if self.dropout else x


class Head(nn.Module):
    """Final norm and the projection to this rank's words; ``table``: that of tied embeddings."""

    def __init__(self, b: Builder, table: nn.Parameter | None) -> None:
        super().__init__()
        m = b.model
        self.norm, self.tensor = Norm(b), b.place.tensor
        self.table = _table(b, "table" if m.tied_embeddings else "head") if table is None else table

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.table, None, self.tensor, "column")


def _table(b: Builder, name: str) -> nn.Parameter:
    """This rank's words of the vocabulary."""
    words = b.model.padded_vocab(b.place.tensor.size)
    return b.draw(name, words, b.model.hidden, cut=lambda whole: b.cut(whole, 0))


class StageModule(nn.Module):
    """Stage ``number`` of the model: some layers, behind the embedding if it is the first, before the head if it is the
    last. Activations between stages are (tokens, hidden)."""

    def __init__(self, b: Builder, number: int) -> None:
        super().__init__()
        counts, recompute = b.workload.parallelism.layers_per_stage, b.workload.training.recompute
        first = sum(counts[:number])
        self.embedding = Embedding(b) if number == 0 else None
        self.layers = nn.ModuleList(Layer(b, first + place) for place in range(counts[number]))
        tied = self.embedding.table if self.embedding and b.model.tied_embeddings else None
        self.head = Head(b, tied) if number == len(counts) - 1 else None
        self.again = 0
        if recompute.granularity == "full":
            self.again = len(self.layers) if recompute.layers is None else recompute.layers

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, seq) or activations -> activations, or logits (tokens, words)."""
        if self.embedding is not None:
            x = self.embedding(x)
        for place, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if place < self.again else layer(x)
        return x if self.head is None else self.head(x)


def loss_of(workload: Workload, place: ReplicaPlace) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean loss of a micro-batch over the micro-batches of a step, from logits and targets (batch, seq)."""
    count = workload.microbatches

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets.reshape(-1), place.tensor) / count

    return loss

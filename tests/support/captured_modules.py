"""Small modules of our own, captured, and jobs that train them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import simulator
from simulator.captured import CapturedModel
from simulator.config import load_workload
from simulator.program import kernel_from_text

torch = pytest.importorskip("torch")
nn = torch.nn
WIDTH, TOKENS, BATCH = 64, 16, 2
ROWS = TOKENS * BATCH


class Block(nn.Module):
    """A residual block with attention and an MLP."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).reshape(x.shape)))


class Tiny(nn.Module):
    """Two blocks between an embedding and a head with its weight."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def ids() -> Any:
    return torch.zeros(BATCH, TOKENS, dtype=torch.long)


def captured(module: Any, inputs: Any = None, **options: Any) -> CapturedModel:
    return simulator.capture(module, ids() if inputs is None else inputs, **{"dtype": "bf16", **options})


def kernels(model: CapturedModel, kind: type) -> list[Any]:
    """All kernels of a kind, of each part once."""
    nodes = [node for part in model.parts for node in part.nodes]
    all_of_it = [one for node in nodes for one in (*node.forward, *node.input_grad, *node.weight_grad)]
    return [kernel for one in all_of_it if isinstance(kernel := kernel_from_text(one.kernel), kind)]


def workload(model: CapturedModel, folder: Path, **sections: Any) -> Any:
    model.save(folder / "model.json")
    training = {"global_batch": 8, **sections.pop("training", {})}
    keys = {"model": {"captured": str(folder / "model.json")}, "training": training}
    return load_workload({**keys, "cluster": "dgx_h100", **sections})

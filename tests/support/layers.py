"""Layers of small models, and sums over their operations."""

from __future__ import annotations

from typing import Any

from simulator.config import Workload, load_workload
from simulator.operations.nodes import Ops
from simulator.operations.weights import Weight
from simulator.program import Compute, Matmul, Memory
from tests.support.frameworks import MEGATRON

SIZES = [(512, 1, 1024, 8), (1024, 2, 2048, 16), (2048, 1, 1536, 24)]  # s, b, h, a

GELU: dict[str, Any] = {"attention": "unfused", "dropout": 0.1}

LLAMA: dict[str, Any] = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tied_embeddings": False,
}


def make(s: int, b: int, h: int, a: int, **settings: Any) -> Workload:
    """A four-layer model; ``settings`` go to the section of the workload that has such a key."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": h, "heads": a, "vocab": 51200},
        "training": {"seq": s, "micro_batch": b, "global_batch": 8 * b, "precision": "fp16"},
        "parallelism": {},
    }
    framework = settings.pop("framework", MEGATRON)
    for key, value in settings.items():
        home = next(name for name, fields in FIELDS.items() if key in fields)
        sections[home][key] = value
    return load_workload({**sections, "framework": framework, "cluster": "dgx_a100"})


FIELDS = {name: Workload.model_fields[name].annotation.model_fields for name in ("model", "training", "parallelism")}  # type: ignore[union-attr]


def vector(n: int) -> tuple[Weight, ...]:
    """One weight of ``n`` elements."""
    return (Weight("vector", (n,), (n,), "bf16"),)


def products(ops: Ops) -> dict[str, tuple[int, int, int]]:
    """m, n and k of each product by its name."""
    kernels = [(op.name, op.kernel) for op in ops if isinstance(op, Compute)]
    return {name: (kernel.m, kernel.n, kernel.k) for name, kernel in kernels if isinstance(kernel, Matmul)}


def traffic(ops: Ops) -> list[tuple[str, float, float]]:
    """Name, bytes read and bytes written of each kernel that memory bounds."""
    kernels = [(op.name, op.kernel) for op in ops if isinstance(op, Compute)]
    return [(name, kernel.read_bytes, kernel.write_bytes) for name, kernel in kernels if isinstance(kernel, Memory)]

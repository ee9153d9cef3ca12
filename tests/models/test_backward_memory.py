"""Bytes that are alive in a backward pass: no operation of a layer claims fewer than it works on, or more than all."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from simulator.config import Workload, load_workload
from simulator.models import Part
from simulator.operations.nodes import Node
from simulator.program import Attention, Fixed, GroupedMatmul, Matmul, Memory, StepPhase, Tiled, kernels_of
from simulator.units import DTYPE_BYTES
from tests.support.experts import MLA, MOE
from tests.support.jobs import job
from tests.support.pattern_models import DELTA, EDGE, KIMI, LLAMA, MAMBA, SPARSE, V4

#: The module; the package has a function of its name.
LAYER = importlib.import_module("simulator.models.layer")
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "unfused": LLAMA
    | {"attention": "unfused", "dropout": 0.1, "activation": "gelu", "norm": "layernorm", "bias": True},
    "experts": LLAMA | {"moe": MOE},
    "shared experts": LLAMA | {"moe": MOE | {"shared_experts": 1}},
    "latent": LLAMA | {"mla": MLA, "kv_heads": 8, "moe": MOE},
    "gated": LLAMA | {"attention_gate": True, "qk_norm": True},
    "edge": EDGE,
    **{model["mixers"][0]: LLAMA | model for model in (DELTA, KIMI, MAMBA)},
    "sparse": LLAMA | SPARSE,
    **{kind: LLAMA | V4 | {"mixers": [kind]} for kind in ("shared_key", "heavily_compressed", "compressed_sparse")},
}
#: One head of keys, and a table for each layer, are on every rank.
WHOLE = ("edge", "shared_key", "heavily_compressed", "compressed_sparse")
CASES = [(name, framework, tp) for name in MODELS for framework in ("megatron_core", "pytorch") for tp in (1, 2)]
CASES = [case for case in CASES if not (case[0] in WHOLE and case[2] > 1)]
CASES += [(name, framework, 1) for name in ("llama", "experts") for framework in ("hugging_face", "torchtitan")]
CASES += [(name, "megatron_core_local", tp) for name in ("llama", "unfused", "experts") for tp in (1, 2)]


def nodes_of(work: Workload, monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """Return the operations that the first layer is made of, in order."""
    seen: list[Node] = []

    def part_of(shapes: Any, name: str, nodes: Sequence[Node], *rest: Any, **more: Any) -> Part:
        seen.extend(nodes)
        return original(shapes, name, nodes, *rest, **more)

    original = LAYER.part_of
    monkeypatch.setattr(LAYER, "part_of", part_of)
    monkeypatch.setattr(LAYER, "_layer", LAYER._layer.__wrapped__)  # layers that were made before are not kept
    LAYER.layer(work)
    return seen


def gradients_of(kernel: Matmul | GroupedMatmul) -> float:
    """Bytes of the gradients of y, which is read, and of x, which is written, in a product of an input gradient."""
    if isinstance(kernel, GroupedMatmul):
        return DTYPE_BYTES[kernel.dtype] * sum(kernel.tokens) * (kernel.n + kernel.k)
    return DTYPE_BYTES[kernel.dtype] * kernel.batch * kernel.m * (kernel.n + kernel.k)


@pytest.mark.parametrize(("name", "framework", "tp"), CASES)
def test_what_kernels_work_on_is_alive(name: str, framework: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While gradients of inputs are made, what a kernel writes is alive, and what it reads was alive or kept. All that
    an operation has alive is read or written by one of its kernels. Attention and kernels of tiles also have what stays
    on their multiprocessor, and gradients that are turned in place are alive whole."""
    keys = {"training__optimizer": {"master_weights": False}} if framework == "torchtitan" else {}
    work = load_workload(job(model=MODELS[name], framework=framework, parallelism={"tp": tp}, **keys))
    seen = 0
    for node in nodes_of(work, monkeypatch):
        kernels = [one for op in node.backward for one in kernels_of(op)]
        kept = sum(tensor.nbytes for tensor in node.saved)
        for one in kernels:
            if one.phase == StepPhase.BACKWARD and isinstance(one.kernel, Matmul | GroupedMatmul):
                assert gradients_of(one.kernel) <= node.grad_bytes
                seen += 1
            if one.phase == StepPhase.BACKWARD and isinstance(one.kernel, Memory):
                assert one.kernel.write_bytes <= node.grad_bytes
                assert one.kernel.read_bytes <= node.grad_bytes + kept
                seen += 1
        in_place = any(one.name.startswith("attn.rope") for one in kernels)
        if kernels and not in_place and not any(isinstance(one.kernel, Attention | Tiled) for one in kernels):
            assert node.grad_bytes <= sum(one.kernel.bytes for one in kernels if not isinstance(one.kernel, Fixed))
    assert seen > 10

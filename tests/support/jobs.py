"""Small jobs for tests: workload mappings, and how they are played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

from simulator.api import run
from simulator.config import load_workload
from simulator.errors import InputError
from simulator.step_result import StepResult
from tests.support.frameworks import STACKS

#: Of a node: hosts that hold up no GPU.
FAST_HOSTS = {"host_speed": 1000.0}


def job(**changes: Any) -> dict[str, Any]:
    """A tiny GPT on DGX A100s, whose hosts hold up no GPU.

    ``changes``: dotted keys with __ for the dot, as in parallelism__tp=2; or sections.
    """
    workload: dict[str, Any] = {
        "name": "tiny",
        "model": {"layers": 8, "hidden": 256, "heads": 8, "vocab": 1024},
        "training": {"seq": 128, "global_batch": 16, "precision": "bf16"},
        "parallelism": {},
        "cluster": {"name": "dgx_a100", "node": dict(FAST_HOSTS)},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            workload[section][name] = value
        else:
            workload[section] = value
    return workload


def play(workload: dict[str, Any], **simulation: bool | str) -> StepResult:
    return run({**workload, "simulation": simulation})


def layouts(limit: int) -> list[dict[str, Any]]:
    """Return the legal parallelism sections of at most ``limit`` ranks, of 64 at most.

    They are every schedule x tp, dp, pp, with overlap and without.
    """
    return [section for section in _layouts() if section["tp"] * section["dp"] * section["pp"] <= limit]


@cache
def _layouts() -> tuple[dict[str, Any], ...]:
    return tuple(_legal_layouts())


def _legal_layouts() -> Iterator[dict[str, Any]]:
    for tp, dp, pp in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        if tp * dp * pp > 64:
            continue
        for number, (schedule, vpp) in enumerate((("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2))):
            overlap = (tp.bit_length() + dp.bit_length() + pp.bit_length() + number) % 2 == 0
            section = {
                "tp": tp,
                "dp": dp,
                "pp": pp,
                "vpp": vpp,
                "schedule": schedule,
                "sequence_parallel": tp > 1 and dp > 1,
                "zero": int(dp == 4),
                "overlap": {"grad_reduce": overlap, "p2p": overlap, "param_gather": overlap},
                "bucket_bytes": 400_000,
            }
            try:
                load_workload(job() | {"parallelism": section})
            except InputError:
                continue
            yield section


def any_job(one: Callable[..., Any]) -> dict[str, Any]:
    """A small model on up to 16 GPUs; of every key that changes a program ``one`` of the choices. Not always legal."""
    tp, pp, dp = one((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 4), (2, 2, 2), (1, 4, 2), (4, 2, 1), (4, 2, 2), (2, 4, 2))
    cp, method = one((1, "ring"), (1, "ring"), (2, "ring"), (2, "ulysses")) if tp * pp * dp <= 8 else (1, "ring")
    schedule, vpp = one(("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2)) if pp > 1 else ("1f1b", 1)
    workload = job()
    workload["model"] |= {
        "layers": pp * vpp * one(1, 2),
        "hidden": 64 * one(1, 2),
        "heads": 4,
        "kv_heads": one(4, 2),
        "vocab": one(500, 1000),
        "activation": one("gelu", "swiglu"),
        "norm": one("layernorm", "rmsnorm"),
        "position": one("learned", "rope"),
        "bias": one(True, False),
        "tied_embeddings": one(True, False),
        "attention": one("flash", "unfused") if cp == 1 or method == "ulysses" else "flash",
        "sliding_window": one(None, 10, 64) if cp == 1 or method == "ulysses" else None,
        "dropout": one(0.0, 0.1),
    }
    workload["training"] |= {
        "seq": one(16, 64),
        "micro_batch": one(1, 2),
        "precision": one("bf16", "fp16", "fp32"),
        "grad_dtype": one("fp32", "bf16"),
        "grad_clip": one(None, 1.0),
        "recompute": one("none", "selective", "full", {"granularity": "full", "layers": 1}),
    }
    workload["framework"] = one(*STACKS)
    workload["training"]["global_batch"] = workload["training"]["micro_batch"] * dp * pp * one(1, 2, 3)
    workload["parallelism"] = {
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "cp": cp,
        "cp_method": method,
        **({"cp_layout": one("zigzag", "contiguous")} if method == "ring" else {}),
        "vpp": vpp,
        "schedule": schedule,
        "sequence_parallel": tp > 1 and one(True, False),
        "vocab_parallel": one(True, False),
        "zero": one(0, 1, 2, 3),
        "overlap": {key: one(True, False) for key in ("grad_reduce", "p2p", "param_gather", "tp")},
        "bucket_bytes": one(1, 20_000, 25_000_000),
        "rank_order": one("tp-cp-dp-pp", "tp-pp-dp-cp", "dp-cp-tp-pp"),
    }
    if workload["parallelism"]["zero"] == 3:
        workload["parallelism"] |= {"prefetch": one(0, 1, 2), "reshard_after_forward": one(True, False)}
    if workload["parallelism"]["zero"] and dp % 2 == 0:
        workload["parallelism"]["hsdp"] = one(None, 2)
    # There are trees for all-reduces only.
    algorithms = ("auto", "ring") if workload["parallelism"]["zero"] else ("auto", "ring", "tree")
    workload["parallelism"]["collective_algorithm"] = one(*algorithms)
    if tp > 1 and not workload["parallelism"]["sequence_parallel"]:
        workload["parallelism"]["scatter_gather_p2p"] = one(True, False)
    return workload

"""Transformers so narrow that a GPU never holds its host up: what issuing ops takes is measured and fitted on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simulator.config import Workload, load_workload

SEQ, WIDTH, HEADS = 64, 256, 4
#: Modules of one kind that are measured in a row.
DEPTH = 12
#: Those that put the tokens of experts in another order, by the parts that they cut and join.
JOINED = {"join_8": 8, "join_32": 32}
LLAMA: dict[str, Any] = {
    "hidden": WIDTH,
    "heads": HEADS,
    "ffn_hidden": 2 * WIDTH,
    "vocab": 1024,
    "vocab_multiple": 8,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tied_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": LLAMA | {"activation": "gelu", "norm": "layernorm", "position": "learned", "bias": True},
    "llama": LLAMA,
    "moe": LLAMA | {"moe": {"experts": 8, "top_k": 2, "ffn_hidden": WIDTH}},
    "moe_32": LLAMA | {"moe": {"experts": 32, "top_k": 2, "ffn_hidden": WIDTH}},
}
#: The case that says how fast a host issues ops, measured beside every real run.
PROBE = {"model": "gpt", "layers": DEPTH, "batches": 4}
#: By name: what `Workload.parallelism` says of one.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"tp": 2, "sequence_parallel": False},
    "sp": {"tp": 2, "sequence_parallel": True},
    "ddp": {"dp": 2},
    "ddp_buckets": {"dp": 2, "bucket_bytes": 1_000_000},
    "fsdp": {"dp": 2, "zero": 3},
    "fsdp_kept": {"dp": 2, "zero": 3, "reshard_after_forward": False},
    "ep": {"dp": 2, "ep": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "interleaved_zb": {"pp": 2, "vpp": 2, "schedule": "interleaved_zb"},
    "zb_v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
}


def narrow(params: Mapping[str, Any], cluster: str = "hgx_h100_4gpu") -> Workload:
    """The workload of a case of `calibration.measure.layers`: its ``model``, ``layers``, ``layout``, ``batches`` and
    ``recompute``; on any ``cluster``, as no GPU holds it up."""
    layout = LAYOUTS[str(params.get("layout", "one"))]
    fsdp = layout.get("zero") == 3
    batches, dp = int(params.get("batches", 1)), int(layout.get("dp", 1))
    training: dict[str, Any] = {
        "seq": SEQ,
        "micro_batch": 1,
        "global_batch": batches * dp,
        "grad_dtype": "fp32" if fsdp else "bf16",
        "optimizer": {"master_weights": fsdp, "state_dtype": "fp32" if fsdp else "bf16"},
    }
    if params.get("recompute"):
        training["recompute"] = {"granularity": str(params["recompute"])}
    return load_workload(
        {
            "name": "narrow",
            "model": MODELS[str(params["model"])] | {"layers": int(params["layers"])},
            "training": training,
            "framework": "pytorch",
            "parallelism": layout,
            "cluster": cluster,
        }
    )

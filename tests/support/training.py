"""A team of processes that trains tiny models in every layout.

`python -m tests.support.training FILE WORLD` writes what the processes compute.

One process per rank, over gloo; each layout is one job, in which as many of the first ranks take part as it needs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

STEPS = 3
LLAMA: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 48,
    "vocab": 64,
    "vocab_multiple": 8,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "position": "rope",
    "bias": False,
    "tied_embeddings": False,
}
GPT = LLAMA | {
    "kv_heads": 4,
    "activation": "gelu",
    "norm": "layernorm",
    "position": "learned",
    "bias": True,
}
MOE = LLAMA | {"moe": {"experts": 8, "top_k": 2, "ffn_hidden": 24}}
TIED = GPT | {"tied_embeddings": True, "activation": "geglu"}
TRAINING: dict[str, Any] = {
    "seq": 16,
    "micro_batch": 1,
    "global_batch": 8,
    "precision": "fp32",
}
NO_OVERLAP = {"grad_reduce": False}

#: Name -> (model, layout, changes to training). Those of one model and training are all compared with its ``one``.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"dp": 2},
    "ddp small buckets": {"dp": 4, "bucket_bytes": 1000},
    "ddp without overlap": {"dp": 4, "overlap": NO_OVERLAP},
    "fsdp": {"dp": 4, "zero": 3},
    "fsdp kept": {"dp": 2, "zero": 3, "reshard_after_forward": False},
    "tp": {"tp": 2, "sequence_parallel": False},
    "sp": {"tp": 2},
    "tp x dp": {"tp": 2, "dp": 2},
    "tp x dp without overlap": {"tp": 2, "dp": 2, "sequence_parallel": False, "overlap": NO_OVERLAP},
    "tp x fsdp": {"tp": 2, "dp": 2, "zero": 3},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
    "1f1b": {"pp": 4, "schedule": "1f1b"},
    "interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "looped_bfs": {"pp": 2, "vpp": 2, "schedule": "looped_bfs"},
    "interleaved_zb": {"pp": 2, "vpp": 2, "schedule": "interleaved_zb"},
    "zb_v": {"pp": 2, "schedule": "zb_v"},
    "dualpipe_v": {"pp": 2, "schedule": "dualpipe_v"},
    "pp x dp": {"pp": 2, "dp": 2, "schedule": "1f1b"},
    "pp x dp without overlap": {"pp": 2, "dp": 2, "schedule": "1f1b", "overlap": NO_OVERLAP},
    "interleaved x dp": {"pp": 2, "dp": 2, "vpp": 2, "schedule": "interleaved"},
    "pp x tp": {"pp": 2, "tp": 2, "schedule": "1f1b"},
}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{f"llama {name}": (LLAMA, layout, {}) for name, layout in LAYOUTS.items()},
    **{f"gpt {name}": (GPT, LAYOUTS[name], {}) for name in ("one", "ddp", "fsdp", "tp", "sp", "gpipe", "pp x tp")},
    **{f"tied {name}": (TIED, LAYOUTS[name], {}) for name in ("one", "ddp", "tp", "sp")},
    "moe one": (MOE, {}, {}),
    "moe ddp": (MOE, {"dp": 2}, {}),
    "moe ep": (MOE, {"dp": 4, "ep": 4}, {}),
    "moe ep without overlap": (MOE, {"dp": 2, "ep": 2, "overlap": NO_OVERLAP}, {}),
    "clip one": (LLAMA, {}, {"grad_clip": 0.1}),
    **{f"clip {name}": (LLAMA, LAYOUTS[name], {"grad_clip": 0.1}) for name in ("fsdp", "sp", "1f1b", "pp x tp")},
    "moe-clip one": (MOE, {}, {"grad_clip": 0.1}),
    "moe-clip ep": (MOE, {"dp": 4, "ep": 4}, {"grad_clip": 0.1}),
    "llama full recomputation": (LLAMA, {}, {"recompute": "full"}),
    "llama selective recomputation": (LLAMA, {"tp": 2}, {"recompute": "selective"}),
    "llama fsdp, full recomputation": (LLAMA, {"dp": 2, "zero": 3}, {"recompute": "full"}),
    "llama pipeline, some layers recomputed": (
        LLAMA,
        {"pp": 2, "schedule": "1f1b"},
        {"recompute": {"granularity": "full", "layers": 1}},
    ),
}
#: What rounding makes comparable by the loss alone.
ROUNDED = {"precision": "bf16", "grad_dtype": "fp32"}
JOBS |= {
    "bf16 one": (LLAMA, {}, ROUNDED),
    "bf16 ddp without overlap": (LLAMA, {"dp": 2, "overlap": NO_OVERLAP}, ROUNDED),
    "bf16 fsdp": (LLAMA, {"dp": 2, "zero": 3}, ROUNDED),
    "bf16 sp": (LLAMA, {"tp": 2}, ROUNDED),
}

#: For eight processes: a model of few layers for layouts that meet in each, one of many for pipelines, which have a
#: layer to a stage.
WIDE = LLAMA | {"heads": 8, "kv_heads": 8, "hidden": 64}
DEEP = LLAMA | {"layers": 16}
WIDE_MOE = WIDE | {"layers": 1, "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 24}}
MOE16 = WIDE_MOE | {"moe": WIDE_MOE["moe"] | {"experts": 16}}
TWICE, FOUR_TIMES = {"micro_batch": 2}, {"micro_batch": 4}
SIXTEEN = {"global_batch": 16}
THREE_AXES = {"tp": 2, "pp": 2, "dp": 2, "schedule": "1f1b"}
EIGHT: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "wide one": (WIDE, {}, FOUR_TIMES),
    "wide tp": (WIDE, {"tp": 8, "sequence_parallel": False}, FOUR_TIMES),
    "wide sp": (WIDE, {"tp": 8}, FOUR_TIMES),
    "wide ddp": (WIDE, {"dp": 8}, {}),
    "wide ddp without overlap": (WIDE, {"dp": 8, "overlap": NO_OVERLAP}, {}),
    "wide fsdp": (WIDE, {"dp": 8, "zero": 3}, {}),
    "wide fsdp kept": (WIDE, {"dp": 8, "zero": 3, "reshard_after_forward": False}, {}),
    "wide tp x pp": (WIDE, {"tp": 4, "pp": 2, "schedule": "1f1b"}, FOUR_TIMES),
    "wide tp x pp x dp": (WIDE, THREE_AXES, TWICE),
    "wide tp x pp x dp, interleaved": (WIDE, THREE_AXES | {"vpp": 2, "schedule": "interleaved"}, TWICE),
    "wide tp x dp": (WIDE, {"tp": 2, "dp": 4}, TWICE),
    "wide pp x dp": (WIDE, {"pp": 2, "dp": 4, "schedule": "1f1b"}, {}),
    "deep one": (DEEP, {}, SIXTEEN | FOUR_TIMES),
    "deep gpipe": (DEEP, {"pp": 8, "schedule": "gpipe"}, SIXTEEN),
    "deep 1f1b": (DEEP, {"pp": 8, "schedule": "1f1b"}, SIXTEEN),
    "deep interleaved": (DEEP, {"pp": 8, "vpp": 2, "schedule": "interleaved"}, SIXTEEN),
    "deep interleaved_zb": (DEEP, {"pp": 8, "vpp": 2, "schedule": "interleaved_zb"}, SIXTEEN),
    "deep zb_v": (DEEP, {"pp": 8, "schedule": "zb_v"}, SIXTEEN),
    "deep dualpipe_v": (DEEP, {"pp": 8, "schedule": "dualpipe_v"}, SIXTEEN),
    "deep zb_v x dp": (DEEP, {"pp": 4, "dp": 2, "schedule": "zb_v", "overlap": NO_OVERLAP}, SIXTEEN),
    "moe8 one": (WIDE_MOE, {}, {}),
    "moe8 ep": (WIDE_MOE, {"dp": 8, "ep": 8}, {}),
    "moe8 ep over tp": (WIDE_MOE, {"tp": 2, "dp": 4, "ep": 8, "etp": 1}, {}),
    "moe16 one": (MOE16, {}, {}),
    "moe16 ep": (MOE16, {"dp": 8, "ep": 8}, {}),
    "clip8 one": (WIDE, {}, {"grad_clip": 0.1}),
    "clip8 tp x pp x dp": (WIDE, THREE_AXES, {"grad_clip": 0.1, **TWICE}),
}
#: By the number of processes in a team.
TEAMS = {4: JOBS, 8: EIGHT}


def workload(job: str) -> dict[str, Any]:
    """What a workload file of ``job`` would hold."""
    model, layout, training = (JOBS | EIGHT)[job]
    return {
        "model": model,
        "parallelism": layout,
        "training": {**TRAINING, **training},
        "framework": "pytorch",
        "cluster": "dgx_h100",
    }


def _rank(rank: int, port: int, path: str, world: int) -> None:
    import torch
    import torch.distributed as dist

    from calibration.train.optimizer import local
    from calibration.train.process_groups import ProcessGroups
    from calibration.train.trainer import Trainer
    from simulator.config import load_workload

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    results = {}
    for name in TEAMS[world]:
        if rank == 0:
            print(name, file=sys.stderr, flush=True)
        resolved = load_workload(workload(name))
        groups = ProcessGroups.from_layout(resolved.parallelism, rank)
        found = None
        if groups is not None:
            trainer = Trainer(resolved, groups, torch.device("cpu"))
            begun = [local(parameter).detach().clone() for parameter in trainer.optimizer.parameters]
            losses = [float(trainer.step())]
            gradients = _gradients(trainer, groups.place, begun)
            losses += [float(trainer.step()) for _ in range(STEPS - 1)]
            trainer.close()
            found = {"losses": losses if trainer.last else None, "tp": groups.place["tp"], "gradients": gradients}
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, found)
        results[name] = _together([one for one in everyone if one is not None])
    if rank == 0:
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(results, stream)
    dist.barrier()
    os._exit(0)


def _gradients(trainer: Any, place: Mapping[str, int], begun: list[Any]) -> dict[str, list[float]]:
    """By parameter of the whole model: [inner product of gradient and initial value, square of the gradient's norm], of
    what only this rank has of them, so that the ranks' can be added up."""
    from calibration.train.optimizer import gradient, local

    layout = trainer.workload.parallelism
    counts = layout.layers_per_stage
    names = []
    for module, number in zip(trainer.modules, layout.stages_of(place["pp"]), strict=True):
        before = sum(counts[:number])
        for name, _ in module.named_parameters():
            names.append(_whole_name(name.removeprefix("module."), before))
    optimizer = trainer.optimizer
    dense = optimizer.dense if layout.zero == 3 or place["dp"] == 0 else []
    found = {}
    for index in (*dense, *optimizer.apart):
        grad = gradient(optimizer.parameters[index])
        assert grad is not None
        grad = local(grad).double()
        found[names[index]] = [float((grad * begun[index].double()).sum()), float(grad.square().sum())]
    return found


def _whole_name(name: str, before: int) -> str:
    """``layers.N`` with N counted through the stages."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return name
    number, _, rest = rest.partition(".")
    return f"layers.{int(number) + before}.{rest}"


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean loss of the replicas, and sums over the ranks."""
    losses = [one["losses"] for one in ranks if one["losses"] and one["tp"] == 0]
    gradients: dict[str, list[float]] = {}
    for one in ranks:
        for name, values in one["gradients"].items():
            before = gradients.get(name, [0.0, 0.0])
            gradients[name] = [a + b for a, b in zip(before, values, strict=True)]
    return {"losses": [sum(step) / len(losses) for step in zip(*losses, strict=True)], "gradients": gradients}


def main(path: str, world: int) -> None:
    import socket

    import torch.multiprocessing as mp

    import calibration.train.trainer  # noqa: F401
    from simulator.config import load_workload

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    load_workload(workload("llama one"))
    # Forked ranks find torch imported, and the files of the cluster and of its GPU read.
    mp.start_processes(_rank, (port, path, world), world, start_method="fork" if sys.platform == "linux" else "spawn")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""``list``: what is shipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simulator.cli.options import Json
from simulator.cli.outputs import STDOUT, check_outputs, write_json
from simulator.cli.terminal import show, table
from simulator.errors import InputError
from simulator.input_files import closest
from simulator.output.envelope import envelope
from simulator.units import format_count

if TYPE_CHECKING:
    from simulator.fabrics import Fabric
    from simulator.hardware.node import NodeSpec

Rows = list[dict[str, Any]]
PEAKS: tuple[Literal["bf16", "fp16", "fp8", "fp4"], ...] = ("bf16", "fp16", "fp8", "fp4")


def command(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="What to list: models, frameworks, topologies, gpus, schedules, profiles, stacks, and more below.",
        ),
    ],
    json: Json = None,
) -> None:
    """List what is shipped.

    KIND is models, frameworks, topologies, gpus, schedules, profiles, stacks, collectives, recipes, workloads or
    suites. Recipes are of products in 8 and 4 bits; suites are what validate compares with.

    \b
    Example:
      llmsim list models
    """
    if kind not in _ROWS:
        fix = closest(kind, _ROWS)
        raise InputError("nothing of this kind is shipped", file="KIND", found=kind, allowed=", ".join(_ROWS), fix=fix)
    check_outputs({"--json": json})
    rows = _ROWS[kind]()
    write_json(json, envelope("list", kind=kind, rows=rows))
    if json != STDOUT:
        show(table([{key.replace("_", " "): value for key, value in row.items()} for row in _grouped(rows)]))
        if kind == "gpus":
            show("-: the GPU has no such matrix units, or its profile nothing to price them by (FP8 of Ada and GB202).")


def _grouped(rows: Rows) -> Rows:
    """Without what the first column says again and again."""
    first = next(iter(rows[0]))
    return [
        {**row, first: ""} if before and row[first] == before[first] else row
        for before, row in zip([None, *rows], rows, strict=False)
    ]


def _models() -> Rows:
    from simulator.config import load_cluster, load_workload, presets
    from simulator.models import active_parameters, parameters

    one_gpu = {
        "training": {"seq": 2048, "global_batch": 1},
        "parallelism": {"dp": 1},
        "cluster": load_cluster("dgx_a100"),
    }
    rows = []
    for name, preset in presets().items():
        job = load_workload({"model": {"preset": name}, **one_gpu})
        model = job.model
        is_dense = "dense" in map(model.mlp, range(model.layers)) or bool(model.moe and model.moe.beside_dense)
        rows.append(
            {
                "name": name,
                "parameters": format_count(parameters(job)),
                "active": format_count(active_parameters(job)),
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "kv_heads": model.kv_heads,
                "ffn_hidden": model.ffn_hidden if is_dense else "-",
                "expert_ffn": model.moe.ffn_hidden if model.moe else "-",
                "experts": f"{model.moe.top_k} of {model.moe.experts}" if model.moe else "-",
                "vocab": model.vocab,
                "activation": model.activation,
                "source": preset["source"],
            }
        )
    return rows


def _topologies() -> Rows:
    from simulator.config import catalog, load_cluster
    from simulator.config.cluster import describe_fabric

    rows: Rows = []
    for name in catalog.names("cluster"):
        cluster = load_cluster(name)
        fabric = cluster.fabric
        rows += [
            {
                "gpu": " + ".join(node.gpus.types),
                "name": name,
                "gpus_per_node": node.gpus.count,
                "nvlink": _nvlink(node),
                "network_cards": _network_cards(node, fabric),
                "fabric": describe_fabric(fabric),
            }
            for node in cluster.kinds
        ]
    return sorted(rows, key=lambda row: row["gpu"])


def _network_cards(node: NodeSpec, fabric: Fabric) -> str:
    cards = node.nics
    if not cards.count or not cards.bandwidth_bps:
        return "none"
    return f"{cards.count} x {cards.bandwidth_bps / 1e9:.0f} Gb/s {fabric.transport}"


def _nvlink(node: NodeSpec) -> str:
    link = node.nvlink
    if link.kind == "none":
        return "none"
    device = "link" if link.kind == "links" else "GPU"
    return f"{link.name} {link.kind}, {link.bandwidth_Bps / 1e9:.0f} GB/s per {device} and direction"


def _gpus() -> Rows:
    from simulator.config import catalog
    from simulator.config.profile import load_profile

    rows = []
    for name in catalog.names("profile"):
        profile = load_profile(name)
        spec = profile.gpu_spec
        rows.append(
            {
                "name": profile.gpu,
                **{
                    f"{dtype}_TFLOP/s": round(spec.peak_flops_per_s[dtype].value / 1e12)
                    if dtype in spec.peak_flops_per_s
                    else "-"
                    for dtype in PEAKS
                },
                "memory_GiB": round(spec.memory_bytes.value / 2**30, 1),
                "memory_GB/s": round(spec.memory_bandwidth_Bps.value / 1e9),
                "SMs": spec.sms,
                "profile": name,
                "kind": profile.kind,
            }
        )
    return rows


def _profiles() -> Rows:
    from simulator.config import catalog
    from simulator.config.profile import load_profile

    profiles = {name: load_profile(name) for name in catalog.names("profile")}
    return [
        {
            "name": name,
            "gpu": profile.gpu,
            "kind": profile.kind,
            "like": profile.like or "-",
            "date": profile.date,
            "sources": len(profile.sources),
        }
        for name, profile in profiles.items()
    ]


def _stacks() -> Rows:
    from simulator.config import catalog
    from simulator.config.stack import load_stack

    rows = []
    for name in catalog.names("stack"):
        stack = load_stack(name)
        fitted = stack.fitted
        rows.append(
            {
                "name": name,
                "gpu": stack.gpu,
                "fabric": stack.fabric,
                "software": stack.software,
                "fitted_on": f"{fitted.n_gpus} GPUs" if fitted else "-",
                "error": f"{fitted.rows.geometric_mean:.1%}" if fitted else "-",
                "of_other_numbers": f"{fitted.held_out.geometric_mean:.1%}" if fitted and fitted.held_out else "-",
            }
        )
    return rows


def _schedules() -> Rows:
    from simulator.schedules import SCHEDULES

    return [
        {
            "name": name,
            "chunks": "several" if schedule.chunks is None else str(schedule.chunks),
            "paper": schedule.paper,
        }
        for name, schedule in SCHEDULES.items()
    ]


def _collectives() -> Rows:
    from simulator.network.collectives import OPERATIONS

    return [
        {
            "operation": op,
            "auto chooses among": ", ".join(entry.nccl),
            "by name also": ", ".join(name for name in entry.algorithms if name not in entry.nccl),
        }
        for op, entry in OPERATIONS.items()
    ]


def _recipes() -> Rows:
    from simulator.precisions import PRODUCT_RECIPES

    return [
        {
            "name": name,
            "key": recipe.key,
            "frameworks": ", ".join(recipe.frameworks) + (" (compiled)" if recipe.compiled else ""),
            "what": recipe.about,
        }
        for name, recipe in PRODUCT_RECIPES.items()
    ]


def _frameworks() -> Rows:
    from simulator.frameworks import FRAMEWORKS

    return [
        {"name": name, "compiled": "yes" if framework.compiled else "no", "what": framework.about}
        for name, framework in FRAMEWORKS.items()
    ]


def _workloads() -> Rows:
    from simulator.config import catalog, load_workload
    from simulator.output.job_text import describe_layout

    rows = []
    for name in catalog.names("workload"):
        job = load_workload(name)
        layout = job.parallelism
        rows.append(
            {
                "name": name,
                "layers": job.model.layers,
                "hidden": job.model.hidden,
                "layout": describe_layout(layout.model_dump(mode="json")),
                "cluster": f"{job.cluster.n_nodes} x {job.cluster.name}",
                "note": job.note,
            }
        )
    return rows


def _suites() -> Rows:
    from simulator.validation import SUITES, collectives, memory_suite, read_rows

    steps = [(name, "step time", len(read_rows(suite.table)), suite.about) for name, suite in SUITES.items()]
    memory = [
        (name, "memory", len(source.rows), source.suite.about)
        for name, suite in memory_suite.MEMORY_SUITES.items()
        for source in suite.sources
    ]
    collective_suites = [(collectives.NAME, "time", len(collectives.measurements()), collectives.ABOUT)]
    return [
        dict(zip(("name", "of", "rows", "measured"), row, strict=True)) for row in (*steps, *memory, *collective_suites)
    ]


_ROWS: dict[str, Callable[[], Rows]] = {
    "models": _models,
    "frameworks": _frameworks,
    "topologies": _topologies,
    "gpus": _gpus,
    "schedules": _schedules,
    "profiles": _profiles,
    "stacks": _stacks,
    "collectives": _collectives,
    "recipes": _recipes,
    "workloads": _workloads,
    "suites": _suites,
}

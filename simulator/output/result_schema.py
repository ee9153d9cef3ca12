"""JSON Schema of the result of `run`, for programs that read it."""

from __future__ import annotations

from typing import Any

from simulator.output.envelope import SCHEMA_VERSION
from simulator.timeline import COMMUNICATION

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer"}
_TRUTH: Schema = {"type": "boolean"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
_ANYTHING: Schema = {"type": "object"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with just these keys."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _numbers(*names: str) -> dict[str, Schema]:
    return dict.fromkeys(names, _NUMBER)


def _change() -> Schema:
    return _object(
        {
            "change": _ANYTHING,
            "options": _TEXT,
            **_numbers("step_time_s", "saved_s", "peak_bytes", "capacity_bytes"),
            "fits": _TRUTH,
        }
    )


def _memory() -> Schema:
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "peak", "capacity", "peak_at_s")
    stage = {"type": "object", "required": ["stage", *parts], "properties": {"stage": _COUNT, **_numbers(*parts)}}
    host = {"type": "object", "required": ["peak_bytes", "capacity_bytes", "nvme_bytes", "fits"]}
    return _object(
        {
            **_numbers("capacity_bytes", "peak_bytes", "peak_reserved_bytes", "peak_allocated_bytes"),
            "fits": _TRUTH,
            "per_stage": _list(stage),
            "advice": _TEXTS,
        },
        {"host": host, "second_step_bytes": _NUMBER},
    )


def _communication() -> Schema:
    links = _object({"links": _TEXT, "kind": _TEXT, "count": _COUNT, **_numbers("bytes", "busy_s")})
    kind = _object(
        {
            **_numbers("bytes_per_gpu", "time_s", "exposed_s"),
            "algorithm": _or_null(_TEXT),
            "links": _list(links),
        }
    )
    return _object(dict.fromkeys(COMMUNICATION, kind))


def _contention() -> Schema:
    flow = _object(
        {
            "job": _or_null(_TEXT), "axis": _TEXT, "op": _TEXT, "at_once": _COUNT,
            **_numbers("seconds_together", "lost_s"),
        }
    )  # fmt: skip
    return _list(_object({"link": _TEXT, "kind": _TEXT, "count": _COUNT, "flows": _list(flow)}))


def _accuracy() -> Schema:
    return _or_null(
        {
            "type": "object",
            "required": ["interval_s", "level", "bias", "n_rows", "rows", "sources", "all_sources", "alike", "unlike"],
            "properties": {
                "interval_s": {**_list(_NUMBER), "minItems": 2, "maxItems": 2},
                **_numbers("level", "bias"),
                "n_rows": _COUNT,
                "alike": _TEXTS,
                "unlike": _TEXTS,
            },
        }
    )


def _speed() -> dict[str, Schema]:
    """Return the entries on throughput and efficiency."""
    figures = _numbers(
        "tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_step", "model_flops_per_step_causal",
        "hardware_flops_per_step", "mfu", "mfu_causal", "hfu", "model_flops_per_s_per_gpu",
        "peak_flops_per_s_per_gpu", "idle_in_passes_fraction", "host_bound_fraction",
    )  # fmt: skip
    only_some_jobs = (
        *("fp8_peak_flops_per_s_per_gpu", "fp4_peak_flops_per_s_per_gpu", "bubble_fraction", "bubble_ratio"),
        "slower_host_step_time_s",
    )
    return {
        **figures,
        "throughput_counts": _TEXT,
        "peak_precision": _TEXT,
        **dict.fromkeys(only_some_jobs, _or_null(_NUMBER)),
    }


def _stages() -> Schema:
    return _object(
        {
            "per_stage": _list(_object({"stage": _COUNT, "layers": _COUNT, "seconds": _NUMBER})),
            "slowest_over_mean": _NUMBER,
            "layers_per_stage": _or_null(_list(_COUNT)),
            "step_time_s": _or_null(_NUMBER),
        }
    )


def _whole_run() -> Schema:
    counts = dict.fromkeys(("tokens", "steps", "server_gpus"), _COUNT)
    return _object({**counts, **_numbers("days", "gpu_hours"), "cost": _or_null(_NUMBER)})


def run_result_schema() -> Schema:
    """Return the schema of one run's result, without ``$schema``."""
    breakdown = _object(
        {
            **_numbers("compute", "recompute", "optimizer", "host", "bubble", "other"),
            "exposed": _object(_numbers(*COMMUNICATION)),
        }
    )
    link = _object({"name": _TEXT, "kind": _TEXT, "count": _COUNT, **_numbers("bytes", "utilisation")})
    change = _change()
    required: dict[str, Schema] = {
        "schema_version": {"const": SCHEMA_VERSION},
        "command": {"const": "run"},
        "warnings": _TEXTS,
        "name": _TEXT,
        "cluster": _TEXT,
        "cluster_changes": _TEXTS,
        "calibration": {"type": "object", "required": ["name", "gpu", "date", "source", "kind"]},
        "n_gpus": _COUNT,
        "framework": {"type": "object", "required": ["name", "version", "compile", "cuda_graphs"]},
        "parallelism": _ANYTHING,
        "n_microbatches": _COUNT,
        "training": _object(
            dict.fromkeys(("seq", "micro_batch", "global_batch"), _COUNT)
            | dict.fromkeys(("precision", "recompute", "optimizer"), _TEXT)
        ),
        "fp8": _or_null(_object({"recipe": _TEXT, "gather": _TEXT})),
        "fp4": _or_null(_object({"recipe": _TEXT})),
        **_numbers("params_total", "params_active", "params_trained"),
        "encoder": _or_null(_object(_numbers("layers", "images", "patches_per_image"))),
        "tuning": _or_null(_ANYTHING),
        "step_time_s": _NUMBER,
        "steady_period": _TRUTH,
        **_speed(),
        "time_breakdown_s": breakdown,
        "stages": _stages(),
        "communication": _communication(),
        "links": _list(link),
        "contention": _contention(),
        "memory": _memory(),
        "critical_path": _list(_object({"class": _TEXT, **_numbers("seconds", "share")})),
        "accuracy": _accuracy(),
        "nothing_comparable": _or_null(_TEXTS),
        "simulation": _object(
            {"events": _COUNT, "ops": _COUNT, "wall_s": _NUMBER, "ranks_simulated": _COUNT, "ranks_total": _COUNT}
        ),
    }  # fmt: skip
    advice = _object(
        {
            "changes": _list(change), "too_large": _or_null(change),
            **dict.fromkeys(("simulated", "refused", "left"), _COUNT),
        }
    )  # fmt: skip
    optional = {"staleness": _NUMBER, "run": _whole_run(), "what_to_change": advice, "sharing": _ANYTHING}
    return {"title": "Result of llmsim run", **_object(required, optional)}

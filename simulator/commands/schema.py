"""JSON Schemas: of workload and cluster files, and of the result of `run`."""

from __future__ import annotations

from typing import Any

from simulator.config import Workload
from simulator.config.section import section_of
from simulator.errors import InputError
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.output.result_schema import run_result_schema


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a workload, a cluster or a result. Raises `InputError` for any other ``kind``."""
    if kind not in ("workload", "cluster", "result"):
        raise InputError("has no schema", file="kind", found=kind, allowed="workload, cluster, result")
    if kind == "result":
        schema = run_result_schema()
    else:
        schema = (Workload if kind == "workload" else section_of(ClusterSpec)).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}

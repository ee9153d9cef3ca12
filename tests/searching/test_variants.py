"""Variants of a workload: the same as a file with the same keys, and refused by the same rules."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.config import load_workload
from simulator.config.variants import Variants
from simulator.errors import InputError
from tests.support.jobs import job

CHANGES: list[dict[str, Any]] = [
    {"parallelism.tp": 2, "parallelism.pp": 2, "parallelism.dp": 2},
    {"parallelism.dp": 8, "parallelism.zero": 3, "training.recompute": "full"},
    {"parallelism.pp": 4, "parallelism.vpp": 2, "parallelism.schedule": "interleaved", "parallelism.dp": 2},
    {"parallelism.pp": 2, "parallelism.schedule": "zb_h2", "parallelism.dp": 4, "training.micro_batch": 2},
    {"parallelism.cp": 4, "parallelism.dp": 2, "training.recompute": {"granularity": "full", "layers": 1}},
]
JOBS: dict[str, dict[str, Any]] = {
    "defaults": job(),
    "another framework": job(framework="deepspeed"),
    "fp32": job(training__precision="fp32"),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_equals_a_file_with_the_same_keys(name: str, number: int) -> None:
    """Defaults that follow from other keys follow anew."""
    base, changes = load_workload(JOBS[name]), CHANGES[number]
    variant, loaded = Variants(base, base.cluster).variant(changes), load_workload(JOBS[name], changes)
    assert variant.model_dump(exclude={"cluster"}) == loaded.model_dump(exclude={"cluster"})


def test_a_split_of_the_layers_stays_where_the_number_of_stages_does() -> None:
    base = load_workload(job(parallelism={"pp": 2, "layers_per_stage": [5, 3]}))
    variants = Variants(base, base.cluster)
    assert variants.variant({"parallelism.tp": 2, "parallelism.dp": 1}).parallelism.layers_per_stage == (5, 3)
    assert variants.variant({"parallelism.pp": 4, "parallelism.dp": 1}).parallelism.layers_per_stage == (2, 2, 2, 2)
    chosen = variants.variant({"parallelism.pp": 4, "parallelism.dp": 1, "parallelism.layers_per_stage": [3, 2, 2, 1]})
    assert chosen.parallelism.layers_per_stage == (3, 2, 2, 1)


@pytest.mark.parametrize(
    "changes",
    [{"parallelism.tp": 3}, {"parallelism.pp": 3}, {"parallelism.ep": 2}, {"training.micro_batch": 32}],
)
def test_rules_refuse_what_they_refuse_in_a_file(changes: dict[str, Any]) -> None:
    base = load_workload(job())
    with pytest.raises(InputError) as of_variant:
        Variants(base, base.cluster).variant({"parallelism.dp": 1, **changes})
    with pytest.raises(InputError) as of_file:
        load_workload(job(), {"parallelism.dp": 1, **changes})
    assert of_variant.value.key == of_file.value.key
    assert of_variant.value.message == of_file.value.message


def test_a_value_of_the_wrong_type_is_refused_by_its_key() -> None:
    base = load_workload(job())
    with pytest.raises(InputError) as refused:
        Variants(base, base.cluster).variant({"parallelism.tp": "many"})
    assert refused.value.key == "parallelism.tp"

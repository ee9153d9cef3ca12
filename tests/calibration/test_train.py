"""`python -m calibration train`: every layout trains the same model as one process, and leaves the same records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.train_command import team_of
from tests.support.training import EIGHT, JOBS, LLAMA

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def found_by_eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of eight."""
    return team_of(8, tmp_path_factory.mktemp("team") / "found.json")


def alone(found: dict[str, Any], job: str) -> dict[str, Any]:
    """What one process finds for the model and training of ``job``."""
    results: dict[str, Any] = found[f"{job.split()[0]} one"]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_layout_trains_what_one_process_does(job: str, found: dict[str, Any]) -> None:
    check_losses(job, found)
    if not job.startswith("bf16"):
        check_gradients(job, found)


def check_losses(job: str, found: dict[str, Any]) -> None:
    """Layouts in fp32 differ in the order of sums alone, some 1e-7. Numbers in bf16 are rounded to 2^-9."""
    losses, expected = found[job]["losses"], alone(found, job)["losses"]
    assert losses == pytest.approx(expected, rel=1e-3 if job.startswith("bf16") else 2e-6)
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(math.log(LLAMA["vocab"]), rel=0.05)  # nothing is known at first


@pytest.mark.slow
@pytest.mark.parametrize("job", EIGHT)
def test_eight_processes_train_what_one_does(job: str, found_by_eight: dict[str, Any]) -> None:
    check_losses(job, found_by_eight)
    check_gradients(job, found_by_eight)


def check_gradients(job: str, found: dict[str, Any]) -> None:
    """Every parameter of the whole model has a gradient with the same norm, and the same component along its initial
    value, both added up over the ranks' shards. A sum over too many or too few ranks changes them, and
    so does a shard from another place."""
    gradients, expected = found[job]["gradients"], alone(found, job)["gradients"]
    assert gradients.keys() == expected.keys()
    for name, (component, square) in gradients.items():
        assert square == pytest.approx(expected[name][1], rel=1e-5), name
        assert component == pytest.approx(expected[name][0], abs=1e-5 * math.sqrt(square) + 1e-12), name

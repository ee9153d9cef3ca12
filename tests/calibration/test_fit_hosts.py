"""What hosts take, fitted to steps of narrow models."""

from __future__ import annotations

import json

import pytest

from calibration.compare.record import Run
from calibration.fit import frameworks
from calibration.fit.cases import STEPS, Cases, steps_in
from simulator.config.profile import load_profile
from tests.support.fitting import CHOICES


def test_what_hosts_take_with_megatron_core_follows_from_its_steps() -> None:
    """The shipped figures are those of the fit. Each step is met within a fifth, all within a tenth in the mean."""
    profile = load_profile("h200-sxm-141gb")
    steps = tuple(steps_in(CHOICES.parent / STEPS))
    part = frameworks.fit(Cases((), (), steps=steps), profile)
    shipped, fitted = profile.host.launch_s["megatron"], part.figures["host.launch_s.megatron"]
    assert [*part.figures] == ["host.launch_s.megatron", "sources.host_steps"]
    assert shipped.forward_s == pytest.approx(fitted["forward_s"], rel=1e-3)
    assert shipped.backward_s == pytest.approx(fitted["backward_s"], rel=1e-3)
    assert shipped.optimizer_s == pytest.approx(fitted["optimizer_s"], rel=1e-3)
    assert shipped.around_s.keys() == fitted["around_s"].keys()
    for kind, seconds in fitted["around_s"].items():
        assert shipped.around_s[kind] == pytest.approx(seconds, rel=1e-3)
    errors = [abs(point.error) for point in part.points]
    assert len(errors) == len(steps) == 13
    assert max(errors) < 0.2
    assert sum(errors) / len(errors) < 0.1


def test_steps_of_a_host_half_as_fast_give_the_same_figures() -> None:
    """Steps and the probes beside them take twice as long: what the usual host takes stays."""
    profile = load_profile("h200-sxm-141gb")
    steps = tuple(steps_in(CHOICES.parent / STEPS))
    slow = tuple(_twice(run) for run in steps)
    once, twice = (frameworks.fit(Cases((), (), steps=runs), profile).figures for runs in (steps, slow))
    key = "host.launch_s.megatron"
    assert twice[key]["forward_s"] == pytest.approx(once[key]["forward_s"], rel=0.1)


def _twice(run: Run) -> Run:
    """Return the run on a host half as fast."""
    data = json.loads(json.dumps(run.model_dump(mode="json", by_alias=True)))
    data["step_time_s"]["median"] *= 2
    for rank in data["ranks"]:
        rank["host"] = {name: [2 * seconds for seconds in values] for name, values in rank["host"].items()}
    return Run.model_validate(data)

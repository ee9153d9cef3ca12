"""The seconds that hosts take are fitted to steps of narrow models."""

from __future__ import annotations

import json

import pytest

from calibration.compare.record import RunRecord
from calibration.fit import frameworks, hosts
from calibration.fit.cases import STEPS, Cases, steps_in
from calibration.fit.part import ProfilePart, residuals
from simulator.config import load_workload
from simulator.config.profile import load_profile
from simulator.errors import InputError
from simulator.frameworks.framework import LaunchSection
from tests.support.fitting import CHOICES

SECTIONS = ["compiled", "compiled_model", "deepspeed", "hugging_face", "megatron", "torchtitan"]


@pytest.fixture(scope="module")
def host_steps() -> tuple[RunRecord, ...]:
    return tuple(steps_in(CHOICES.parent / STEPS))


@pytest.fixture(scope="module")
def fitted_hosts(host_steps: tuple[RunRecord, ...]) -> ProfilePart:
    return frameworks.fit(Cases((), (), steps=host_steps), load_profile("h200-sxm-141gb"))


def test_steps_that_hosts_bound_give_a_section_for_each_software(fitted_hosts: ProfilePart) -> None:
    assert [*fitted_hosts.figures] == [*(f"host.launch_s.{name}" for name in SECTIONS), "sources.host_steps"]


@pytest.mark.parametrize("section", SECTIONS)
def test_what_hosts_take_follows_from_steps_that_they_bound(fitted_hosts: ProfilePart, section: LaunchSection) -> None:
    """The shipped figures are those of the fit. Steps are met within an eighth in the mean, each within a quarter."""
    profile = load_profile("h200-sxm-141gb")
    shipped = profile.host.launch_s[section]
    fitted = fitted_hosts.figures[f"host.launch_s.{section}"]
    assert shipped.forward_s == pytest.approx(fitted["forward_s"], rel=1e-3)
    assert shipped.backward_s == pytest.approx(fitted["backward_s"], rel=1e-3)
    assert shipped.optimizer_s == pytest.approx(fitted["optimizer_s"], rel=1e-3)
    assert shipped.around_s == pytest.approx(fitted["around_s"], rel=1e-3)
    anew = residuals(fitted_hosts.points)[f"launch.{section}"]["fitted"]
    told = profile.residuals[f"launch.{section}"].fitted
    assert told is not None
    assert (told.n, told.mean, told.max) == pytest.approx((anew["n"], anew["mean"], anew["max"]), abs=0.001)
    assert told.n >= 5
    assert told.max < 0.25
    assert told.mean < 0.125


def test_points_are_whole_steps(fitted_hosts: ProfilePart, host_steps: tuple[RunRecord, ...]) -> None:
    """Not what is left of a step without the kinds that are not fitted."""
    assert sorted(point.measured_s for point in fitted_hosts.points) == sorted(
        run.step_time_s.median for run in host_steps
    )


def test_steps_that_alone_tell_a_kind_fit_themselves(fitted_hosts: ProfilePart) -> None:
    """One step of each of three sections has recomputation. Whatever it took, the fit meets it."""
    alone = [point for point in fitted_hosts.points if point.fits_itself]
    assert [point.group.removeprefix("launch.") for point in alone] == [
        "compiled",
        "compiled_model",
        "torchtitan",
    ]
    assert [point.error for point in alone] == pytest.approx([0.0] * 3, abs=1e-9)


def test_a_kind_that_one_equation_has_is_told_by_it() -> None:
    """The first alone has a checkpoint. The third alone has a hook, whose seconds came out as none."""
    counts: list[hosts.Counts] = [{"kernel": 2.0, "checkpoint": 1.0}, {"kernel": 2.0}, {"kernel": 1.0, "hook": 1.0}]
    equations = [hosts.Equation("x", 1.0, one) for one in counts]
    assert hosts.told_by_one(equations, {"kernel": 0.5, "checkpoint": 0.1, "hook": 0.0}) == [True, False, False]


def test_a_step_that_leaves_nothing_to_fit_is_named(host_steps: tuple[RunRecord, ...]) -> None:
    """A microsecond is less than what plain PyTorch takes for the kinds that are not fitted."""
    run = next(run for run in host_steps if run.name == "th2_tp_llama_l16_two")
    data = json.loads(json.dumps(run.model_dump(mode="json", by_alias=True)))
    data["step_time_s"]["median"] = 1e-6
    with pytest.raises(InputError, match=f"{run.name}: a step is no longer than"):
        frameworks.fit(Cases((), (), steps=(RunRecord.model_validate(data),)), load_profile("h200-sxm-141gb"))


def test_steps_of_a_host_half_as_fast_give_the_same_figures(host_steps: tuple[RunRecord, ...]) -> None:
    """Steps and the probes beside them take twice as long: what the usual host takes stays."""
    profile = load_profile("h200-sxm-141gb")
    steps = tuple(run for run in host_steps if run.name.startswith("mh"))
    slow = tuple(_twice(run) for run in steps)
    once, twice = (frameworks.fit(Cases((), (), steps=runs), profile).figures for runs in (steps, slow))
    key = "host.launch_s.megatron"
    assert twice[key]["forward_s"] == pytest.approx(once[key]["forward_s"], rel=0.1)


def test_backward_passes_that_a_record_tells_are_a_part_of_their_own(host_steps: tuple[RunRecord, ...]) -> None:
    """Autograd's thread issues gradients and their sums in these seconds. The rest of the step is the main thread's."""
    run = next(run for run in host_steps if run.name == "mh1_gpt_l16_passes")
    backward_s = run.ranks[0].host.backward_s
    assert backward_s is not None
    rest, backward = frameworks.issued_parts(run, load_workload(run.workload.resolved), hosts.Pace(0.02264, 0.03891))
    assert (rest.seconds, backward.seconds) == (pytest.approx(run.step_time_s.median - backward_s), backward_s)
    assert {"forward_matmul", "optimizer", "update"} <= rest.counts.keys()
    assert {"backward_matmul", "gradient", "autograd"} <= backward.counts.keys()
    assert rest.counts.keys() & backward.counts.keys() == {"graph"}  # of layers, each way


def test_backward_passes_half_as_long_have_ops_half_as_long(host_steps: tuple[RunRecord, ...]) -> None:
    """Least squares are of relative errors, so that all that only backward passes have takes half of its seconds.

    Those that run layers again have forward ops too, and are left out.
    """
    profile = load_profile("h200-sxm-141gb")
    steps = tuple(run for run in host_steps if run.name.endswith("_passes") and "full" not in run.name)
    before, after = (
        frameworks.fit(Cases((), (), steps=runs), profile).figures["host.launch_s.megatron"]
        for runs in (steps, tuple(_with_backward(run, 0.5) for run in steps))
    )
    for kind, seconds in before["backward_s"].items():
        assert after["backward_s"][kind] == pytest.approx(seconds / 2, rel=1e-3)
    for kind in ("autograd", "gradient"):
        assert after["around_s"][kind] == pytest.approx(before["around_s"][kind] / 2, rel=1e-3)


def _with_backward(run: RunRecord, share: float) -> RunRecord:
    """Return the run with this share of its backward seconds, where it tells them."""
    data = json.loads(json.dumps(run.model_dump(mode="json", by_alias=True)))
    for rank in data["ranks"]:
        if rank["host"]["backward_s"] is not None:
            rank["host"]["backward_s"] *= share
    return RunRecord.model_validate(data)


def test_collectives_of_ranks_that_are_not_there_take_no_time(host_steps: tuple[RunRecord, ...]) -> None:
    """The first of two ranks, made alone, issued as many collectives as a real one, which are not counted."""
    usual = hosts.Pace(0.02264, 0.03891)
    by_name = {run.name: run for run in host_steps}
    alone, real = by_name["th2_tp_llama_l16"], by_name["th2_tp_llama_l16_two"]
    assert (alone.n_gpus, real.n_gpus) == (1, 2)
    counts = [
        frameworks.issued_parts(run, load_workload(run.workload.resolved), usual)[0].counts for run in (alone, real)
    ]
    assert "collective" not in counts[0]
    assert counts[1]["collective"] > 0
    assert counts[0]["dtensor"] > counts[1]["collective"]


def _twice(run: RunRecord) -> RunRecord:
    """Return the run on a host half as fast."""
    data = json.loads(json.dumps(run.model_dump(mode="json", by_alias=True)))
    data["step_time_s"]["median"] *= 2
    for rank in data["ranks"]:
        rank["host"] = {name: _doubled(value) for name, value in rank["host"].items()}
    return RunRecord.model_validate(data)


def _doubled(value: list[float] | float | None) -> object:
    """Return twice the seconds; nothing of what was not measured."""
    if isinstance(value, list):
        return [2 * seconds for seconds in value]
    return None if value is None else 2 * value

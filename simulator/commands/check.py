"""Python entry point of a check without simulation: `check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from simulator import models
from simulator.api import check_algorithm, cluster_of
from simulator.config import Workload, load_workload
from simulator.config.loading import written_in
from simulator.config.profile import load_profile
from simulator.errors import located
from simulator.lowering import layout
from simulator.results import Result
from simulator.units import format_parameters


@dataclass(frozen=True, repr=False)
class CheckResult(Result):
    """A legal workload, with every default filled in."""

    command: ClassVar[str] = "check"

    workload: Workload

    @cached_property
    def warnings(self) -> list[str]:
        """Notes on the workload."""
        return models.warnings(self.workload)

    @cached_property
    def params_total(self) -> int:
        """Parameters of the model."""
        return models.parameters(self.workload)

    @cached_property
    def params_active(self) -> int:
        """Parameters that a token meets."""
        return models.active_parameters(self.workload)

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """Axis -> its groups of several ranks, each a list of ranks in the order of the group."""
        placed = layout(self.workload).groups
        return {str(axis): [list(members) for members in placed[axis]] for axis in placed if len(placed[axis][0]) > 1}

    def content(self) -> dict[str, Any]:
        """Return the workload and its sizes under the names of the JSON output."""
        return {
            "workload": self.workload.model_dump(mode="json"),
            "params_total": self.params_total,
            "params_active": self.params_active,
        }

    def __repr__(self) -> str:
        """Return the model's size and the number of ranks in a line."""
        size = format_parameters(self.params_total, self.params_active)
        return f"{self.workload.name}: legal, {size} on {self.workload.n_ranks:,} ranks"


def check(workload: str | Path | Mapping[str, Any] | Workload, *, set: Mapping[str, Any] | None = None) -> CheckResult:
    """Check ``workload``, which is what `run` takes, without simulating it.

    Raises `InputError` where it is not legal.
    """
    job = workload if isinstance(workload, Workload) and not set else load_workload(workload, set or {})
    for profile in job.calibrations.values():
        load_profile(profile)
    with located(written_in(workload if isinstance(workload, str | Path) else None, set or {}, "set")):
        check_algorithm(job, cluster_of(job))
    return CheckResult(job)

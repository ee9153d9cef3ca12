"""The figures of one run that are compared, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from calibration.compare.kernels import PARTS, simulated_kernels
from simulator.step_result import StepResult


@dataclass(frozen=True)
class Figures:
    """``peak_allocated_bytes``: by rank, what ``torch.cuda.max_memory_allocated`` says of steps but the first ones.
    ``class_s``: seconds of kernels by class, and of communication by `PARTS` of it (None: the record does not tell), by
    rank. ``exposed_s``: communication runs and no other kernel, mean over ranks. ``bubble``: idle share of pipelines,
    None without them. None elsewhere: not measured."""

    step_time_s: float
    mfu: float | None
    peak_allocated_bytes: tuple[float, ...]
    class_s: Mapping[str, tuple[float, ...] | None]
    exposed_s: float | None
    bubble: float | None

    def to_dict(self) -> dict[str, Any]:
        class_s = {name: seconds and list(seconds) for name, seconds in self.class_s.items()}
        return asdict(self) | {"peak_allocated_bytes": list(self.peak_allocated_bytes), "class_s": class_s}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Figures:
        """Return the figures that `to_dict` gave as ``data``.

        Figures from before communication had parts have none. Figures from before ranks were told apart have the mean
        in the place of all.
        """
        class_s: dict[str, tuple[float, ...] | None] = dict.fromkeys(chain(*PARTS.values()))
        for name, seconds in data["class_s"].items():
            class_s[name] = (seconds,) if isinstance(seconds, int | float) else seconds and tuple(seconds)
        return cls(**{**data, "peak_allocated_bytes": tuple(data["peak_allocated_bytes"]), "class_s": class_s})


def pipelines(result: StepResult) -> tuple[tuple[int, ...], ...]:
    """Ranks of each pipeline; none where there is one stage."""
    return tuple(tuple(ranks) for ranks in result.program.groups.get("pp", ()) if len(ranks) > 1)


def simulated_figures(result: StepResult) -> Figures:
    """The figures of a simulated step."""
    kernels, n_ranks = simulated_kernels(result), result.spans.n_ranks
    by_rank = {memory.rank: memory.allocated for memory in result.memories}
    step = result.to_dict()
    return Figures(
        step_time_s=step["step_time_s"],
        mfu=step["mfu"],
        peak_allocated_bytes=tuple(by_rank[like] for like in result.spans.simulated_as),
        class_s={**kernels.seconds(n_ranks), **kernels.parts(n_ranks)},
        exposed_s=kernels.exposed_s(n_ranks),
        bubble=kernels.bubble(pipelines(result)),
    )

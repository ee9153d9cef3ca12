"""Rows of measurements by kind: what each must tell, checked as sections of input files are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from calibration.narrow import LAYOUTS, MODELS
from simulator.bounds import Positive
from simulator.config.section import AsTuple, Section
from simulator.errors import InputError
from simulator.input_files import brief


def _lists(value: object) -> object:
    """YAML and JSON have lists only."""
    return tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else value


Lists = BeforeValidator(_lists)


class ExtensibleSection(Section):
    """A line of which more may be told; what is read of it is checked."""

    model_config = ConfigDict(extra="allow")


class Environment(ExtensibleSection):
    gpu: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    command: str = ""
    ranks: Annotated[int, Field(ge=1)] = 1
    nvls: bool | None = None
    l2_bytes: Annotated[int, Field(ge=0)] | None = None
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    nvidia_smi: Annotated[tuple[str, ...], AsTuple] = ()


class MeasuredRow(ExtensibleSection):
    """A line as all kinds have it; figures that a kind has beside are those of calibration/measurements/README.md."""

    kind: str
    op: str
    params: dict[str, Any]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], AsTuple, Field(min_length=1)]
    bytes: Annotated[float, Field(ge=0)] | None = None
    p10_s: Positive | None = None
    p90_s: Positive | None = None
    host_s: Positive | None = None
    each_s: Annotated[tuple[Positive, ...], AsTuple] | None = None
    series_s: Annotated[tuple[Positive, ...], AsTuple] | None = None
    sm_mhz: Any = None
    power_w: Any = None

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        """Raise `InputError` unless all parameters that tell the kind's cases are there, and numbers are sizes."""
        for name in case_parameters(self.kind, self.op):
            if name not in self.params:
                raise InputError("a required key is missing", key=f"params.{name}")
        for name, value in self.params.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            valid = number and (name in FRACTIONS or value == int(value))
            if name in WORDS:
                valid = value in WORDS[name] if WORDS[name] else isinstance(value, bool | str)
            if not valid:
                words = ", ".join(map(str, WORDS.get(name, ()))) or "a text, true or false"
                allowed = words if name in WORDS else "a number > 0" if name in FRACTIONS else "a whole number > 0"
                raise InputError("is no size of a case", key=f"params.{name}", found=brief(value), allowed=allowed)
        return self


#: Parameters of cases that are no numbers, and which words are known where not any may be.
WORDS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("dtype", "backend", "kernel", "of", "beside", "part"), ()),
    **dict.fromkeys(("skew", "causal"), (True, False)),
    "role": ("fwd", "dgrad", "wgrad"),
    "model": tuple(MODELS),
    "layout": tuple(LAYOUTS),
    "recompute": ("selective", "full"),
}
#: Parameters that may lie between whole numbers.
FRACTIONS = ("share", "period_s", "seconds")
#: Kind of row -> the parameters that tell each of its cases.
CASE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k", "role", "dtype"),
    "attention": ("batch", "heads", "kv_heads", "length", "head_dim", "causal", "backend"),
    "shared": ("beside", "share", "period_s"),
    **dict.fromkeys(("interference", "moving"), ("kernel", "bytes")),
    "kernels": ("of",),
}


def case_parameters(kind: str, op: str) -> tuple[str, ...]:
    """Return the parameters that tell the cases of a kind and an operation."""
    if kind not in ("sustained", "shared"):
        return CASE_PARAMETERS.get(kind, ())
    family = "matmul" if op == "mm" else "attention" if op.startswith("attention") else ""
    return (*CASE_PARAMETERS.get(kind, ()), *CASE_PARAMETERS.get(family, ()))


class TimedRow(MeasuredRow):
    time_s: Positive
    sm_mhz: Positive | None = None
    power_w: Positive | None = None


class StreamedRow(TimedRow):
    bytes: Annotated[float, Field(ge=0)]


class SustainedRow(MeasuredRow):
    """A case that ran for seconds without a pause: the time of each batch, and what the GPU said between them."""

    time_s: Positive
    series_s: Annotated[tuple[Positive, ...], AsTuple, Field(min_length=1)]
    sm_mhz: Annotated[tuple[Positive, ...], AsTuple] = ()
    power_w: Annotated[tuple[Positive, ...], AsTuple] = ()

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len(self.sm_mhz) != len(self.power_w):
            lengths = f"{len(self.sm_mhz)} and {len(self.power_w)}"
            raise InputError("unlike numbers of sm_mhz and power_w", key="sm_mhz", found=lengths, allowed="as many")
        return self


class SharedRow(SustainedRow):
    share: Annotated[float, Field(gt=0, le=1)]
    other_s: Positive


class CollectiveRow(TimedRow):
    bytes: Annotated[float, Field(ge=0)]
    host_s: Positive
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], AsTuple, Field(min_length=2)]


class RacedRow(MeasuredRow):
    kernel_s: Positive
    kernel_beside_s: Positive
    collective_s: Positive | None = None
    collective_beside_s: Positive | None = None


class MovingRow(TimedRow):
    beside_s: Positive


class ProfiledRow(MeasuredRow):
    kernels: Annotated[tuple[tuple[str, Annotated[float, Field(ge=0)]], ...], Lists]


class LayersRow(TimedRow):
    block_s: Annotated[tuple[tuple[Positive, ...], ...], Lists] | None = None
    probe_s: Annotated[tuple[tuple[Positive, ...], ...], Lists] | None = None
    probe_forward_s: Annotated[tuple[tuple[Positive, ...], ...], Lists] | None = None

    @model_validator(mode="after")
    def _probes_around_blocks(self) -> Self:
        """Raise `InputError` unless members have one probe more than blocks, each longer than its forward passes."""
        if self.probe_forward_s is None:
            return self
        lengths = {
            "block_s": [len(member) + 1 for member in self.block_s or ()],
            "probe_s": [len(member) for member in self.probe_s or ()],
            "probe_forward_s": [len(member) for member in self.probe_forward_s],
        }
        if len({tuple(counts) for counts in lengths.values()}) > 1:
            told = {name: counts if name != "block_s" else [n - 1 for n in counts] for name, counts in lengths.items()}
            allowed = "as many members in each, of a member a probe more than blocks"
            raise InputError("unlike lengths", key="block_s", found=told, allowed=allowed)
        for whole, part in zip(self.probe_s or (), self.probe_forward_s, strict=True):
            if any(p >= w for p, w in zip(part, whole, strict=True)):
                raise InputError("not less than probe_s", key="probe_forward_s", found=part, allowed=whole)
        return self


#: Kind of row -> what it must tell.
KINDS: Mapping[str, type[MeasuredRow]] = {
    **dict.fromkeys(("matmul", "attention", "copy", "launch"), TimedRow),
    "memory": StreamedRow,
    "sustained": SustainedRow,
    "shared": SharedRow,
    "collective": CollectiveRow,
    "interference": RacedRow,
    "moving": MovingRow,
    "kernels": ProfiledRow,
    "layers": LayersRow,
}

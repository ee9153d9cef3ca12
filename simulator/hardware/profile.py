"""A calibration profile: what one kind of GPU, its host and its links do, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from simulator.bounds import NotNegative, Positive
from simulator.errors import InputError
from simulator.hardware.figures import Cited, check_date, need_all
from simulator.hardware.gpu import GpuSpec
from simulator.hardware.host import Host
from simulator.hardware.interference import Interference
from simulator.hardware.kernels import KernelModels
from simulator.hardware.power import Power
from simulator.hardware.transport import Transport


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The machine that was measured."""

    gpu: str
    """as the driver names it"""
    date: str
    """day of the measurements, YYYY-MM-DD"""
    commands: tuple[str, ...]
    """what measured it"""
    driver: str = ""
    cuda: str = ""
    nccl: str = ""
    torch: str = ""
    nvls: bool | None = None
    """whether NVLink SHARP was at hand"""
    power_limit_w: Positive | None = None
    highest_sm_mhz: Positive | None = None
    median_sm_mhz: Positive | None = None
    """SM clock at which kernels were measured, most under the power limit"""
    host_forward_s: Positive | None = None
    host_backward_s: Positive | None = None
    """what the host whose costs ``host`` holds took for the probe beside them, the forward and backward passes of a
    small model (`calibration.narrow.PROBE`): how fast it was"""

    def __post_init__(self) -> None:
        check_date("provenance.date", self.date)


@dataclass(frozen=True, kw_only=True)
class Residual:
    """How far fitted times are off, relative to measured ones."""

    n: Annotated[int, Gt(0)]
    """cases"""
    mean: NotNegative
    """mean absolute error"""
    max: NotNegative
    """largest absolute error"""
    bias: float
    """mean signed error; above 0: too slow"""


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Errors on the measurements that constants were fitted to, and on every second size, which was held out."""

    fitted: Residual | None = None
    held_out: Residual | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A versioned calibration of one kind of GPU. Raises `InputError` where a figure cites no source of the file."""

    schema_version: Literal[1]
    name: str
    gpu: str
    """name of the GPU, as cluster files give it"""
    date: str
    """day of the last change, YYYY-MM-DD"""
    kind: Literal["measured", "published", "datasheet"]
    """what most of it rests on"""
    like: str | None = None
    """a whole profile, by name or path, of a GPU like this one: what the file lacks is assumed to be as there, by the
    rule of `simulator.config.profile_completion` [null: nothing is lacking]"""
    sources: dict[str, str]
    """key -> citation: project, file and commit; paper and figure; or card, software and date of a measurement"""
    provenance: Provenance | None = None
    """the machine that was measured by us, if any was"""
    gpu_spec: GpuSpec
    kernels: KernelModels
    host: Host
    interference: Interference
    power: Power | None = None
    """None: kernels take in a step what they take alone"""
    transports: dict[str, Transport]
    """how links of a kind carry collectives"""
    residuals: dict[str, Residuals] = field(default_factory=dict)
    """by class of kernels or transfers, and by group within a class"""

    @property
    def source(self) -> str:
        """All citations in one line."""
        return "; ".join(self.sources.values())

    def cited(self) -> Iterator[tuple[str, Cited]]:
        """Yield every part with an origin, with its dotted key, in the order of the file."""
        yield from _cited("", self)

    def __post_init__(self) -> None:
        check_date("date", self.date)
        self._leave_sms()
        self._cite_sources()
        peaks, sustained = self.gpu_spec.peak_flops_per_s, self.kernels.matmul.sustained_flops_per_s
        need_all("kernels.matmul.sustained_flops_per_s", sustained, peaks)
        need_all("kernels.matmul.layout_speed", self.kernels.matmul.layout_speed, peaks)
        need_all("gpu_spec.peak_flops_per_s", peaks, [*sustained, *self.kernels.matmul.fitted_range])

    def _leave_sms(self) -> None:
        """Raise `InputError` where communication leaves kernels no SM."""
        sms, lost = self.gpu_spec.sms, self.interference.sms
        for key, number in (
            ("sms.collective", lost.collective),
            ("sms.p2p", lost.p2p),
            ("matmul_sms", self.interference.matmul_sms),
        ):
            if number and number >= sms:
                allowed = f"less than gpu_spec.sms, {sms}"
                raise InputError("as many SMs as there are", key=f"interference.{key}", found=number, allowed=allowed)

    def _cite_sources(self) -> None:
        """Raise `InputError` where a figure cites what is not among the sources."""
        for key, figure in self.cited():
            if figure.source not in self.sources:
                raise InputError(
                    "is not one of the file's sources",
                    key=f"{key}.source",
                    found=figure.source,
                    allowed=", ".join(self.sources),
                )


def _cited(key: str, part: object) -> Iterator[tuple[str, Cited]]:
    if isinstance(part, Cited):
        yield key, part
    if is_dataclass(part):
        for one in fields(part):
            yield from _cited(f"{key}.{one.name}".lstrip("."), getattr(part, one.name))
    elif isinstance(part, dict):
        for name, value in part.items():
            yield from _cited(f"{key}.{name}", value)

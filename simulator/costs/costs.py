"""`Costs`: seconds of a kernel and of its launch, how links carry bytes, what communication takes from computation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from simulator.costs import launch, stack
from simulator.costs.attention import AttentionCost
from simulator.costs.fixed import FixedCost
from simulator.costs.hosts import HOST_TRANSPORTS, plain
from simulator.costs.interference import HeldBy, InterferenceCost, SharedSms, without
from simulator.costs.matmul import MatmulCost
from simulator.costs.memory import MemoryCost
from simulator.costs.origin import KernelCost, Origin
from simulator.costs.power import PowerBudget
from simulator.costs.slowest import slowest
from simulator.costs.tiled import TiledCost
from simulator.errors import InputError
from simulator.frameworks import DEFAULT, Framework
from simulator.hardware.profile import Profile
from simulator.hardware.stack import Stack
from simulator.hardware.transport import Transport, TransportKind
from simulator.program import Attention, Fixed, GroupedMatmul, Kernel, Matmul, Memory, Tiled

#: Kernels whose prices are kept, at some 300 bytes each: once there are so many, all are given up.
MOST_KERNELS = 50_000
#: Sizes of a product that fills a GPU.
LARGE = 8192
#: Attention that fills it, as it is run for seconds to see what it draws (``calibration measure``, kind sustained).
BUSY_ATTENTION = Attention(4, 16, 16, 4096, 4096, 128)


@dataclass(frozen=True)
class Costs:
    """Everything the clock asks of a calibration. Complete when built; build with `from_profile`, `from_profiles` or
    `ideal`.

    ``gpu``: the type of GPU that the kernel prices hold for; empty: any. ``kernels``: type of kernel -> its price.
    ``launch``: what the host issues (`simulator.costs.launch.issued`) -> seconds, 0 where not listed.
    ``transports``: kind of link -> how it carries bytes.
    ``interference``: what communication takes from kernels; None: nothing.
    ``power``: what the power limit does to clocks; None: nothing that prices do not have already.
    ``sources``: key -> citation. ``by_type``: of a cluster with several types of GPU, the costs of each; these ones
    then say what holds when all take part, and price kernels by type.
    """

    gpu: str
    kernels: Mapping[type, KernelCost]
    launch: Mapping[str, float]
    transports: Mapping[str, Transport]
    interference: InterferenceCost | None
    power: PowerBudget | None
    sources: Mapping[str, str]
    by_type: Mapping[str, Costs] = field(default_factory=dict)
    _seconds: dict[Kernel, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _among: dict[tuple[str, ...], Costs] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_profile(cls, profile: Profile, software: Framework = DEFAULT, network: Stack | None = None) -> Costs:
        """The costs of a calibrated GPU whose ops are launched by ``software``; ``network``: what carries its
        collectives, in place of the profile's own transports."""
        if software.pads_products:
            matmul = replace(profile.kernels.matmul, unaligned=None)
            profile = replace(profile, kernels=replace(profile.kernels, matmul=matmul))
        sections = (*software.memory_sections, "fp8")
        memory = MemoryCost.from_sections(profile.gpu_spec, profile.kernels.memory, sections)
        kernels: dict[type, KernelCost] = {**_on_sms(profile), Memory: memory, Fixed: FixedCost()}
        return cls(
            gpu=profile.gpu,
            kernels=kernels,
            launch=launch.launch_seconds(
                profile.host.launch_s[software.launch_section],
                dtensors=software.work_on_dtensors,
                passes_in_graph=software.passes_in_graph,
            ),
            transports={**HOST_TRANSPORTS, **profile.transports, **(stack.transports(network) if network else {})},
            interference=_interference(profile, memory),
            power=None if profile.power is None else PowerBudget(profile.power),
            sources=dict(profile.sources),
        )

    @classmethod
    def from_stack(cls, network: Stack) -> Costs:
        """Return the costs of collectives, without a price for any kernel."""
        return cls(
            gpu=network.gpu,
            kernels={},
            launch={},
            transports={**HOST_TRANSPORTS, **stack.transports(network)},
            interference=None,
            power=None,
            sources={},
        )

    @classmethod
    def from_profiles(
        cls, profiles: Mapping[str, Profile], software: Framework = DEFAULT, network: Stack | None = None
    ) -> Costs:
        """The costs of a cluster with these types of GPU, each with its profile; ``network`` as in `from_profile`."""
        each = {gpu: cls.from_profile(profile, software, network) for gpu, profile in profiles.items()}
        return _together(each)

    @classmethod
    def ideal(cls) -> Costs:
        """`Fixed` kernels at their length, launched for nothing, on links that lose nothing: for closed forms."""
        return cls(
            gpu="",
            kernels={Fixed: FixedCost()},
            launch={},
            transports=dict.fromkeys(get_args(TransportKind), plain(0.0, 1.0, "assumed", "ideal")),
            interference=None,
            power=None,
            sources={},
        )

    def for_gpu(self, gpu: str) -> Costs:
        """Return the costs of one type of GPU. Raises `InputError` where no profile is of it."""
        if self.by_type and gpu in self.by_type:
            return self.by_type[gpu]
        if self.gpu and gpu != self.gpu:
            raise InputError(
                "the calibration profile is of another GPU", key="calibration", found=self.gpu, allowed=gpu
            )
        return self

    def undisturbed(self) -> Costs:
        """Return the same costs with every kernel as alone on its GPU.

        Communication beside it takes nothing from it, and no power limit changes clocks."""
        alone = {gpu: costs.undisturbed() for gpu, costs in self.by_type.items()}
        return replace(self, interference=None, power=None, by_type=alone)

    def among(self, gpus: Sequence[str]) -> Costs:
        """Return the costs that hold between GPUs of these types.

        Types without a profile are left out: a node of which only the host takes part can be of one."""
        key = tuple([gpu for gpu in gpus if gpu in self.by_type])
        if len(key) in (0, len(self.by_type)):
            return self
        if key not in self._among:
            self._among[key] = _together({gpu: self.for_gpu(gpu) for gpu in key})
        return self._among[key]

    def kernel_s(self, kernel: Kernel, gpu: str, clock_hz: float | None = None) -> float:
        """Return the seconds of a kernel alone on a GPU of type ``gpu`` at its nominal speed.

        ``clock_hz``: clock of the SMs; without it, that of the kernel's price. Raises `InputError` where the profile is
        of another GPU or has no such precision.
        """
        if (costs := self.for_gpu(gpu)) is not self:
            return costs.kernel_s(kernel, gpu, clock_hz)
        seconds = self._seconds.get(kernel)
        if seconds is None:
            if len(self._seconds) >= MOST_KERNELS:
                self._seconds.clear()
            seconds = self._seconds[kernel] = self._price(kernel).seconds(kernel)
        if clock_hz is not None and self.power is not None:
            alone = self.intensity(kernel) if self._priced_at_own_clock(kernel) else 1.0
            seconds *= self.power.slowness(kernel, clock_hz, alone)
        return seconds

    def _priced_at_own_clock(self, kernel: Kernel) -> bool:
        """Return whether a kernel was measured at the clock that it leaves a GPU itself, as attention was.

        Products were measured on end, on a GPU that all of them kept at one clock. Those that load element by element
        are from steps, and draw too little to be held down.
        """
        if not isinstance(kernel, Matmul):
            return isinstance(kernel, Attention)
        price = self.kernels[Matmul]
        return isinstance(price, MatmulCost) and price.loads_by_element(kernel)

    def intensity(self, kernel: Kernel) -> float:
        """Return the power that a kernel draws relative to its class (`simulator.costs.power`).

        Products and attention draw by their FLOP/s beside those of a large kernel, as FLOPs cost energy and not the
        time. Kernels that memory bounds draw by the part of their time in which bytes move, all others as their class.
        """
        seconds = self.kernel_s(kernel, self.gpu)
        price = self.kernels[type(kernel)]
        if isinstance(price, MemoryCost):
            assert isinstance(kernel, Memory)
            return price.moving_s(kernel) / seconds if seconds else 1.0
        if isinstance(price, AttentionCost):
            assert isinstance(kernel, Attention)
            busy = replace(BUSY_ATTENTION, backward=kernel.backward, dtype=kernel.dtype)
            return price.busy_s(kernel) / seconds * self.kernel_s(busy, self.gpu) / price.busy_s(busy)
        if not isinstance(kernel, Matmul | GroupedMatmul) or not kernel.flops:
            return 1.0
        large = Matmul(LARGE, LARGE, LARGE, dtype=kernel.dtype)
        return self.kernel_s(large, self.gpu) / large.flops * kernel.flops / seconds

    def launched_s(self, kinds: Mapping[str, int]) -> float:
        """Return the seconds that the host takes for so many of each kind (`simulator.costs.launch`).

        Kinds that are not listed take nothing."""
        return sum(n * self.launch.get(kind, 0.0) for kind, n in kinds.items())

    def transport(self, kind: str) -> Transport:
        """Return how links of a kind carry bytes. Raises `InputError` for a kind that the profile lacks."""
        try:
            return self.transports[kind]
        except KeyError:
            raise InputError(
                "the calibration profile lacks this kind of link",
                key="transports",
                found=kind,
                allowed=", ".join(self.transports),
            ) from None

    def reachable_Bps(self, kind: str, line_Bps: float) -> float:
        """Return the bytes/s that large transfers reach over a link of this line rate."""
        return line_Bps * self.transport(kind).efficiency

    def origin(self, kernel: Kernel) -> Origin:
        """Return the origin of a kernel's price, and how far its shape lies outside what was fitted.

        Nothing was fitted of an assumed price."""
        origin = self._price(kernel).origin(kernel)
        beyond = math.inf if origin.kind == "assumed" else origin.beyond
        return replace(origin, source=self.sources.get(origin.source, origin.source), beyond=beyond)

    def _price(self, kernel: Kernel) -> KernelCost:
        price = self.kernels.get(type(kernel))
        if price is None:
            raise TypeError(f"these costs price no {type(kernel).__name__}")
        dtype = getattr(kernel, "dtype", None)
        if (
            dtype is not None
            and isinstance(price, MatmulCost | AttentionCost | TiledCost)
            and dtype not in price.spec.peak_flops_per_s
        ):
            types = ", ".join(price.spec.peak_flops_per_s)
            raise InputError(
                f"{self.gpu} has no matrix units for it", key="training.precision", found=dtype, allowed=types
            )
        return price


def _together(costs: Mapping[str, Costs]) -> Costs:
    if len(costs) == 1:
        return next(iter(costs.values()))
    each = list(costs.values())
    shared = [kind for kind in each[0].transports if all(kind in other.transports for other in each)]
    return Costs(
        gpu=" and ".join(costs),
        kernels={},
        launch={},
        transports={kind: slowest([one.transports[kind] for one in each]) for kind in shared},
        interference=None,
        power=None,
        sources={key: text for one in each for key, text in one.sources.items()},
        by_type=costs,
    )


def _interference(profile: Profile, memory: MemoryCost) -> SharedSms | None:
    """Return what communication takes from kernels on a calibrated GPU; None: nothing.

    ``memory``: prices of the kernels that memory bounds."""
    spec, model = profile.gpu_spec, profile.interference
    if not model.sms.collective:
        return None
    plain_Bps = memory.share(Memory("residual", 0.0, 0.0)) * spec.memory_bandwidth_Bps.value
    holders: dict[HeldBy, int] = {"collective": model.sms.collective, "p2p": model.sms.p2p}
    fewer = {by: _on_sms(profile, sms, model.matmul_sms) for by, sms in holders.items()}
    return SharedSms(model, _on_sms(profile), fewer, memory, plain_Bps, spec.sms)


def _on_sms(profile: Profile, sms: int = 0, matmul_sms: int = 0) -> dict[type, KernelCost]:
    """Return the prices of kernels that SMs bound. ``sms`` and ``matmul_sms``: SMs that attention and products lose."""
    spec = profile.gpu_spec
    matmul = MatmulCost(spec, profile.kernels.matmul, matmul_sms)
    attention = AttentionCost(without(spec, sms) if sms else spec, profile.kernels.attention)
    return {Matmul: matmul, GroupedMatmul: matmul, Attention: attention, Tiled: TiledCost(attention)}

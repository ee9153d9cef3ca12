"""What of a cluster differs from its kind: slow and missing GPUs, degraded links, missing network cards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag

from simulator.config.section import Section, Text, likeliest
from simulator.errors import InputError

if TYPE_CHECKING:
    from simulator.config.cluster import ClusterSpec

Part = Literal["gpu", "nic"]
_PART = re.compile(r"node(\*|0|[1-9]\d{0,8})\.(gpu|nic)(\*|0|[1-9]\d{0,8})")


class LinkOverride(Section):
    """A link that differs from its kind."""

    link: Text
    """name of a link, such as node3.nic2; * stands for any characters but . and :, as in node3.nic*"""
    bandwidth_scale: float = Field(ge=1e-6, le=1e6)
    """its bandwidth as a multiple of what it would be"""


class GpuOverride(Section):
    """A GPU that differs from its kind, or is not there."""

    gpu: Text
    """name of a GPU, such as node1.gpu4; * stands for any number"""
    speed_scale: float | None = Field(default=None, ge=1e-6, le=1e6)
    """its speed as a multiple of what it would be"""
    host_speed: float | None = Field(default=None, ge=1e-3, le=1e3)
    autograd_speed: float | None = Field(default=None, ge=1e-3, le=1e3)
    """those of its host, as multiples of its node's"""
    missing: bool = False
    """whether it is not there: ranks are those that are"""

    @property
    def is_scaled(self) -> bool:
        """Whether a speed is said."""
        return any(value is not None for value in (self.speed_scale, self.host_speed, self.autograd_speed))

    @property
    def scales(self) -> tuple[float, float, float]:
        """Of its own speed, its host's and autograd's; 1: as it would be."""
        return self.speed_scale or 1.0, self.host_speed or 1.0, self.autograd_speed or 1.0


class NicOverride(Section):
    """A network card that is not there."""

    nic: Text
    """name of a card, such as node1.nic4; * stands for any number"""
    missing: bool
    """true; a slow one is a link with a bandwidth_scale"""


Override = Annotated[
    Annotated[LinkOverride, Tag("LinkOverride")]
    | Annotated[GpuOverride, Tag("GpuOverride")]
    | Annotated[NicOverride, Tag("NicOverride")],
    Discriminator(lambda value: likeliest(value, LinkOverride, GpuOverride, NicOverride)),
]


def named(override: LinkOverride | GpuOverride | NicOverride) -> tuple[str, str]:
    """The key that names what is meant, and the name."""
    key = "gpu" if isinstance(override, GpuOverride) else "nic" if isinstance(override, NicOverride) else "link"
    return key, str(getattr(override, key))


def pattern(name: str) -> re.Pattern[str]:
    """What matches the names that ``name`` means.

    >>> [bool(pattern("node1.nic*").fullmatch(name)) for name in ("node1.nic12", "node1.nic12.pcie", "node2.nic1")]
    [True, False, False]
    """
    return re.compile(re.escape(name).replace(r"\*", r"[^.:]*"))


def missing_parts(spec: ClusterSpec, part: Part) -> dict[int | None, frozenset[int | None]]:
    """Node -> the GPUs (or cards) that it lacks; None: of every node, and every GPU of it."""
    found: dict[int | None, frozenset[int | None]] = {}
    for override in spec.overrides:
        if isinstance(override, GpuOverride | NicOverride) and override.missing:
            match = _PART.fullmatch(named(override)[1])
            if match and match[2] == part:
                node, index = (None if number == "*" else int(number) for number in match.group(1, 3))
                found[node] = found.get(node, frozenset()) | {index}
    return found


def override_problems(spec: ClusterSpec) -> Iterator[InputError]:
    """Names that are none, or of nodes and parts that do not exist, and what is said twice. Node numbers count only
    once ``nodes`` has been given."""
    first: dict[tuple[str, str, bool], int] = {}
    for index, override in enumerate(spec.overrides):
        part, name = named(override)
        key = f"overrides[{index}].{part}"
        yield from _name_problems(spec, name, part, key)
        gone = not isinstance(override, LinkOverride) and override.missing
        if isinstance(override, GpuOverride) and gone is override.is_scaled:
            key_of = f"overrides[{index}].speed_scale"
            yield InputError("must be given, or missing: true, one of the two", key=key_of, found=override.speed_scale)
        if isinstance(override, NicOverride) and not gone:
            yield InputError("says nothing", key=f"overrides[{index}].missing", found=False, allowed="true")
        if first.setdefault((part, name, gone), index) != index:
            scale = {"gpu": "speed_scale", "link": "bandwidth_scale"}.get(part, "missing")
            yield InputError(
                f"overrides[{first[part, name, gone]}] is of it too, and only one {scale} can be meant",
                key=key,
                found=name,
                fix="one override of it",
            )
    if "nodes" in spec.model_fields_set and spec.n_gpus < 1 and spec.overrides:
        yield InputError("leave no GPU", key="overrides", allowed="at least one GPU that is not missing")


def _name_problems(spec: ClusterSpec, name: str, part: str, key: str) -> Iterator[InputError]:
    numbers = re.match(r"node(\d{1,9}|\*)\.(?:(?:gpu|nic)(\d{1,9})$)?", name)
    what = {"gpu": "GPU", "nic": "network card", "link": "link"}[part]
    match = _PART.fullmatch(name)
    if part != "link" and (not match or match[2] != part):
        allowed = f"node<i>.{part}<j>, such as node1.{part}4, or * for a number"
        yield InputError(f"is no name of a {what}", key=key, found=name, allowed=allowed)
    elif numbers and numbers[1] != "*" and int(numbers[1]) >= spec.nodes and "nodes" in spec.model_fields_set:
        yield InputError("this node does not exist", key=key, found=name, allowed=f"node0 to node{spec.nodes - 1}")
    elif part != "link" and match and match[3] != "*":
        kinds = spec.kinds if match[1] == "*" else [spec.node_at(int(match[1]))]
        count = max(kind.gpus.count if part == "gpu" else kind.nics.count for kind in kinds)
        if int(match[3]) >= count:
            allowed = f"{part}0 to {part}{count - 1}" if count else f"none: its nodes have no {what}"
            yield InputError(f"this {what} does not exist", key=key, found=name, allowed=allowed)

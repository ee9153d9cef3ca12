"""The section ``overrides`` of a cluster file: slow and missing GPUs, degraded links, missing network cards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from simulator.bounds import SpeedScale, Text

PartKind = Literal["gpu", "nic"]
Scale = Annotated[float, Ge(1e-6), Le(1e6)]
#: Name of a GPU or network card: its node, its kind and its number, either number also ``*``.
PART_NAME = re.compile(r"node(\*|0|[1-9]\d{0,8})\.(gpu|nic)(\*|0|[1-9]\d{0,8})")


@dataclass(frozen=True, kw_only=True)
class LinkOverride:
    """A link that differs from its kind, or is dead."""

    link: Text
    """name of a link, such as node3.nic2; * stands for any characters but . and :, as in node3.nic*"""
    bandwidth_scale: Scale | None = None
    """its bandwidth as a multiple of what it would be"""
    missing: bool = False
    """whether it is dead, both ways: traffic goes around it"""


@dataclass(frozen=True, kw_only=True)
class GpuOverride:
    """A GPU that differs from its kind, or is not there."""

    gpu: Text
    """name of a GPU, such as node1.gpu4; * stands for any number"""
    speed_scale: Scale | None = None
    """its speed as a multiple of what it would be"""
    host_speed: SpeedScale | None = None
    autograd_speed: SpeedScale | None = None
    """those of its host, as multiples of its node's"""
    missing: bool = False
    """whether it is not there: ranks are those that are"""

    @property
    def is_scaled(self) -> bool:
        """A speed is given."""
        return any(value is not None for value in (self.speed_scale, self.host_speed, self.autograd_speed))

    @property
    def scales(self) -> tuple[float, float, float]:
        """Factors of its own speed, of its host's and of autograd's; 1: as it would be."""
        return self.speed_scale or 1.0, self.host_speed or 1.0, self.autograd_speed or 1.0


@dataclass(frozen=True, kw_only=True)
class NicOverride:
    """A network card that is not there."""

    nic: Text
    """name of a card, such as node1.nic4; * stands for any number"""
    missing: bool
    """true; a slow one is a link with a bandwidth_scale"""


Override = LinkOverride | GpuOverride | NicOverride


def named_part(override: Override) -> tuple[str, str]:
    """Return the key under which an override names its part, and the name."""
    key = "gpu" if isinstance(override, GpuOverride) else "nic" if isinstance(override, NicOverride) else "link"
    return key, str(getattr(override, key))


def name_pattern(name: str) -> re.Pattern[str]:
    """Return the expression of the names that ``name`` stands for.

    >>> [bool(name_pattern("node1.nic*").fullmatch(name)) for name in ("node1.nic12", "node1.nic12.pcie", "node2.nic1")]
    [True, False, False]
    """
    return re.compile(re.escape(name).replace(r"\*", r"[^.:]*"))


def missing_parts(overrides: Sequence[Override], kind: PartKind) -> dict[int | None, frozenset[int | None]]:
    """Return the missing GPUs (or cards) by node. A node None stands for every node, a part None for every part."""
    missing: dict[int | None, frozenset[int | None]] = {}
    for override in overrides:
        if isinstance(override, GpuOverride | NicOverride) and override.missing:
            match = PART_NAME.fullmatch(named_part(override)[1])
            if match and match[2] == kind:
                node, index = (None if number == "*" else int(number) for number in match.group(1, 3))
                missing[node] = missing.get(node, frozenset()) | {index}
    return missing

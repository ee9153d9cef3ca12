"""Kinds of adapters. A new one is a file with an `AdapterKind`, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from simulator.adapters import dora, lora
from simulator.adapters.kind import AdaptedProduct, AdapterKind

#: By name, the default first.
ADAPTERS: Mapping[str, AdapterKind] = {kind.name: kind for kind in (lora.KIND, dora.KIND)}

__all__ = ["ADAPTERS", "AdaptedProduct", "AdapterKind"]

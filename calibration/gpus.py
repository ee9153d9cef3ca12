"""GPUs in the environment of a measurement: the first card's figures, and the driver."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def card_of(environment: Mapping[str, Any]) -> str:
    """Return nvidia-smi's figures of the first GPU, separated by commas; empty where it said nothing."""
    lines = environment.get("nvidia_smi")
    return str(lines[1]) if isinstance(lines, list | tuple) and len(lines) > 1 else ""


def driver_of(environment: Mapping[str, Any]) -> str:
    """The version of the driver; empty where nvidia-smi did not say it."""
    version = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", card_of(environment))
    return version[0] if version else ""

"""Envelope of JSON results: the keys that all begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Version of the results; it grows when a key changes its meaning.
SCHEMA_VERSION = 1


def envelope(command: str, warnings: Sequence[str] = (), **content: Any) -> dict[str, Any]:
    """Return ``content`` behind the version, the command with this result, and warnings."""
    return {"schema_version": SCHEMA_VERSION, "command": command, "warnings": list(warnings), **content}

"""What every JSON result begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Of the results; grows when a key changes its meaning.
SCHEMA_VERSION = 1


def envelope(command: str, warnings: Sequence[str] = (), **content: Any) -> dict[str, Any]:
    """``content`` behind the version, the command that it answers and what the user should know."""
    return {"schema_version": SCHEMA_VERSION, "command": command, "warnings": list(warnings), **content}

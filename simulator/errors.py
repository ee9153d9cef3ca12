"""What goes wrong through the user's input. Both end a command with exit status 2 and no traceback."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class SimulatorError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(SimulatorError):
    """Something the user wrote cannot be used.

    The message names, as far as they are known, the file, the dotted key, the value found, what is allowed,
    and the nearest fix.

    >>> print(InputError("not a divisor", file="w.yaml", key="parallelism.tp", found=5, allowed="1, 2, 4", fix="tp: 4"))
    w.yaml: parallelism.tp: not a divisor
      found:   5
      allowed: 1, 2, 4
      fix:     tp: 4
    """

    def __init__(
        self,
        message: str,
        *,
        file: object = None,
        key: str | None = None,
        found: Any = _ABSENT,
        allowed: object = None,
        fix: str | None = None,
    ) -> None:
        self.message = message
        self.file = None if file is None else str(file)
        self.key = key
        self.found = found
        self.allowed = None if allowed is None else str(allowed)
        self.fix = fix
        super().__init__(message)

    def __str__(self) -> str:
        head = ": ".join(part for part in (self.file, self.key, self.message) if part)
        lines = [head]
        if self.found is not _ABSENT:
            lines.append(f"  found:   {self.found!r}")
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.fix:
            lines.append(f"  fix:     {self.fix}")
        return "\n".join(lines)


def in_one_line(error: SimulatorError) -> str:
    """What an error says, for a cell of a table.

    >>> in_one_line(InputError("not a divisor", key="parallelism.tp", found=5, allowed="1, 2, 4"))
    'parallelism.tp: not a divisor; found: 5; allowed: 1, 2, 4'
    """
    return "; ".join(" ".join(line.split()) for line in str(error).splitlines())


class DeadlockError(SimulatorError):
    """No rank can go on: the message lists, per rank, the next operation and what it waits for."""

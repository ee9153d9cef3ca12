"""The file of results: one JSON object per line, written as it comes, so that nothing is lost and a run can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibration.measure.case import Case
from simulator.errors import InputError

FILE = "measurements.jsonl"
#: Of each of its lines.
BEGINS = '{"kind"'
#: What must not differ between runs whose rows stand in one file.
SAME = ("gpu", "torch", "cuda", "nccl", "nvls", "device")


class ResultRows:
    """Results of one directory. Raises `InputError` where its file is not one of measurements."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._rows: dict[str, dict[str, Any]] = {}
        self._environment: dict[str, Any] | None = None
        for row in _read(self.path):
            self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        if row["kind"] == "environment":
            self._environment = row
        else:
            self._rows[key_of(row)] = row

    def add(self, row: dict[str, Any]) -> None:
        """Append a row; it stands for its case from now on."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._take(row)

    def start(self, environment: dict[str, Any]) -> None:
        """Append what machine the rows after this come from. Raises `InputError` where those before are of another."""
        row = {"kind": "environment", **environment}
        before = self._environment
        if before is None:
            self.add(row)
            return
        for name in SAME:
            if before.get(name) != row.get(name):
                raise InputError(
                    f"was measured with another {name}",
                    file=self.path,
                    found=before.get(name),
                    allowed=row.get(name),
                    fix="--out with a new directory",
                )
        if before.get("command") != row["command"] or before.get("date") != row["date"]:
            self.add(row)

    def done(self, *, failed_too: bool) -> set[str]:
        """Keys of the cases that have a row, of failed ones only if ``failed_too``."""
        return {key for key, row in self._rows.items() if failed_too or "error" not in row}

    def failures(self) -> list[dict[str, Any]]:
        return [row for row in self._rows.values() if "error" in row]

    def __len__(self) -> int:
        return len(self._rows)


def key_of(row: dict[str, Any]) -> str:
    """The key of the case that a row is of."""
    return Case(row["kind"], row["op"], row["params"], tuple(row["ranks"])).key


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise InputError(
            f"cannot be read: {getattr(problem, 'strerror', None) or 'is not text (UTF-8)'}", file=path
        ) from None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            is_ours = line.startswith(BEGINS) or BEGINS.startswith(line)
            if (
                number == len(lines) and not text.endswith("\n") and is_ours
            ):  # cut off as it was written: measured again
                path.write_text("".join(f"{good}\n" for good in lines[:-1]), encoding="utf-8")
                return
            raise InputError(f"line {number} is not JSON", file=path, fix="remove the line") from None
        if not _is_row(row):
            raise InputError(f"line {number} is not of a measurement", file=path, fix="remove the line")
        yield row


def _is_row(row: object) -> bool:
    """Return True for a row with all that tells a case, or of a machine."""
    if not isinstance(row, dict) or row.get("kind") == "environment":
        return isinstance(row, dict)
    kinds = {"kind": str, "op": str, "params": dict, "ranks": list}
    return all(isinstance(row.get(key), kind) for key, kind in kinds.items())

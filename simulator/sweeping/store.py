"""The file of sweeps and searches: an SQLite database with a row per point, written as each is finished.

Points are known by their keys, so that any number of sweeps may share a file. It is in WAL mode: a row that has been
committed outlives its process however that ends, and others may read, or sweep into the same file, meanwhile.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from simulator.config.misplaced_file import POINTS_MARK
from simulator.errors import InputError
from simulator.input_files import brief
from simulator.output.sweep_figures import FIGURES
from simulator.sweeping.key import simulator_version
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point, source_name

#: Version of the table of our databases, which ``PRAGMA application_id`` tells from others.
TABLE_VERSION = 3
_ANOTHER_NAME = "another name"
#: Seconds for which another sweep may hold up a commit.
_PATIENCE_s = 60.0
_SQL_TYPES = {float: "REAL", int: "INTEGER", bool: "INTEGER"}
_FAILED = str(Status.FAILED)
_HEAD = ("key", "workload", "changes", "status")
_TAIL = ("error", "warnings", "wall_s", "simulator", "finished_at")
_COLUMNS = (*_HEAD, *FIGURES, *_TAIL)
_TABLE = f"""CREATE TABLE IF NOT EXISTS points (
    key TEXT PRIMARY KEY, workload TEXT NOT NULL, changes TEXT NOT NULL, status TEXT NOT NULL,
    {", ".join(f"{name} {_SQL_TYPES[figure.kind]}" for name, figure in FIGURES.items())},
    error TEXT NOT NULL, warnings TEXT NOT NULL, wall_s REAL NOT NULL,
    simulator TEXT NOT NULL, finished_at TEXT NOT NULL
)"""
#: Points that a command has begun, with the last sign of life of that command, seconds since 1970.
_CLAIMS = "CREATE TABLE IF NOT EXISTS claims (key TEXT PRIMARY KEY, owner TEXT NOT NULL, seen_s REAL NOT NULL)"


@dataclass(frozen=True)
class Store:
    """An open database of finished points. Everything raises `InputError` where the file cannot be used."""

    path: Path | None
    connection: sqlite3.Connection

    @classmethod
    @contextmanager
    def open(cls, path: Path | None) -> Iterator[Store]:
        """Open the database at ``path``, made where there is none; in memory where that is None."""
        with _problems(path):
            if path is not None and path.exists():
                _check_ours(path)
            database = ":memory:" if path is None else str(path)
            connection = sqlite3.connect(database, timeout=_PATIENCE_s, isolation_level=None)
        with closing(connection):
            with _problems(path):
                _keep_log(connection)
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(f"PRAGMA application_id = {POINTS_MARK}")
                connection.execute(f"PRAGMA user_version = {TABLE_VERSION}")
                connection.execute(_TABLE)
                connection.execute(_CLAIMS)
                connection.execute("COMMIT")
                present = {name for _, name, *_ in connection.execute("PRAGMA table_info(points)")}
            if missing := [name for name in _COLUMNS if name not in present]:
                raise InputError(f"is damaged: no column {missing[0]}", file=path or "sweep", fix=_ANOTHER_NAME)
            yield cls(path, connection)

    def finished(self, *, failed: bool = True) -> frozenset[str]:
        """Return the keys of all points in the file, of those that have ``failed`` only where asked for."""
        with _problems(self.path):
            rows = self.connection.execute("SELECT key, status FROM points").fetchall()
        return frozenset(key for key, status in rows if failed or status != Status.FAILED)

    def has(self, key: str, *, failed: bool) -> bool:
        """Tell whether the file has an outcome of the point with this key; a failure counts where ``failed``."""
        query = "SELECT 1 FROM points WHERE key = ? AND (? OR status != ?)"
        with _problems(self.path):
            return self.connection.execute(query, [key, failed, _FAILED]).fetchone() is not None

    def claim(self, key: str, owner: str, now_s: float, *, gone_s: float, failed: bool) -> bool:
        """Enter that ``owner`` simulates a point; return False where the point is finished, or another one's.

        ``gone_s``: owners that were last seen before have ended. ``failed``: a point that has failed is finished.
        """
        with _problems(self.path):
            entered = self.connection.execute(
                "INSERT INTO claims SELECT ?, ?, ? "
                "WHERE NOT EXISTS (SELECT 1 FROM points WHERE key = ? AND (? OR status != ?)) "
                "ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, seen_s = excluded.seen_s "
                "WHERE claims.owner = excluded.owner OR claims.seen_s < ?",
                [key, owner, now_s, key, failed, _FAILED, gone_s],
            )
        return entered.rowcount > 0

    def is_claimed(self, key: str, owner: str, *, gone_s: float) -> bool:
        """Tell whether another than ``owner`` simulates a point, which was seen since ``gone_s``."""
        with _problems(self.path):
            query = "SELECT 1 FROM claims WHERE key = ? AND owner != ? AND seen_s >= ?"
            return self.connection.execute(query, [key, owner, gone_s]).fetchone() is not None

    def drop_claims(self, owner: str) -> None:
        """Take back all claims of ``owner``."""
        with _problems(self.path):
            self.connection.execute("DELETE FROM claims WHERE owner = ?", [owner])

    def add(self, point: Point, outcome: PointOutcome) -> None:
        """Commit a finished point, which nobody claims any more.

        A later outcome of the same key takes the place of an earlier one, but a failure only that of another failure.
        """
        values: dict[str, Any] = {
            "key": outcome.key,
            "workload": source_name(point.workload),
            "changes": json.dumps(dict(point.changes), default=str),
            "status": str(outcome.status),
            **{name: outcome.figures.get(name) for name in FIGURES},
            "error": outcome.error,
            "warnings": json.dumps(outcome.warnings),
            "wall_s": outcome.wall_s,
            "simulator": simulator_version(),
            "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        places = ", ".join("?" * len(_COLUMNS))
        with _problems(self.path):
            self.connection.execute(
                f"INSERT OR REPLACE INTO points ({', '.join(_COLUMNS)}) SELECT {places} "
                "WHERE ? != ? OR NOT EXISTS (SELECT 1 FROM points WHERE key = ? AND status != ?)",
                [*(values[name] for name in _COLUMNS), values["status"], _FAILED, outcome.key, _FAILED],
            )
            self.connection.execute("DELETE FROM claims WHERE key = ?", [outcome.key])

    def other_sources(self, sources: Collection[str]) -> dict[str, int]:
        """Return how many points the file has of workloads of other names than ``sources``, most first."""
        with _problems(self.path):
            counts = self.connection.execute(
                "SELECT workload, count(*) AS number FROM points GROUP BY workload ORDER BY number DESC, workload"
            ).fetchall()
        return {name: number for name, number in counts if name not in sources}

    def outcome(self, key: str) -> PointOutcome:
        """Return what came of the point with this key, which is in the file.

        Raises `InputError` where its values are none that a sweep has written.
        """
        with _problems(self.path):
            row = self.connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM points WHERE key = ?", [key]).fetchone()
        try:
            return _outcome_of_row(key, dict(zip(_COLUMNS, row, strict=True)))
        except (TypeError, ValueError) as error:
            raise InputError(f"is damaged: point {key[:12]}: {error}", file=self.path, fix=_ANOTHER_NAME) from None


def _outcome_of_row(key: str, values: Mapping[str, Any]) -> PointOutcome:
    """Return the outcome that a row holds. Raises `TypeError` or `ValueError` on values of another kind."""
    status = Status(values["status"])
    figures = {name: _figure(name, values[name]) for name in FIGURES if values[name] is not None}
    missing = [name for name, figure in FIGURES.items() if name not in figures and not figure.is_optional]
    if status == Status.KEPT or (status == Status.SIMULATED and missing):
        raise ValueError(f"status is {status}" + (f", but there is no {missing[0]}" if missing else ""))
    warnings, error, wall_s = json.loads(values["warnings"]), values["error"], float(values["wall_s"])
    if not isinstance(error, str) or not isinstance(warnings, list) or not all(isinstance(w, str) for w in warnings):
        raise ValueError("error and warnings are no texts")
    return PointOutcome(key, status, figures, error, tuple(warnings), wall_s)


def _figure(name: str, value: object) -> float:
    """Return the value of a figure in the figure's type. Raises `ValueError` where it is no finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value) or FIGURES[name].kind(value) != value:
        raise ValueError(f"{name} is {brief(value)}")
    return cast(float, FIGURES[name].kind(value))


def _check_ours(path: Path) -> None:
    """Raise `InputError` where a file is no database of sweeps; an empty one is what a sweep that was killed leaves."""
    fix = _ANOTHER_NAME
    if path.is_dir():
        raise InputError("is a directory, not a file", file=path, fix=fix)
    try:
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=_PATIENCE_s, uri=True, isolation_level=None)
        ) as connection:
            connection.execute("BEGIN")  # all is as at one moment, though another command may be making the file
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise InputError("is no database of sweeps, and is left as it is", file=path, fix=fix) from None
    if application != POINTS_MARK and (application or tables):
        raise InputError("is a database, but none of sweeps, and is left as it is", file=path, fix=fix)
    if version not in (0, TABLE_VERSION):
        allowed = f"version {TABLE_VERSION}"
        raise InputError("is of another version of the simulator", file=path, found=version, allowed=allowed, fix=fix)


def _keep_log(connection: sqlite3.Connection) -> None:
    """Have the file keep a write-ahead log. SQLite itself waits for nobody who does the same to a new file."""
    until = time.monotonic() + _PATIENCE_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


@contextmanager
def _problems(path: Path | None) -> Iterator[None]:
    """Raise `InputError` for what SQLite raises: a full disk, a folder that cannot be written, another's lock.

    Raise one for a damaged file too.
    """
    try:
        yield
    except sqlite3.Error as error:
        if any(word in str(error) for word in ("malformed", "decode to UTF-8")):
            raise InputError(f"is damaged: {error}", file=path or "sweep", fix=_ANOTHER_NAME) from None
        fix = (
            "room on the disk; what is finished is kept, and the same command goes on" if "full" in str(error) else None
        )
        raise InputError(f"cannot be written: {error}", file=path or "sweep", fix=fix) from None

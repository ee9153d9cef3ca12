"""Which commit a file or the simulator stands at, for results that must say what they came from."""

from __future__ import annotations

import datetime
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Commit:
    """``id``: hexadecimal; ``date``: the committer's, with its time zone; ``changed``: what is on disk differs."""

    id: str
    date: datetime.datetime
    changed: bool

    def __str__(self) -> str:
        date = self.date.astimezone(datetime.UTC)
        return f"{self.id[:12]} of {date:%Y-%m-%d %H:%M} UTC" + (", changed since" if self.changed else "")


def commit_of(path: Path) -> Commit | None:
    """The last commit that changed ``path``, a file or a folder; None where git does not know it, or is not there."""
    folder = path if path.is_dir() else path.parent
    found = _git(folder, "log", "-1", "--format=%H %cI", "--", str(path.resolve()))
    if not found:
        return None
    commit, date = found.split()
    changed = bool(_git(folder, "status", "--porcelain", "--", str(path.resolve())))
    return Commit(commit, datetime.datetime.fromisoformat(date), changed)


def head() -> Commit | None:
    """The commit that the code itself is checked out at; None for an installed package."""
    here = Path(__file__).resolve().parent
    found = _git(here, "log", "-1", "--format=%H %cI")
    if not found:
        return None
    commit, date = found.split()
    changed = bool(_git(here, "status", "--porcelain", "--untracked-files=no"))
    return Commit(commit, datetime.datetime.fromisoformat(date), changed)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; empty where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""What results came from: which commit a file or the simulator stands at, and the hash of a text."""

from __future__ import annotations

import datetime
import hashlib
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
    return _last(path if path.is_dir() else path.parent, "--", str(path.resolve()))


def first_with(path: Path) -> Commit | None:
    """The first commit in which a file was as it is now; as `commit_of` where it is not committed so."""
    known = commit_of(path)
    if known is None or known.changed:
        return known
    blob = _git(path.parent, "hash-object", str(path.resolve()))
    commits = _git(path.parent, "log", "--format=%H %cI", f"--find-object={blob}").splitlines()
    return _parsed(commits[-1], changed=False) if commits else known


def head() -> Commit | None:
    """The commit that the code itself is checked out at; None for an installed package."""
    return _last(Path(__file__).resolve().parent)


def sha256(text: str) -> str:
    """Hexadecimal, of the text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _last(folder: Path, *of: str) -> Commit | None:
    """The last commit of the repository around ``folder``; or that changed what ``of`` names, where a file that git
    does not know is a change."""
    found = _git(folder, "log", "-1", "--format=%H %cI", *of)
    if not found:
        return None
    return _parsed(found, bool(_git(folder, "status", "--porcelain", *(of or ("--untracked-files=no",)))))


def _parsed(line: str, changed: bool) -> Commit:
    commit, date = line.split()
    return Commit(commit, datetime.datetime.fromisoformat(date), changed)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; empty where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

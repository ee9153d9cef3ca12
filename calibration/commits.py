"""Origins of results: the commit of a file or of the simulator, and the hash of a text."""

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
    latest = commit_of(path)
    if latest is None or latest.changed:
        return latest
    blob = _git(path.parent, "hash-object", str(path.resolve()))
    commits = _git(path.parent, "log", "--format=%H %cI", f"--find-object={blob}").splitlines()
    return _parsed(commits[-1], changed=False) if commits else latest


def head() -> Commit | None:
    """The commit that the code itself is checked out at; None for an installed package."""
    return _last(Path(__file__).resolve().parent)


def sha256(text: str) -> str:
    """Hexadecimal, of the text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def _last(folder: Path, *arguments: str) -> Commit | None:
    """Return the last commit of the repository around ``folder``, or the last that changed what ``arguments`` name.

    A file there that git does not know is a change.
    """
    line = _git(folder, "log", "-1", "--format=%H %cI", *arguments)
    if not line:
        return None
    return _parsed(line, bool(_git(folder, "status", "--porcelain", *(arguments or ("--untracked-files=no",)))))


def _parsed(line: str, changed: bool) -> Commit:
    commit, date = line.split()
    return Commit(commit, datetime.datetime.fromisoformat(date), changed)


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of git; empty where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

"""Claims of commands that share one database: each point is simulated by the command that has claimed it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from simulator.errors import InputError
from simulator.sweeping.store import Store

#: Seconds between two signs of life of a command, and after which one that gives none has ended.
SIGN_s, GONE_s = 1.0, 5.0


@dataclass(frozen=True)
class Claims:
    """The points that one command, the ``owner``, has begun. ``failed``: points that have failed count as finished.

    A command that is killed leaves its claims behind. They count no more once it has given no sign of life for
    `GONE_s`.
    """

    store: Store
    failed: bool
    owner: str

    @classmethod
    @contextmanager
    def on(cls, store: Store, *, failed: bool) -> Iterator[Claims]:
        """Hand out the claims of a command, which gives signs of life until the block ends; then drop them."""
        claims, ended = cls(store, failed, uuid4().hex), threading.Event()
        signs = threading.Thread(target=_give_signs, args=(store.path, claims.owner, ended), daemon=True)
        if store.path is not None:
            signs.start()
        try:
            yield claims
        finally:
            ended.set()
            if store.path is not None:
                signs.join()
            with suppress(InputError):  # what could not be dropped ends by itself
                store.drop_claims(claims.owner)

    def take(self, key: str) -> bool:
        """Claim a point; return whether it is this command's: nobody has finished it, or is at it."""
        now = time.time()
        return self.store.claim(key, self.owner, now, gone_s=now - GONE_s, failed=self.failed)

    def is_finished(self, key: str) -> bool:
        """Tell whether a point has an outcome."""
        return self.store.has(key, failed=self.failed)

    def is_under_way(self, key: str) -> bool:
        """Tell whether another command is at a point."""
        return self.store.is_claimed(key, self.owner, gone_s=time.time() - GONE_s)


def _give_signs(path: Path, owner: str, ended: threading.Event) -> None:
    """Say every `SIGN_s` that the owner is alive, on a connection of this thread's own."""
    while not ended.wait(SIGN_s):
        with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=SIGN_s)) as connection, connection:
            connection.execute("UPDATE claims SET seen_s = ? WHERE owner = ?", [time.time(), owner])

"""Standard output and error, as far as they can fail, and the signals that end a command."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from simulator.cli.terminal import say


class _Closed(io.TextIOBase):
    """Stand-in for a standard output that was closed before the start."""

    def write(self, text: str, /) -> NoReturn:
        raise OSError(errno.EBADF, "it is closed")


def open_streams() -> None:
    """Make standard output and error something that can be written to, whatever they are and whatever is written."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the end
    if sys.stdout is None:
        sys.stdout = _Closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def complain(message: str) -> None:
    """``error: message`` on standard error, where control characters are shown instead of sent."""
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    say(f"error: {shown}", sys.stderr)


def flushed() -> int:
    """Send what standard output still holds; the exit status where that fails, else 0."""
    try:
        sys.stdout.flush()
        return 0
    except SystemExit as end:  # SIGPIPE, see `signals_raise`
        status = int(end.code or 0)
    except OSError as error:
        status = 2
        if error.errno == errno.EPIPE:
            status = 128 + signal.SIGPIPE
        else:
            complain(f"standard output cannot be written: {error.strerror or error}")
    with suppress(OSError):  # what is left would fail again, with a traceback, when Python closes it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let a reader that has gone, a hang-up and a request to end raise `SystemExit`, so that clean-up code runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        current = signal.getsignal(number)
        if number == signal.SIGPIPE or current is signal.SIG_DFL:  # nohup ignores SIGHUP
            before[number] = current
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended_by(end: KeyboardInterrupt | SystemExit) -> int:
    """Return the exit status of a command that a signal has ended."""
    return 128 + signal.SIGINT if isinstance(end, KeyboardInterrupt) else int(end.code or 0)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)

"""A worker process: takes points from its standard input, and writes their outcomes on its standard output.

The process ends as soon as its input does, which is when its parent ends, however that ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import IO, Any

from simulator.sweeping.evaluation import evaluate
from simulator.sweeping.messages import Begun, Ready, receive, send


def main() -> None:
    """Evaluate points until the input ends; the first message is the keys that need no simulation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever is printed must not come between messages
    incoming: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, incoming), daemon=True).start()
    send(outgoing, Ready())
    finished = incoming.get()

    def begins(key: str) -> bool:
        send(outgoing, Begun(key))
        return bool(incoming.get())

    while True:
        send(outgoing, evaluate(incoming.get(), finished, begins))


def _listen(stream: IO[bytes], incoming: SimpleQueue[Any]) -> None:
    """Queue messages, also during a simulation; end the process with the input, in the middle of one too."""
    while (message := receive(stream)) is not None:
        incoming.put(message)
    os._exit(0)

"""Runner on the cores of this machine: worker processes that are handed one point after another.

Workers are fresh interpreters, which import the simulator and nothing of the caller's. A script thus needs no guard
around its lines. (`concurrent.futures` gives up all work when one process is killed, and does not say on which point.)
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue

from simulator.errors import InputError
from simulator.sweeping.equal_points import EqualPoints
from simulator.sweeping.key import written_key
from simulator.sweeping.messages import Begun, Ready, WorkerMessage, receive, send
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point

#: Program of a worker, which looks for modules where its parent does.
_START = "import sys; sys.path[:] = sys.argv[1:]; from simulator.sweeping.worker import main; main()"
#: Kernels of the simulator are small: threads of numpy's libraries would only get into each other's way.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
#: Workers that may die one after another before any of them is ready.
_MOST_FALSE_STARTS = 3
#: Seconds from the end of a worker's output to its own.
_LAST_WORDS_s = 5.0


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Processes:
    """Runner on ``jobs`` processes [one per core]."""

    jobs: int = field(default_factory=cores)

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str], claim: Callable[[str], bool]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        """Yield points with their outcomes as they are ready (see `Runner`)."""
        crew = _Crew(self.jobs, iter(points), finished, EqualPoints(claim))
        try:
            yield from crew.outcomes()
        finally:
            crew.dismiss()


@dataclass(eq=False)
class _Worker:
    """A process and its point. ``ready``: it has loaded the simulator."""

    process: subprocess.Popen[bytes]
    point: Point | None
    ready: bool = False

    @classmethod
    def start(cls, point: Point, inbox: _Inbox) -> _Worker:
        """Start a process for ``point``; its messages come into ``inbox``, and None when it has ended.

        It has a session of its own, so that Ctrl-C in a terminal reaches the parent alone.
        """
        process = subprocess.Popen(
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**_ONE_THREAD, **os.environ},
            start_new_session=True,
        )
        worker = cls(process, point)

        def listen() -> None:
            assert process.stdout is not None
            try:
                with process.stdout as stream:
                    while (message := receive(stream)) is not None:
                        inbox.put((worker, message))
            finally:
                inbox.put((worker, None))

        threading.Thread(target=listen, daemon=True).start()
        return worker

    def hand(self, message: object) -> None:
        """Send a message, which is lost where the process has died: that comes into the inbox on its own."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            send(self.process.stdin, message)

    def dismiss(self, patience_s: float = 0.0) -> None:
        """End the process, whatever it does, unless it ends by itself within ``patience_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    @property
    def end(self) -> str:
        """End of the process, in words."""
        status = self.process.returncode
        if status is not None and status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


#: Messages with the workers that sent them; None is the end of a worker.
_Inbox = SimpleQueue[tuple[_Worker, WorkerMessage | None]]


@dataclass
class _Crew:
    """Workers, and the points that are ``left`` to hand out.

    ``lost_once``: numbers of those whose worker has died. ``false_starts``: workers in a row that died before they were
    ready.
    """

    jobs: int
    left: Iterator[Point]
    finished: frozenset[str]
    equal: EqualPoints
    workers: list[_Worker] = field(default_factory=list)
    inbox: _Inbox = field(default_factory=SimpleQueue)
    lost_once: set[int] = field(default_factory=set)
    false_starts: int = 0

    def outcomes(self) -> Iterator[tuple[Point, PointOutcome]]:
        """Yield outcomes until nothing is left; a worker has its next point before its last outcome is looked at."""
        self.hire()
        while any(worker.point is not None for worker in self.workers):
            worker, message = self.inbox.get()
            point = worker.point
            outcome = self.heard(worker, message)
            ready: list[tuple[Point, PointOutcome]] = []
            if outcome is not None and point is not None:
                ready = self.ended(point, outcome)
            self.hire()
            yield from ready
        assert not self.equal.n_waiting, "points wait for one that is not under way"

    def ended(self, point: Point, outcome: PointOutcome) -> list[tuple[Point, PointOutcome]]:
        """Return a point with its outcome, and those that waited for it; none where the point waits itself."""
        if outcome.status == Status.KEPT and self.equal.waits(point, outcome.key):
            return []
        alike, left = self.equal.ended(point, outcome.key)
        self.left = chain(left, self.left)
        return [(point, outcome), *[(twin, PointOutcome(outcome.key, Status.KEPT)) for twin in alike]]

    def heard(self, worker: _Worker, message: WorkerMessage | None) -> PointOutcome | None:
        """Act on a message of a worker, None where it has died; return the outcome of its point, if that is known."""
        match message:
            case PointOutcome():
                worker.point = None
                return message
            case Begun():
                assert worker.point is not None
                worker.hand(self.equal.begins(worker.point, message.key))
            case Ready():
                worker.ready, self.false_starts = True, 0
                worker.hand(self.finished)
                worker.hand(worker.point)
            case None:
                return self.replace(worker)
        return None

    def hire(self) -> None:
        """Hand a point to every worker without one, and to new workers while there are fewer than jobs."""
        idle = deque(worker for worker in self.workers if worker.point is None)
        while idle or len(self.workers) < self.jobs:
            point = next(self.left, None)
            if point is None:
                return
            if idle:
                worker = idle.popleft()
                worker.point = point
                worker.hand(point)
            else:  # it is handed its point when it is ready
                self.workers.append(_Worker.start(point, self.inbox))

    def replace(self, dead: _Worker) -> PointOutcome | None:
        """Give a dead worker's point to a fresh one, or return its failure where it has lost a worker before.

        Raises `InputError` where no worker gets as far as loading the simulator.
        """
        self.workers.remove(dead)
        dead.dismiss(_LAST_WORDS_s)
        if not dead.ready:
            self.false_starts += 1
            if self.false_starts >= _MOST_FALSE_STARTS:
                raise InputError(f"a worker process does not start: it {dead.end}", file=sys.executable)
        if dead.point is None:
            return None
        if dead.point.number in self.lost_once:
            error = f"its process {dead.end}, twice"
            if dead.process.returncode == -signal.SIGKILL:
                error += ", as the system does where memory runs out: fewer jobs at once need less"
            key = self.equal.key_of(dead.point) or written_key(dead.point)
            return PointOutcome(key, Status.FAILED, error=error)
        if dead.ready:
            self.lost_once.add(dead.point.number)
        self.workers.append(_Worker.start(dead.point, self.inbox))
        return None

    def dismiss(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.dismiss()

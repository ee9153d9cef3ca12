"""Runner on the machines of a Ray cluster (extra `cluster`), or on a cluster of this machine alone.

A point is a task of one core. Ray hands tasks to machines that join, and reports those that were lost with a process or
a machine. Points are opened here, so that workload files need not be on the machines.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from simulator.errors import InputError, install_extra
from simulator.sweeping.equal_points import EqualPoints
from simulator.sweeping.evaluation import OpenedPoint, open_point
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.processes import cores
from simulator.sweeping.remote import Mismatch, simulated_alike
from simulator.units import counted

#: The cluster of this machine alone, which begins and ends with the runner.
LOCAL = "local-ray"
_SCHEME = "ray://"
#: Processes that a point may lose before it has failed: a machine that leaves takes along all that it runs.
MOST_LOSSES = 4
#: Seconds between two looks at how many cores the cluster has.
_LOOK_s = 1.0
#: Seconds for which the cluster may have no core at all.
_PATIENCE_s = 60.0
#: Seconds for the first answer of a cluster.
_GREETING_s = 5.0
_GOES_ON = "what is finished is kept, and the same command goes on"
#: Ray reports nothing about its use, and leaves the visible GPUs of tasks alone.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True)
class RayCluster:
    """Runner on the cluster at ``address``: `LOCAL` or ray://HOST:PORT. ``jobs``: points at once [one per core]."""

    address: str
    jobs: int | None = None

    def __post_init__(self) -> None:
        """Raise `InputError` where the address is none."""
        if self.address != LOCAL and not (self.address.startswith(_SCHEME) and self._place[1].isdecimal()):
            allowed = f"{LOCAL}, or {_SCHEME}HOST:PORT (the port of Ray's client server is 10001 unless said otherwise)"
            raise InputError("is no place to run", file="on", found=self.address, allowed=allowed)

    @property
    def _place(self) -> tuple[str, str]:
        """Host and port of a cluster that is not of this machine alone."""
        host, _, port = self.address.removeprefix(_SCHEME).rpartition(":")
        return host, port

    def outcomes(
        self, points: Iterable[Point], finished: frozenset[str], claim: Callable[[str], bool]
    ) -> Generator[tuple[Point, PointOutcome], None, None]:
        """Yield points with their outcomes as they are ready (see `Runner`)."""
        with self._connected() as ray:
            if note := taken_by_others(ray):
                print(f"note: {note}", file=sys.stderr)
            tasks = _Tasks(ray, self.jobs, iter(points), finished, EqualPoints(claim))
            try:
                yield from tasks.outcomes()
            except ConnectionError as error:
                fix = f"a cluster that answers; {_GOES_ON}"
                raise InputError(f"the connection is lost: {error}", file=self.address, fix=fix) from None
            finally:
                tasks.cancel()

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Hand out Ray, connected; end the connection afterwards, and a cluster of this machine with it.

        Raises `InputError` where the process is connected already, as that may be to another cluster.
        """
        with _quiet():
            try:
                import ray
            except ImportError:
                fix = install_extra("cluster")
                raise InputError("Ray is not installed", file="on", found=self.address, fix=fix) from None
            if ray.is_initialized():
                message = "this process is connected to a Ray cluster already"
                raise InputError(message, file="on", found=self.address, fix="ray.shutdown() before")
            self._connect(ray)
            try:
                yield ray
            finally:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.address == LOCAL:
            self._start(ray, quiet)
            return
        host, port = self._place
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_GREETING_s).close()
            ray.init(address=self.address, **quiet)
        except (OSError, OverflowError, RuntimeError) as error:
            fix = "ray start --head, and its --ray-client-server-port"
            raise InputError(f"no Ray cluster answers: {error}", file=self.address, fix=fix) from None

    def _start(self, ray: Any, quiet: dict[str, Any]) -> None:
        """Start a cluster of this machine alone. Raises `InputError` where it does not come up."""
        try:
            ray.init(address="local", num_cpus=self.jobs or cores(), include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises no narrower one
            fix = "a less busy machine, or --jobs without --on"
            raise InputError(f"a Ray cluster does not start here: {error}", file="on", fix=fix) from None


def taken_by_others(ray: Any) -> str:
    """Return what to say where no core is free before the first point is handed out; empty where one is."""
    there, free = (int(resources().get("CPU", 0)) for resources in (ray.cluster_resources, ray.available_resources))
    if free or not there:
        return ""
    return f"others use all {counted(there, 'core')} of the Ray cluster: points wait until one is free"


@contextmanager
def _quiet() -> Iterator[None]:
    """Have the environment say `QUIET`, where it says nothing else, while the context lasts."""
    added = {name: value for name, value in QUIET.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@dataclass
class _Tasks:
    """Points under way on a cluster, and those that are ``left``.

    ``lost``: points to be handed out once more. ``losses``: processes lost, by number of the point. ``slots``: how many
    points may be under way. ``looked_s``: when the cores were counted last. ``alive_s``: when there was one last.
    """

    ray: Any
    jobs: int | None
    left: Iterator[Point]
    finished: frozenset[str]
    equal: EqualPoints
    under_way: dict[Any, OpenedPoint] = field(default_factory=dict)
    lost: deque[OpenedPoint] = field(default_factory=deque)
    losses: dict[int, int] = field(default_factory=dict)
    slots: int = 0
    looked_s: float = -_LOOK_s
    alive_s: float = field(default_factory=time.monotonic)

    def outcomes(self) -> Iterator[tuple[Point, PointOutcome]]:
        """Yield outcomes until nothing is left. Raises `InputError` where no machine can go on."""
        task = self.ray.remote(num_cpus=1, max_retries=0)(simulated_alike)
        drained = False
        while True:
            self._look()
            while len(self.under_way) < self.slots and not (drained and not self.lost):
                opened = self.lost.popleft() if self.lost else self._next()
                if opened is None:
                    drained = True
                elif isinstance(opened, OpenedPoint):
                    self.under_way[task.remote(opened)] = opened
                else:
                    yield opened
            if drained and not self.under_way and not self.lost:
                assert not self.equal.n_waiting, "points wait for one that is not under way"
                return
            yield from self._ended()

    def _next(self) -> OpenedPoint | tuple[Point, PointOutcome] | None:
        """Return the next point that needs a simulation, or has its outcome already; None where none is left."""
        for point in self.left:
            opened = open_point(point, self.finished)
            if isinstance(opened, PointOutcome):
                return point, opened
            if self.equal.begins(point, opened.key):
                return opened
            if not self.equal.waits(point, opened.key):
                return point, PointOutcome(opened.key, Status.KEPT)
        return None

    def _look(self) -> None:
        """Count the cores of the cluster, once in a while. Raises `InputError` where it has had none for long."""
        now = time.monotonic()
        if now - self.looked_s < _LOOK_s:
            return
        count = int(self.ray.cluster_resources().get("CPU", 0))
        self.slots, self.looked_s = min(count, self.jobs or count), now
        if count:
            self.alive_s = now
        elif now - self.alive_s > _PATIENCE_s:
            fix = f"ray start --address=HEAD on a machine; {_GOES_ON}"
            raise InputError(f"the cluster has had no core for {_PATIENCE_s:.0f} s", file="on", fix=fix)

    def _ended(self) -> Iterator[tuple[Point, PointOutcome]]:
        """Yield the outcomes of tasks that end within `_LOOK_s`, each with those of points that waited for it."""
        if not self.under_way:
            time.sleep(_LOOK_s)
            return
        ready, _ = self.ray.wait(list(self.under_way), num_returns=1, timeout=_LOOK_s)
        for reference in ready:
            opened = self.under_way.pop(reference)
            outcome = self._outcome(reference, opened)
            if outcome is not None:
                yield opened.point, outcome
                for twin in self.equal.ended(opened.point, opened.key).alike:
                    yield twin, PointOutcome(opened.key, Status.KEPT)

    def _outcome(self, reference: Any, opened: OpenedPoint) -> PointOutcome | None:
        """Return the outcome of a task, or None where its process is lost and the point is to be tried again.

        Raises `InputError` where the machine has another simulator, or none: the task, its environment or its answer
        cannot be read there or here. What else Ray tells of, such as lost objects or a full disk, is a loss.
        """
        exceptions = self.ray.exceptions
        unable = (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError, exceptions.RaySystemError)
        try:
            outcome = self.ray.get(reference)
        except unable as error:
            fix = "the same llm-cluster-simulator and Python on all machines"
            message = f"a machine of the cluster cannot run the simulator: {_last_line(error)}"
            raise InputError(message, file="on", fix=fix) from None
        except exceptions.RayError as error:
            return self._lost(opened, error)
        if isinstance(outcome, Mismatch):
            fix = "the same version on all machines, and the files that the job names under the same paths"
            raise InputError(f"{outcome.machine} reads another job: {outcome.why}", file="on", fix=fix)
        assert isinstance(outcome, PointOutcome)
        return outcome

    def _lost(self, opened: OpenedPoint, error: Exception) -> PointOutcome | None:
        """Hand a point out once more, or return its failure where it has lost `MOST_LOSSES` processes."""
        number = opened.point.number
        self.losses[number] = self.losses.get(number, 0) + 1
        if self.losses[number] < MOST_LOSSES:
            self.lost.append(opened)
            return None
        reason = f"its process was lost {MOST_LOSSES} times, as where memory runs out ({_last_line(error)})"
        return PointOutcome(opened.key, Status.FAILED, error=reason)

    def cancel(self) -> None:
        """End all tasks under way."""
        for reference in self.under_way:
            try:
                self.ray.cancel(reference, force=True)
            except Exception:  # the cluster, or the connection to it, has gone first
                return


def _last_line(error: Exception) -> str:
    """Return the name of an error, and the last line of what it says.

    >>> _last_line(ValueError("one\\ntwo\\n")), _last_line(ValueError())
    ('ValueError: two', 'ValueError')
    """
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[-1:]])

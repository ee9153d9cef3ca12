"""The host of a simulated rank: a clock that runs ahead of the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.costs import Costs
from simulator.engine.issue_order import HostSpeeds, HostWork
from simulator.program import Comm


class SimulatedHost:
    """Issues the ops of a rank one after another, at ``speeds``, however far the GPU has come.

    ``free_s`` is when it will have issued everything so far.
    """

    def __init__(self, costs: Costs, speeds: HostSpeeds, work: Sequence[HostWork]) -> None:
        self.speeds = speeds
        self.free_s = 0.0
        self._costs = costs
        self._work = work
        self._issued_s: dict[str, float] = {}
        self._batch_end_s: dict[str, float] = {}

    def begin(self, work: Sequence[HostWork], release_s: float) -> None:
        """Go on with the work of an extension, of which nothing is issued before ``release_s``."""
        self._work = work
        self.wait_until(release_s)

    def reach_step(self, index: int) -> None:
        """Do the work that stands before step ``index`` of the compute lane; after the last one, index -1."""
        work = self._work[index]
        for label, seconds in work.issues:
            self.free_s += seconds
            if label:
                self._issued_s[label] = self.free_s
        self.free_s += work.start_s

    def issue(self, seconds: float) -> float:
        """Issue ops in so many seconds; return when that began."""
        began_s = self.free_s
        self.free_s += seconds
        return began_s

    def issue_comm(self, comm: Comm, phase: str) -> None:
        """Issue a communication of a step of this phase."""
        self.free_s += self.speeds.issue_s(self._costs, comm, phase)

    def issued_s(self, label: str) -> float:
        """Return when the communication of another lane was issued; 0 where it may begin before that."""
        return self._issued_s.get(label, 0.0)

    def end_batch(self, label: str, end_s: float) -> None:
        """Say that a blocking batch of transfers has ended."""
        self._batch_end_s[label] = end_s

    def synchronise(self, labels: Iterable[str]) -> None:
        """Let the host catch up with the batches among ``labels``, as it is about to issue what waits for them.

        Megatron-LM synchronises the device after ``batch_isend_irecv``, so that its host cannot run ahead. What the
        host has issued before, it has issued, however many pieces of it are played at once.
        """
        for label in labels:
            if label in self._batch_end_s:
                self.wait_until(self._batch_end_s[label])

    def wait_until(self, time_s: float) -> None:
        """Issue nothing more before ``time_s``: the host waits for the GPU."""
        self.free_s = max(self.free_s, time_s)

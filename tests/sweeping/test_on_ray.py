"""Points on a Ray cluster of two nodes: the same as on this machine, and nothing is lost with a node.

`make test-cluster` runs them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import simulator
from simulator.errors import InputError
from simulator.sweeping import evaluation, on_ray, remote
from simulator.sweeping.entry import sweep_space
from simulator.sweeping.equal_points import EqualPoints
from simulator.sweeping.evaluation import OpenedPoint, open_point
from simulator.sweeping.evaluator import EvaluatedPoint
from simulator.sweeping.on_ray import RayCluster
from simulator.sweeping.outcome import PointOutcome, Status
from simulator.sweeping.point import Point
from simulator.sweeping.runners import runner_on
from tests.support.searches import LARGE
from tests.support.sweeps import SMALLEST, InProcess, space_of, swept, write_job

ROOT = Path(__file__).resolve().parents[2]
VALUES: dict[str, list[Any]] = {"model.layers": [1, 2], "parallelism.tp": [1, 2, 3]}


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node. Ray gives its processes 15 s to load, which a busy machine may miss twice."""
    for _ in range(2):
        with suppress(Exception):  # Ray raises no narrower one
            return start()
    return start()


class TwoNodes:
    """A cluster of a head and a worker, of a core each, on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        def head() -> tuple[int, Cluster]:
            port, *_ = self._ports(1)
            arguments = {**self._node(), "ray_client_server_port": port}
            return port, Cluster(initialize_head=True, head_node_args=arguments, connect=False)

        port, self.cluster = patiently(head)
        self.address = f"ray://127.0.0.1:{port}"
        self.worker: Any = None
        self.join()

    def join(self) -> None:
        self.worker = patiently(lambda: self.cluster.add_node(**self._node()))

    def kill_worker(self) -> None:
        """End the worker's processes without a word."""
        self.cluster.remove_node(self.worker, allow_graceful=False)

    @staticmethod
    def _ports(count: int) -> list[int]:
        with ExitStack() as open_sockets:
            free = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
            for one in free:
                one.bind(("127.0.0.1", 0))
            return [one.getsockname()[1] for one in free]

    def _node(self) -> dict[str, Any]:
        ports = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")
        return {"num_cpus": 1, "include_dashboard": False, **dict(zip(ports, self._ports(4), strict=True))}


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in on_ray.QUIET.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT))
        two = TwoNodes()
        yield two
        two.cluster.shutdown()


pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.fixture
def nothing_is_simulated_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a simulation fail in this process. Processes of the cluster import modules of their own."""

    def refuse(opened: OpenedPoint) -> PointOutcome:
        raise AssertionError("simulated by the process that asks")

    for module in (evaluation, remote):
        monkeypatch.setattr(module, "simulated", refuse)


@pytest.mark.slow
def test_results_are_those_of_this_machine(nodes: TwoNodes, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Refusals among them. The workload's file is read here alone: the cluster does not know the folder."""
    path = write_job(tmp_path)
    here = swept(VALUES, path)
    request.getfixturevalue("nothing_is_simulated_here")
    there = sweep_space(space_of(VALUES, path), RayCluster(nodes.address))
    assert there.rows == here.rows
    assert [outcome.status for outcome in there.outcomes].count(Status.REFUSED) == 2


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_when_a_node_is_killed_and_another_joins(nodes: TwoNodes, tmp_path: Path) -> None:
    """The worker dies after the fifth of forty points, and a fresh one joins after the fifteenth."""
    out, seen = tmp_path / "s.db", list[EvaluatedPoint]()

    def disturb(one: EvaluatedPoint) -> None:
        seen.append(one)
        if len(seen) == 5:
            nodes.kill_worker()
        if len(seen) == 15:
            nodes.join()

    space = space_of({"seed": list(range(40))})
    there = sweep_space(space, RayCluster(nodes.address), out, watch=disturb)
    here = sweep_space(space, InProcess())
    assert [outcome.status for outcome in there.outcomes] == [Status.SIMULATED] * 40
    assert there.rows == here.rows
    assert len({one.outcome.key for one in seen}) == len(seen) == 40
    again = sweep_space(space, RayCluster(nodes.address), out)
    assert again.kept == 40


@pytest.mark.slow
def test_a_sweep_that_was_interrupted_goes_on_elsewhere(nodes: TwoNodes, tmp_path: Path) -> None:
    """Three points are finished on the cluster when Ctrl-C is pressed; this machine does the others alone."""
    out, seen = tmp_path / "s.db", list[EvaluatedPoint]()

    def interrupt(one: EvaluatedPoint) -> None:
        seen.append(one)
        if len(seen) == 3:
            raise KeyboardInterrupt

    space = space_of({"seed": list(range(8))})
    with pytest.raises(KeyboardInterrupt):
        sweep_space(space, RayCluster(nodes.address), out, watch=interrupt)
    here = InProcess()
    assert sweep_space(space, here, out).kept == 3
    assert len(here.simulated) == 5


@pytest.mark.slow
def test_a_search_finds_the_same(nodes: TwoNodes, request: pytest.FixtureRequest) -> None:
    """Both prove the two fastest layouts, and the cluster's processes simulate all that the proof takes."""
    fixed: dict[str, list[Any]] = {"cp": [1], "micro_batch": [1], "recompute": ["full"], "zero": [0], "vpp": [1]}
    here = simulator.search(LARGE, gpus=4, fix=fixed, top=2, jobs=1)
    request.getfixturevalue("nothing_is_simulated_here")
    there = simulator.search(LARGE, gpus=4, fix=fixed, top=2, jobs=1, on=nodes.address)
    proven = [[(one.step_time_s, one.candidate.changes) for one in each.ranking.fitting[:2]] for each in (here, there)]
    assert proven[0] == proven[1]
    assert len(proven[0]) == 2
    assert here.is_proven
    assert there.is_proven


@pytest.mark.slow
def test_the_command_starts_a_cluster_of_this_machine(tmp_path: Path) -> None:
    """The command prints the same tables with Ray as without: two layouts with figures, and one that is refused."""
    pytest.importorskip("ray")
    write_job(tmp_path)
    words = ["sweep", "tiny.yaml", "--grid", "parallelism.tp=1,2,3", "--jobs", "1"]
    printed = []
    for more in (["--out", "here.db"], ["--out", "there.db", "--on", "local-ray"]):
        done = subprocess.run(
            [sys.executable, "-m", "simulator", *words, *more],
            cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.partition("All points are in")[0])
    assert printed[0].startswith("3 points of tiny.yaml: 2 fit, 1 refused")
    assert printed[0] == printed[1]


def test_a_machine_with_another_simulator_or_other_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No simulation begins there, and the message says what is wrong."""
    opened = open_point(Point(0, SMALLEST, {}))
    assert isinstance(opened, OpenedPoint)
    outcome = remote.simulated_alike(opened)
    assert isinstance(outcome, PointOutcome)
    assert outcome.status == Status.SIMULATED
    monkeypatch.setattr(remote, "job_key", lambda workload: "another key")
    other = remote.simulated_alike(opened)
    assert isinstance(other, remote.Mismatch)
    assert "is another one" in other.why


@pytest.mark.parametrize("place", ["ray://", "ray://host", "spark://host:1", "everywhere", ""])
def test_places_that_are_none_are_refused(place: str) -> None:
    with pytest.raises(InputError, match="is no place to run"):
        runner_on(1, place)


def test_a_cluster_that_does_not_answer_is_refused() -> None:
    """Port 1 of this machine is closed."""
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="no Ray cluster answers"):
        simulator.sweep(SMALLEST, grid={"seed": [1]}, on="ray://127.0.0.1:1")


def test_without_ray_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="Ray is not installed"):
        simulator.sweep(SMALLEST, grid={"seed": [1]}, on="local-ray")


def test_a_process_that_is_connected_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address would not be used otherwise. The environment is as before."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    before = dict(os.environ)
    with pytest.raises(InputError, match="connected to a Ray cluster already"):
        simulator.sweep(SMALLEST, grid={"seed": [1]}, on="ray://127.0.0.1:1")
    assert dict(os.environ) == before


@pytest.mark.parametrize("lost", ["WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfDiskError"])
def test_what_a_cluster_loses_is_tried_again_until_it_has_failed(lost: str) -> None:
    opened = open_point(Point(0, SMALLEST, {}))
    assert isinstance(opened, OpenedPoint)
    tasks = _tasks_that_raise(lost)
    seen = [tasks._outcome(None, opened) for _ in range(on_ray.MOST_LOSSES)]
    assert seen[:-1] == [None] * (on_ray.MOST_LOSSES - 1)
    assert seen[-1] is not None
    assert seen[-1].status == Status.FAILED
    assert lost in seen[-1].error


@pytest.mark.parametrize("unable", ["RayTaskError", "RaySystemError"])
def test_a_machine_that_cannot_run_the_simulator_ends_the_sweep(unable: str) -> None:
    """Also where Ray says nothing of it."""
    opened = open_point(Point(0, SMALLEST, {}))
    assert isinstance(opened, OpenedPoint)
    with pytest.raises(InputError, match=f"cannot run the simulator: {unable}"):
        _tasks_that_raise(unable)._outcome(None, opened)


@pytest.mark.parametrize(
    ("cores", "free", "is_told"), [(4, 1, False), (4, 0.5, True), (4, None, True), (0, None, False)]
)
def test_cores_that_others_hold_are_told_of(cores: int, free: float | None, is_told: bool) -> None:
    """Ray leaves out a resource of which nothing is free. A cluster without cores has a message of its own."""
    left = {} if free is None else {"CPU": free}
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": float(cores)}, available_resources=lambda: left)
    assert on_ray.taken_by_others(ray) == (
        "others use all 4 cores of the Ray cluster: points wait until one is free" if is_told else ""
    )


def test_points_equal_to_one_that_is_under_way_wait_for_it() -> None:
    """One of three equal points is handed out. The second waits for it, and the third comes when it is done."""
    points = [Point(number, SMALLEST, {}) for number in range(3)]
    tasks = on_ray._Tasks(SimpleNamespace(), 1, iter(points[:2]), frozenset(), EqualPoints(lambda key: True))
    first = tasks._next()
    assert isinstance(first, OpenedPoint)
    assert tasks._next() is None
    assert tasks.equal.n_waiting == 1
    done = PointOutcome(first.key, Status.SIMULATED)
    tasks.ray = SimpleNamespace(wait=lambda references, **_: (references, []), get=lambda reference: done)
    tasks.ray.exceptions = SimpleNamespace(RayTaskError=OSError, RuntimeEnvSetupError=OSError, RaySystemError=OSError)
    tasks.under_way = {"task": first}
    assert list(tasks._ended()) == [(points[0], done), (points[1], PointOutcome(first.key, Status.KEPT))]
    tasks.left = iter(points[2:])
    assert tasks._next() == (points[2], PointOutcome(first.key, Status.KEPT))


def _tasks_that_raise(name: str) -> Any:
    """Tasks on a cluster whose every answer is one of Ray's errors, without a word."""
    exceptions = pytest.importorskip("ray").exceptions
    silent = type(name, (getattr(exceptions, name),), {"__init__": lambda self: None, "__str__": lambda self: ""})

    def answer(reference: object) -> None:
        raise silent

    ray = SimpleNamespace(exceptions=exceptions, get=answer)
    return on_ray._Tasks(ray, 1, iter(()), frozenset(), EqualPoints(lambda key: True))

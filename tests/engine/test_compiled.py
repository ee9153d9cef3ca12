"""The compiled engine plays what the one in Python plays, to the last bit; where it is missing, that one plays."""

from __future__ import annotations

import ctypes
import gc
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from simulator import share, simulate
from simulator.api import run
from simulator.config import Workload, load_workload
from simulator.engine import Placed, simulate_together
from simulator.engine.compiled import build, handle, library
from simulator.engine.engines import engine_in_use
from simulator.errors import InputError
from simulator.program import Extension, Step, from_text, reordered, steps
from tests.recorded.jobs import JOBS
from tests.support.clusters import nic_cluster
from tests.support.engines import ENGINES
from tests.support.exact import timeline_differences
from tests.support.jobs import job
from tests.support.transfers import IDEAL

ROOT = Path(__file__).resolve().parents[2]
#: Recorded jobs in which different parts of the engine have something to do.
VARIED = (
    *("schedule_1f1b_in_line", "schedule_zb_auto", "dp_zero1_in_line", "dp_fsdp_eager", "dp_async", "dp_tree"),
    *("offload_parameters_nvme", "moe_list", "cp_ring_tp_nodes", "tp_nvls", "slow_gpu", "background", "no_fold"),
    *("no_coalesce", "sharp", "stack_deepep", "mi300x", "llama3_8b_dgx_h100"),
)
TWO_RANKS = """
program name=two
block 0 name=work
  compute k F fixed seconds=1.0
role all ranks=0-1
  lane compute
    step x block=0
  lane dp
    step y after=x
      comm sum all_reduce nbytes=1e9 axis=dp purpose=dp algorithm=ring
group dp 0,1
"""


def workload(name: str, **simulation: Any) -> Workload:
    """Return the workload of a recorded job, to be played like this."""
    return load_workload(
        JOBS[name].workload, JOBS[name].changes | {f"simulation.{key}": value for key, value in simulation.items()}
    )


#: Changes of a job in four stages: transfers between passes, beside them, and split backward passes.
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"parallelism.overlap.p2p": True},
    {"parallelism.overlap.p2p": True, "parallelism.schedule": "zb_h1"},
]


@pytest.mark.parametrize("changes", LAYOUTS)
def test_figures_of_a_step_are_worked_out_from_columns(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but the engine in Python asks for the passes and transfers of lanes one by one."""
    counts: list[int] = []

    def counted(step: Step, after: tuple[str, ...], **others: Any) -> Step:
        counts[-1] += 1
        return reordered(step, after, **others)

    monkeypatch.setattr(steps, "reordered", counted)
    job = JOBS["schedule_1f1b_in_line"]
    for engine in ENGINES:
        counts.append(0)
        run(load_workload(job.workload, job.changes | changes | {"simulation.engine": engine})).key_figures()
    compiled, reference = counts
    assert compiled == 0 < reference


@pytest.mark.parametrize("name", VARIED)
def test_a_job_is_played_alike(name: str) -> None:
    compiled, reference = (run(workload(name, engine=engine)).played for engine in ENGINES)
    assert compiled.events > 0
    assert list(timeline_differences(compiled, reference)) == []


def test_jobs_that_share_a_cluster_are_played_alike() -> None:
    """Two jobs whose transfers meet on the links between nodes."""
    compiled, reference = (
        share(["gpt22b_tp8", "gpt22b_tp8"], set={"placement": "interleaved", "simulation.engine": engine})
        for engine in ENGINES
    )
    for one, other in zip(compiled.results, reference.results, strict=True):
        assert list(timeline_differences(one.played, other.played)) == []


def test_it_is_seen_where_timelines_differ() -> None:
    first, other = (simulate(program_of(seconds), nic_cluster(2), IDEAL) for seconds in ("1.0", "1.0000000001"))
    assert list(timeline_differences(first, first)) == []
    differing = {text.partition(":")[0] for text in timeline_differences(first, other)}
    assert {"start_s", "end_s"} <= differing


def program_of(seconds: str = "1.0") -> Any:
    return from_text(TWO_RANKS.replace("seconds=1.0", f"seconds={seconds}"))


# Errors and interrupts


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("of the source"), StopIteration(1)])
def test_what_a_question_raises_is_raised(error: Any) -> None:
    """A source of extensions is called by the loop; its error ends the simulation, as itself."""

    def more() -> Any:
        def source(now_s: float) -> Extension:
            raise error

        return source

    with pytest.raises(error if isinstance(error, type) else type(error)):
        simulate(program_of(), nic_cluster(2), IDEAL, more=more, engine="compiled")


def test_an_interrupt_stops_a_simulation_between_stretches_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal comes in the third stretch of ten events; a job of hundreds of events ends behind that."""
    stretches: list[int] = []
    call = handle.SimulationHandle.call

    def counted(self: handle.SimulationHandle, function: str, *arguments: Any) -> Any:
        if function == "run":
            stretches.append(len(stretches))
            if len(stretches) == 3:
                signal.raise_signal(signal.SIGINT)
        return call(self, function, *arguments)

    monkeypatch.setattr(handle, "EVENTS_AT_ONCE", 10)
    monkeypatch.setattr(handle.SimulationHandle, "call", counted)
    with pytest.raises(KeyboardInterrupt):
        run(workload("schedule_1f1b_in_line", engine="compiled"))
    assert len(stretches) == 3


@pytest.mark.parametrize("delay_s", [0.001 * 3**n for n in range(6)])
def test_a_signal_is_heard_whenever_it_comes(delay_s: float) -> None:
    """Its error comes out, be it in the loop, in an answer, or before the first line of one."""

    class StoppedError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StoppedError

    # Python drops an error that is raised while it collects garbage, for which other tests' tools have callbacks.
    gc.disable()
    before = signal.signal(signal.SIGALRM, stop)
    job = workload("llama3_8b_dgx_h100", engine="compiled")

    def play() -> None:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        for _ in range(50):
            run(job)

    try:
        with pytest.raises(StoppedError):
            play()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


# Which engine plays


def test_the_compiled_engine_plays_where_it_was_built() -> None:
    """Tests run where there is a C compiler."""
    assert library.why_missing() == ""
    assert [engine_in_use(engine) for engine in ("auto", "compiled", "python")] == ["compiled", "compiled", "python"]


@pytest.fixture
def no_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "LIBRARY", "nowhere.so")
    library.event_loop.cache_clear()
    yield
    library.event_loop.cache_clear()


@pytest.mark.usefixtures("no_loop")
def test_without_a_compiler_the_engine_in_python_plays() -> None:
    assert engine_in_use("auto") == "python"
    timeline = simulate(program_of(), nic_cluster(2), IDEAL)
    assert timeline.step_time_s > 1.0
    with pytest.raises(InputError, match="it was not built") as caught:
        simulate(program_of(), nic_cluster(2), IDEAL, engine="compiled")
    assert "simulation.engine" in str(caught.value)


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "digest", lambda: "another")
    library.event_loop.cache_clear()
    assert "built from other sources" in library.why_missing()
    library.event_loop.cache_clear()


def test_a_file_that_is_no_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / library.LIBRARY).write_text("no library")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library.event_loop.cache_clear()
    assert "cannot be loaded" in library.why_missing()
    library.event_loop.cache_clear()


@pytest.mark.parametrize(
    ("asked", "plays"),
    [(("auto", "auto"), "auto"), (("auto", "compiled"), "compiled"), (("compiled", "python"), "python")],
)
def test_jobs_that_share_a_cluster_are_played_by_the_engine_that_any_asks_for(
    asked: tuple[str, str], plays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine plays all of them: the one in Python where a job asks for it, else what a job asks for."""
    seen: set[str] = set()

    def noted(jobs: Sequence[Placed], *arguments: Any, **options: Any) -> Any:
        if len(jobs) > 1:  # each is also played alone, by its own
            seen.add(options["engine"])
        return simulate_together(jobs, *arguments, **options)

    monkeypatch.setattr("simulator.sharing.simulate_together", noted)
    share([job(simulation={"engine": engine}, parallelism={"dp": 8}) for engine in asked])
    assert seen == {plays}


# The library


def test_python_and_the_loop_mean_the_same_structures() -> None:
    sizes = (ctypes.c_int32 * len(library.RECORDS))()
    assert library.event_loop().sizes_of_records(sizes) == len(library.RECORDS)
    for record, size in zip(library.RECORDS, sizes, strict=True):
        expected = ctypes.sizeof(record) if isinstance(record, type) else record.itemsize
        assert expected == size, record


def test_the_event_loop_is_compiled_without_warnings(tmp_path: Path) -> None:
    """gcc says of arguments behind setjmp that they might be lost by longjmp, after which none is read."""
    options = "-O1", "-Wall", "-Wextra", "-Wno-clobbered", "-Werror"
    built = build.compile_loop(*options, library=tmp_path / build.LIBRARY)
    assert ctypes.CDLL(str(built)).digest_of_sources
    assert len(build.digest()) == 16


def test_files_of_the_event_loop_are_no_longer_than_a_reader_can_hold() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in build.sources()}
    assert {"lane.c", "network.c", "gpu.c"} <= lengths.keys()
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert [
        path.name for path in build.sources() if any(len(line) > 120 for line in path.read_text().splitlines())
    ] == []

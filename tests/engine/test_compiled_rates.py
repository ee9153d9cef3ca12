"""Max-min fair rates and the record of contention: C's are Python's, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from simulator.api import run
from simulator.config import load_workload
from simulator.engine.compiled.handle import SimulationHandle
from simulator.engine.compiled.library import QuestionsRecord
from simulator.engine.compiled.network import NumberedPhases
from simulator.network import flows
from simulator.network.flows import Network
from simulator.network.max_min import Saturations, max_min_rates
from simulator.network.plan import Phase, Plan
from simulator.network.simulated_time import SimulatedTime
from tests.recorded.jobs import JOBS
from tests.support.engines import ENGINES
from tests.support.exact import timeline_differences


def loop_on(capacity_Bps: Sequence[float]) -> SimulationHandle:
    """Return a simulation of links alone, which has nothing to ask."""
    questions = [name for name, _ in QuestionsRecord._fields_ if name != "answer"]
    return SimulationHandle({name: lambda *_: 0 for name in questions}, capacity_Bps, (0, 0, 0, 0))


def random_phases(rng: random.Random, n_links: int) -> list[Phase]:
    """Return up to six phases on some links, each with a load on one of them at least; loads and caps often tie."""
    phases = []
    for _ in range(rng.randint(1, 6)):
        links = rng.sample(range(n_links), rng.randint(1, n_links))
        loads = [rng.choice([0.0, 1.0, 0.5, 1 / 3, rng.random()]) for _ in links[1:]]
        cap_Bps = rng.choice([float("inf"), 1e9, 10e9, 50e9 * rng.random()])
        phases.append(Phase(1.0, tuple(zip(links, [1.0, *loads], strict=True)), 0.0, cap_Bps))
    return phases


def states(record: Saturations) -> list[tuple[object, ...]]:
    """Return all that is recorded, state by state in its order, with loads for the phases that cross a link."""
    columns = record.phase, record.rate_Bps, record.cap_Bps, record.is_held_up
    return [
        (
            *(int(record.link[state]), float(record.seconds[state])),
            *zip(*[column[record.state == state].tolist() for column in columns], strict=True),
        )
        for state in range(len(record.link))
    ]


@pytest.mark.parametrize("seed", range(4))
def test_rates_and_full_links_are_those_of_python(seed: int) -> None:
    """A hundred times, background traffic on up to eight links: rates, and after a second who held whom up."""
    rng, n_states = random.Random(seed), 0
    for _ in range(100):
        capacity_Bps = [rng.choice([1e9, 25e9, 50e9 * rng.random()]) for _ in range(rng.randint(1, 8))]
        phases = random_phases(rng, len(capacity_Bps))
        env = SimulatedTime()
        network = Network(env, capacity_Bps)
        handle = loop_on(capacity_Bps)
        numbered = NumberedPhases(handle)
        numbers = [numbered.number(phase) for phase in phases]
        assert numbered.rates_Bps(numbers).tolist() == max_min_rates(phases, capacity_Bps)
        for phase, number in zip(phases, numbers, strict=True):
            network.occupy(phase)
            handle.add("begin_background", number)
        env.run()
        handle.run()
        network.finish(1.0)
        handle.add("finish", 1.0)
        expected, record = Saturations.from_states(network.saturated_s), numbered.saturations()
        in_c = {id(phase): number for number, phase in enumerate(record.phases)}
        assert in_c.keys() == {id(phase) for phase in expected.phases}
        as_in_c = np.array([in_c[id(phase)] for phase in expected.phases], dtype=np.int64)
        by_number = states(record)
        assert by_number == states(_renumbered(expected, as_in_c))
        n_states += len(by_number)
        handle.close()
    assert n_states > 50


def _renumbered(record: Saturations, number: np.ndarray) -> Saturations:
    return Saturations(
        (),
        record.link,
        record.seconds,
        record.state,
        number[record.phase] if len(record.phase) else record.phase,
        record.rate_Bps,
        record.cap_Bps,
        record.is_held_up,
    )


def test_states_that_no_link_came_to_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solutions are asked for again and again, five remembered; the record has the one state that was reached."""
    monkeypatch.setattr(flows, "REMEMBERED", 5)
    handle = loop_on([1e9] * 4)
    numbered = NumberedPhases(handle)
    phases = [Phase(1.0, ((number % 4, 1.0),), 0.0) for number in range(12)]
    numbers = [numbered.number(phase) for phase in phases]
    numbered.add_alone(Plan("", (phases[0],)), 3)
    rng = random.Random(1)
    for _ in range(50):
        chosen = rng.sample(numbers, 8)
        assert numbered.rates_Bps(chosen).tolist() == max_min_rates([phases[n] for n in chosen], [1e9] * 4)
    _, kept, crossers = numbered._states()
    assert (len(kept), len(crossers)) == (1, 1)
    numbered.add_alone(Plan("", (phases[0],)), 2)  # its solution was given up: worked out anew, a state of its own
    record = numbered.saturations()
    assert (record.link.tolist(), record.seconds.tolist()) == ([0, 0], [3e-9, 2e-9])
    handle.close()


@pytest.mark.parametrize("remembered", [1, 7])
@pytest.mark.parametrize("name", ["background", "cp_ring_tp_nodes", "schedule_1f1b_in_line"])
def test_a_job_is_played_alike_where_little_is_remembered(
    name: str, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates are worked out again and again; nothing else changes, and links stay in states of solutions given up."""
    monkeypatch.setattr(flows, "REMEMBERED", remembered)
    compiled, reference = (
        run(load_workload(JOBS[name].workload, JOBS[name].changes | {"simulation.engine": engine})).played
        for engine in ENGINES
    )
    assert list(timeline_differences(compiled, reference)) == []
    monkeypatch.undo()
    whole = run(load_workload(JOBS[name].workload, JOBS[name].changes)).played
    assert compiled.step_time_s == whole.step_time_s

"""The end of an instant, which SimPy's environment does not know."""

from __future__ import annotations

import math

from simulator.network.simulated_time import SimulatedTime


def test_what_is_put_off_comes_after_all_else_at_its_instant() -> None:
    """At 1 s one event puts work off and triggers another, which triggers a third: the work comes behind all of them,
    and before what happens at 2 s. What the work starts at its own instant comes next."""
    env, order = SimulatedTime(), list[str]()

    def happen(name: str, delay_s: float, *then: str) -> None:
        env.timeout(delay_s).callbacks.append(lambda _: (order.append(f"{name} at {env.now:g}"), follow(then)))

    def follow(names: tuple[str, ...]) -> None:
        if names:
            happen(names[0], 0.0, *names[1:])

    def work() -> None:
        order.append(f"work at {env.now:g}")
        happen("after work", 0.0)

    env.timeout(1.0).callbacks.append(lambda _: env.at_end_of_instant(work))
    happen("first", 1.0, "second", "third")
    happen("late", 2.0)
    env.run()
    assert order == ["first at 1", "second at 1", "third at 1", "work at 1", "after work at 1", "late at 2"]


def test_work_that_is_put_off_is_the_next_event_now_and_counts_as_one() -> None:
    """A timeout, and the work that it puts off: two events. While the work waits, the next event is now."""
    env = SimulatedTime()
    seen = list[float]()
    env.timeout(3.0).callbacks.append(lambda _: env.at_end_of_instant(lambda: seen.append(env.now)))
    assert env.peek() == 3.0
    env.step()
    assert (env.peek(), seen) == (3.0, [])
    env.step()
    assert (env.peek(), seen, env.events) == (math.inf, [3.0], 2)

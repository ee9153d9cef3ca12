"""Checks of one job that is played in several ways: what must be the same, and what cannot become faster."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from simulator import share
from simulator.analysis.training import steady_state
from simulator.api import cluster_of
from simulator.engine import simulate
from simulator.engine.invariants import Place, check
from simulator.engine.memory_bandwidth import INSTANT_s
from simulator.errors import InputError
from simulator.lowering import shortened, shortening
from simulator.program import from_text, to_text
from simulator.searching.bounds import LayoutBounds
from simulator.step_result import StepResult
from simulator.timeline import Timeline
from tests.support.brute_folding import partition_differences
from tests.support.exact import assert_same, steady_differences, timeline_differences
from tests.support.random_jobs import Job, load
from tests.support.random_plays import MAX_STEPS, Plays, alone_step, content, played

#: Two results are the same if they differ by less than this share, or by fewer seconds.
TOLERANCE, TOLERANCE_s = 1e-9, 1e-11
#: Parts of a critical path may differ by this too: each of its pieces begins within the engine's instants of 1e-12 s.
PATH_s = 1e-10
#: Keys of a result that are not compared: how it was played, and keys that were given without effect.
NOT_COMPARED = ("simulation", "warnings")
#: A link of the same kind may be named after another one of the class that it stands for.
NAMES = ("name", "link", "links")
#: Keys of clusters that refuse a node more: their number of nodes is fixed, has to be a multiple, or is one, without
#: network cards, or their switches have no port for it.
NO_ROOM = (
    *("cluster.nodes", "cluster.overrides", "cluster.node.nics.count"),
    *(f"cluster.fabric.{key}" for key in ("sites.count", "tiers", "radix", "shape", "switches")),
)


class Problem(NamedTuple):
    """A check that failed: its name, and what was seen."""

    check: str
    text: str


Check = Callable[[Plays], Iterator[str]]
#: A list of a result.
Entries = Sequence[Any]


def problems(job: Job, checks: Mapping[str, Check]) -> list[Problem]:
    """Return what ``checks`` find wrong with a job. A play that raises anything is a problem too."""
    plays, seen = Plays(job), list[Problem]()
    for name, one in checks.items():
        try:
            seen += [Problem(name, text) for text in one(plays)]
        except Exception as error:
            seen.append(Problem(name, f"{type(error).__name__}: {error}"))
    return seen


def same_without_shortcuts(plays: Plays) -> Iterator[str]:
    """Yield what differs between plays with and without folding and coalescing; each is a possible step."""
    both, neither = content(plays.quick), content(plays.plain)
    for result, figures in ((plays.quick, both), (plays.plain, neither)):
        check(result.program, result.played, Place(result.placed, result.cluster))
        path_s = sum(part["seconds"] for part in figures["critical_path"])
        # A kernel of communication looks for SMs two instants after it was launched: no time of anything on the path.
        slack_s = TOLERANCE * result.spans.step_time_s + 2 * INSTANT_s * len(result.spans.start_s)
        if abs(path_s - result.spans.step_time_s) > slack_s:
            yield f"the critical path takes {path_s!r} s, the step {result.spans.step_time_s!r} s"
    yield from differences(both, neither, plays.plain.spans.step_time_s)
    assert_same(plays.quick, plays.plain)


def same_with_one_shortcut(plays: Plays) -> Iterator[str]:
    """Yield what differs where ranks are folded alone, or operations coalesced alone."""
    neither = content(plays.plain)
    for fold in (True, False):
        result = played(plays.workload, fold=fold, coalesce=not fold)
        check(result.program, result.played, Place(result.placed, result.cluster))
        for text in differences(content(result), neither, plays.plain.spans.step_time_s):
            yield f"fold {fold}, coalesce {not fold}: {text}"


def same_advice(plays: Plays) -> Iterator[str]:
    """Yield what differs with and without folding and coalescing in reports with advice."""
    yield from differences(plays.quick.to_dict(), plays.plain.to_dict(), plays.plain.spans.step_time_s)


def same_until_steady(plays: Plays) -> Iterator[str]:
    """Yield what differs where a job of many micro-batches is played only until its pipeline repeats itself."""
    layout, training = plays.workload.parallelism, plays.job["training"]
    many = -(-(4 * layout.n_stages + 16) // plays.workload.microbatches)
    training = training | {"global_batch": many * training["global_batch"]}
    workload = load(plays.job | {"training": training})
    with patch.object(shortening, "LEAST_LEFT_OUT", 0):
        short = shortened(workload) and played(workload)
    if short and short.repetition is not None:
        whole = played(workload, steady=False)
        yield from steady_differences(short.spans, whole.spans)
        yield from differences(figures_of(short), figures_of(whole), whole.spans.step_time_s)


def figures_of(result: StepResult) -> dict[str, Any]:
    """Return key figures, and what links carried and who met on them."""
    spans = result.spans
    links, contention = [asdict(link) for link in spans.links], [asdict(one) for one in spans.contention]
    return {"figures": result.key_figures(), "links": links, "contention": contention}


def same_compiled(plays: Plays) -> Iterator[str]:
    """Yield what differs between the compiled engine and the one in Python, to the last bit."""
    yield from timeline_differences(plays.quick.played, played(plays.workload, engine="python").played)


def same_when_read_back(plays: Plays) -> Iterator[str]:
    """Yield what differs where the whole workload, or its program, is written down and read back."""
    workload, first = plays.workload, plays.quick
    text = json.dumps(workload.model_dump(mode="json"))
    again = load(json.loads(text))
    if again != workload:
        yield from (f"workload read back: {text}" for text in differences(content(first), content(played(again))))
    program = from_text(to_text(first.program))
    timeline = simulate(program, first.cluster, first.costs, nodes=workload.nodes)
    for column in ("start_s", "end_s"):
        if not np.array_equal(getattr(timeline, column), getattr(first.played, column)):
            yield f"program read back: {column} differs"


def same_beside_an_idle_job(plays: Plays) -> Iterator[str]:
    """Yield a slowdown other than 1 beside a job of one GPU on a node of its own, with which no link is shared.

    Some clusters have no room for a node more. Any other refusal is raised.
    """
    job = plays.job
    cluster = {key: value for key, value in job["cluster"].items() if key != "nodes"}
    idle = {
        "name": "idle",
        "model": {"layers": 1, "hidden": 256, "heads": 8, "vocab": 1000},
        "training": {"seq": 128, "global_batch": 1, "precision": job["training"]["precision"]},
        "parallelism": {"dp": 1},
        "cluster": cluster,
    }
    both = [load({**job, "cluster": cluster}), load(idle)]
    try:
        with patch.object(steady_state, "MAX_STEPS", MAX_STEPS):
            shared = share(both)
    except InputError as refusal:
        if refusal.key not in NO_ROOM:
            raise
        return
    slowdown = shared.to_dict()["runs"][0]["sharing"]["slowdown"]
    if abs(slowdown - 1) > TOLERANCE:
        yield f"slowdown {slowdown:.9f}"


def sharing_is_no_gain(plays: Plays) -> Iterator[str]:
    """Yield the steps of a lane that end sooner with all that is shared than with nothing shared.

    The same program is played twice: as it is, and alone (`alone_timeline`). Alone, every start is a maximum over ends,
    and every end a start plus a length (max-plus). What is shared only makes lengths longer. Transfers share links and
    hosts' memory, kernels and communication share SMs and a GPU's memory. By induction over the program no step ends
    sooner. A power limit is left out, as it makes clocks faster too.
    """
    ends, ends_alone = _ends(plays.shared), _ends(plays.shared_alone)
    for step in ends.keys() & ends_alone.keys():  # collectives in a block have a lane where the block stops for them
        end_s = ends[step]
        if end_s < ends_alone[step] * (1 - TOLERANCE):
            yield f"rank, lane, step {step}: ends at {end_s!r} s with what is shared, at {ends_alone[step]!r} s alone"


def slower_gpu_is_no_gain(plays: Plays) -> Iterator[str]:
    """Yield the gain of a step by a GPU at nine tenths of its speed, one after the other of the first two.

    Steps are played with nothing shared (`alone_step`). The order of passes and collectives does not depend on a GPU's
    speed, nor does the algorithm of a collective. A step is then a max-plus function of the lengths of kernels and
    transfers, and monotone in each: the sign is strict. A steady period is the mean of the longest cycle of such a
    function, and monotone too.

    Where links are shared at max-min rates, the sign can be wrong, as in Braess's paradox. A transfer that comes later
    can leave a link to one that more waits for. Nothing holds there but `sharing_is_no_gain`: the gain is at most what
    sharing cost. A schedule that is tuned to rehearsed seconds has another order with another GPU, and is left out.
    """
    if not _is_monotone(plays):
        return
    present = [gpu.name for gpu in plays.quick.cluster.gpus]  # one may be missing, or the node have one
    for gpu in sorted({"node0.gpu0", "node0.gpu1"}.intersection(present)):
        yield from _no_gain(plays.alone, f"{gpu} slower", _changed(plays.job, gpu=gpu, speed_scale=0.9))


def faster_links_are_no_loss(plays: Plays) -> Iterator[str]:
    """Yield the loss of a step by links of twice the bandwidth, with nothing shared (`alone_step`).

    On an idle network a transfer's length is the least of its algorithms' and protocols', each of which falls with the
    bandwidth. A step is monotone in these lengths (`slower_gpu_is_no_gain`): the sign is strict.
    """
    if not _is_monotone(plays):
        return
    links = {"".join("*" if x.isdigit() else x for x in link.name) for link in cluster_of(plays.workload).links}
    faster = plays.job
    for link in sorted({name.partition(":")[0] for name in links}):
        faster = _changed(faster, link=link, bandwidth_scale=2.0)
    before_s, after_s = plays.alone.spans.step_time_s, _settled_s(faster)
    if after_s is not None and after_s > before_s * (1 + TOLERANCE):
        yield f"twice the bandwidth: {before_s:.9g} s to {after_s:.9g} s, {after_s / before_s - 1:+.2e}"


def more_microbatches_take_longer(plays: Plays) -> Iterator[str]:
    """Yield a step of twice the micro-batches that is no longer, with nothing shared (`alone_step`).

    Most schedules order m micro-batches as they order some m of 2m. Without the others the longer step is the shorter
    one. Passes that take no time make no step longer (max-plus again): the sign is strict. Other orders have no such
    proof, and keep the sign all the same: interleaved ones of a number that p does not divide, some of zb_v, DualPipeV.

    Twice as long is no bound: a second micro-batch adds its gradients to those of the first, which is a kernel more.
    """
    training = plays.job["training"]
    twice = {**plays.job, "training": {**training, "global_batch": 2 * training["global_batch"]}}
    if _settled(plays.alone):
        yield from _no_gain(plays.alone, "twice the micro-batches", twice)


def not_below_bounds(plays: Plays) -> Iterator[str]:
    """Yield a step that is shorter, or takes less memory, than the search for layouts says it must."""
    workload = plays.workload
    bound = replace(LayoutBounds.for_workload(workload), capacity_bytes=math.inf).bound({}, workload)
    # The figure `peak_bytes` is that of the GPU with the least left, which need not be the fullest of unlike ones.
    fullest_bytes = max(memory.total for memory in plays.quick.memories)
    for what, least, simulated in (
        ("step_time_s", bound.step_time_s, plays.quick.key_figures()["step_time_s"]),
        ("bytes of the fullest GPU", bound.memory_bytes, fullest_bytes),
    ):
        if simulated < least * (1 - TOLERANCE):
            yield f"{what}: {simulated:.9g} is below its bound {least:.9g}"


def same_classes(plays: Plays) -> Iterator[str]:
    """Yield where folding by arithmetic finds other classes than refinement over everything there is."""
    yield from partition_differences([plays.quick.placed], plays.quick.cluster)


#: Name -> check.
CHECKS: dict[str, Check] = {
    "shortcuts": same_without_shortcuts,
    "one shortcut": same_with_one_shortcut,
    "fold": same_classes,
    "steady": same_until_steady,
    "compiled": same_compiled,
    "read back": same_when_read_back,
    "idle job": same_beside_an_idle_job,
    "sharing": sharing_is_no_gain,
    "slower GPU": slower_gpu_is_no_gain,
    "faster links": faster_links_are_no_loss,
    "micro-batches": more_microbatches_take_longer,
    "bounds": not_below_bounds,
    "advice": same_advice,
}
#: Check -> it is made for one job in so many, as it takes as long as several others.
RARE = {"one shortcut": 3, "idle job": 3, "advice": 10}


def _ends(timeline: Timeline) -> dict[tuple[int, str, int], float]:
    """Return when each step ended: (rank, lane, number) -> seconds."""
    ends: dict[tuple[int, str, int], float] = {}
    for rank, lane, step, end_s in zip(timeline.rank, timeline.lane, timeline.step, timeline.end_s, strict=True):
        key = int(rank), timeline.lane_names[lane], int(step)
        ends[key] = max(ends.get(key, 0.0), float(end_s))
    return ends


def _changed(job: Job, **override: Any) -> Job:
    """Return the job with one override more of its cluster, laid over one of the same part."""
    part = next(iter(override))
    overrides = job["cluster"].get("overrides", [])
    same = [one for one in overrides if one.get(part) == override[part]]
    merged = {**(same[0] if same else {}), **override}
    for key in set(merged) & {"speed_scale", "bandwidth_scale"}:
        merged[key] = override[key] * (same[0].get(key, 1.0) if same else 1.0)
    kept = [one for one in overrides if one not in same]
    return {**job, "cluster": {**job["cluster"], "overrides": [*kept, merged]}}


def _settled(result: StepResult) -> bool:
    return result.steady is None or result.steady.stable


def _is_monotone(plays: Plays) -> bool:
    """Return whether a step is known to be monotone: no order that is tuned to seconds, and a period that settled."""
    return plays.workload.parallelism.pipeline_schedule.search is None and _settled(plays.alone)


def _settled_s(job: Job) -> float | None:
    """Return the seconds of a step with nothing shared; None where it does not settle."""
    result = alone_step(load(job))
    return result.spans.step_time_s if _settled(result) else None


def _no_gain(before: StepResult, what: str, job: Job) -> Iterator[str]:
    before_s, after_s = before.spans.step_time_s, _settled_s(job)
    if after_s is not None and after_s < before_s * (1 - TOLERANCE):
        yield f"{what}: {before_s:.9g} s to {after_s:.9g} s, {after_s / before_s - 1:+.2e}"


def differences(first: Any, second: Any, step_s: float = 0.0, path: str = "") -> Iterator[str]:
    """Yield where two results differ: seconds by a share of the step ``step_s``, others by a share of their own."""
    if path == "critical_path":
        yield from _path_differences(first, second, step_s)
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            yield f"{path}: keys {sorted(first.keys() ^ second.keys())}"
        for key in first.keys() & second.keys():
            named_by_link = key == "axis" and first.get("job", "") is None  # background traffic
            if key not in NOT_COMPARED and not named_by_link:
                yield from differences(first[key], second[key], step_s, f"{path}.{key}".lstrip("."))
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        yield from _entry_differences(first, second, step_s, path)
    elif isinstance(first, float) or isinstance(second, float):
        scale = max(abs(first), abs(second))
        scale = max(scale, step_s) if path.endswith(("_s", "seconds")) else max(scale, 1.0)
        if abs(first - second) > TOLERANCE * scale + TOLERANCE_s * scale / max(step_s, TOLERANCE_s):
            yield f"{path}: {first!r} and {second!r}"
    elif first != second and path.rpartition(".")[2] not in NAMES:
        yield f"{path}: {first!r} and {second!r}"


def _path_differences(first: Entries, second: Entries, step_s: float) -> Iterator[str]:
    """Yield where two critical paths differ, whose equal classes may come in any order."""
    one, other = ({row["class"]: row["seconds"] for row in rows} for rows in (first, second))
    for name in sorted({*one, *other}):
        one_s, other_s = one.get(name, 0.0), other.get(name, 0.0)
        if abs(one_s - other_s) > TOLERANCE * step_s + PATH_s:
            yield f"critical_path.{name}: {one_s!r} and {other_s!r} seconds"


def _entry_differences(first: Entries, second: Entries, step_s: float, path: str) -> Iterator[str]:
    if len(first) != len(second):
        yield f"{path}: {len(first)} and {len(second)} entries"
    for number, pair in enumerate(zip(first, second, strict=False)):
        yield from differences(*pair, step_s, f"{path}[{number}]")

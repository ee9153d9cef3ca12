"""Advice on jobs that do not fit into memory: other settings, and the memory of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from simulator.analysis.training import key_changes
from simulator.analysis.training.advice_words import setting_caveats, setting_words
from simulator.analysis.training.key_changes import KeyChange, KeyChanges, always
from simulator.analysis.training.memory import RankMemory, fullest, is_narrow
from simulator.analysis.training.reserved_memory import replay_microbatches
from simulator.config import Workload, altered
from simulator.errors import InputError
from simulator.units import format_gib

#: Each trial is a simulation. Trials end with so many changes that make the job fit, or with so many pairs of changes.
ENOUGH, PAIRS = 2, 4

#: Most repetitions of a change: three doublings are eight times as many GPUs.
STEPS = 3

#: A change gets a line where it frees this share of the GPU's memory, or makes the job fit.
LEAST_FREED = 0.01


#: Changes that may free memory, each of which may be repeated. Cheap ones come first, changes of the numerics last.
#: Some are illegal or no help for a given job.
CANDIDATES: tuple[KeyChanges, ...] = (
    key_changes.all_gpus,
    key_changes.flash,
    key_changes.sequence_parallel,
    key_changes.higher_zero,
    key_changes.leaner_schedule,
    key_changes.selective_recompute,
    key_changes.smaller_micro_batch,
    always("training.recompute", "full"),
    key_changes.fully_sharded,
    key_changes.reshard,
    key_changes.reduced_each_time,
    key_changes.more_expert_parallelism,
    key_changes.more_tensor_parallelism,
    key_changes.more_pipeline_parallelism,
    key_changes.more_context_parallelism,
    key_changes.more_replicas,
    always("parallelism.offload.activations", "cpu"),
    always("parallelism.offload.optimizer", "cpu"),
    always("parallelism.offload.parameters", "cpu"),
    always("training.optimizer.state_dtype", "bf16"),
    always("training.optimizer.master_weights", False),
    always("training.grad_dtype", "bf16"),
)

#: Keys that shard state and parameters among replicas.
_SHARDING = ("parallelism.zero", "parallelism.reshard_after_forward")


@dataclass(frozen=True)
class Change:
    """A legal change of a job: what is set, the changed job, the bytes that it needs, and its entry of `CANDIDATES`."""

    setting: KeyChange
    workload: Workload
    needed: float
    candidate: KeyChanges


@dataclass(frozen=True)
class Trials:
    """Trials of changed jobs.

    ``needed_bytes`` simulates a job and returns the bytes of its fullest rank. ``capacity_bytes``: memory of a GPU.
    """

    needed_bytes: Callable[[Workload], float]
    capacity_bytes: float

    def fits(self, change: Change) -> bool:
        return change.needed <= self.capacity_bytes

    def steps(self, workload: Workload, needed: float, candidate: KeyChanges, most: int = STEPS) -> Iterator[Change]:
        """Yield ``candidate`` taken once, twice and so on.

        It ends where the job fits, or where a repetition frees less than `LEAST_FREED`.

        ``needed``: bytes of ``workload``. ``most``: repetitions at most.
        """
        setting: KeyChange = {}
        for _ in range(most):
            if needed <= self.capacity_bytes:
                return
            step = next(candidate(workload), {})
            try:
                other = altered(workload, step)
            except InputError:
                return
            if other == workload:
                return
            setting = {**setting, **step}
            change = Change(setting, other, self.needed_bytes(few_rounds(other)), candidate)
            if not self.fits(change) and needed - change.needed < LEAST_FREED * self.capacity_bytes:
                return
            yield change
            workload, needed = other, change.needed

    def change(self, workload: Workload, needed: float, candidate: KeyChanges, most: int = STEPS) -> Change | None:
        """Return ``candidate`` repeated until the job fits, else taken once; None where it does not help.

        Each repetition halves a share, so that all further ones together free about as much as the last one. They are
        not tried where that cannot make the job fit.
        """
        first = None
        for change in self.steps(workload, needed, candidate, most):
            first = first or change
            if self.fits(change):
                return change
            if 2 * change.needed - needed > self.capacity_bytes:
                break
            needed = change.needed
        return first

    def alone(self, workload: Workload, needed: float) -> list[Change]:
        """Return the changes that are legal and help a job that needs ``needed`` bytes.

        They end with the last of `ENOUGH` changes that make the job fit. Once a cheaper one does, the others are taken
        once alone.
        """
        changes: list[Change] = []
        for candidate in CANDIDATES:
            fitting = sum(map(self.fits, changes))
            if fitting == ENOUGH:
                break
            most = 1 if fitting else STEPS
            if change := self.change(workload, needed, candidate, most):
                changes.append(change)
        return changes

    def pair(self, alone: Sequence[Change], needed: float) -> KeyChange:
        """Return the first two changes that together make the job fit.

        Pairs are tried that would be enough if each change freed as much as it does alone. The setting is empty where
        `PAIRS` of them are not enough.
        """
        excess = needed - self.capacity_bytes
        likely = [(a, b) for a, b in combinations(alone, 2) if 2 * needed - a.needed - b.needed >= excess]
        for first, second in likely[:PAIRS]:
            both = self.change(first.workload, first.needed, second.candidate)
            if both is not None and self.fits(both):
                return {**first.setting, **both.setting}
        return {}

    def together(self, start: Change) -> Change:
        """Add the candidates from ``start`` on, each repeated while it helps, until the job fits or none is left."""
        for candidate in CANDIDATES[CANDIDATES.index(start.candidate) :]:
            if steps := list(self.steps(start.workload, start.needed, candidate)):
                start = replace(steps[-1], setting={**start.setting, **steps[-1].setting})
        return start


def few_rounds(workload: Workload) -> Workload:
    """Return ``workload`` with the fewest micro-batches of the same memory.

    As many are in flight on every rank, by the claim of its schedule. There are enough for a replay of the allocator in
    each copy of the model. The workload stays as it is where the schedule claims nothing, and where every micro-batch
    has memory of its own.
    """
    layout, training, most = workload.parallelism, workload.training, workload.microbatches

    def in_flight(microbatches: int) -> list[int | None]:
        return [layout.pipeline_schedule.peak(layout.pp, microbatches, layout.vpp, rank) for rank in range(layout.pp)]

    peaks = [peak for peak in in_flight(most) if peak is not None]
    if len(peaks) < layout.pp or workload.stage_runtime.buffers_each_microbatch:
        return workload
    copies = layout.pipeline_schedule.copies
    for fewer in range(copies * replay_microbatches(max(peaks), copies * layout.vpp), most):
        if layout.pipeline_schedule.check(layout.pp, fewer, layout.vpp) is None and in_flight(fewer) == peaks:
            return altered(workload, {"training.global_batch": fewer * training.micro_batch * layout.dp})
    return workload


def advice(memories: Sequence[RankMemory], workload: Workload, needed_bytes: Callable[[Workload], float]) -> list[str]:
    """Return lines on what would make the fullest rank fit; none where everything fits.

    They say which stage lacks how much memory, and how much each of `CANDIDATES` frees. Where none is enough alone, two
    that are enough together follow, or else more. ``needed_bytes`` simulates a changed job and returns the bytes of its
    fullest rank.
    """
    worst = fullest(memories)
    needed, capacity_bytes = worst.total, worst.capacity
    if needed <= capacity_bytes:
        return []
    lines = [
        f"stage {worst.stage} needs {format_gib(needed)}, {format_gib(needed - capacity_bytes)} more than the "
        f"{format_gib(capacity_bytes)} of its GPU"
    ]
    trials = Trials(needed_bytes, capacity_bytes)
    alone = trials.alone(workload, needed)
    for change in alone:
        narrow = is_narrow(change.needed, capacity_bytes)
        verdict = "barely enough" if narrow else "enough" if trials.fits(change) else "not enough alone"
        freed = format_gib(needed - change.needed)
        lines.append(f"{setting_words(change.setting)} would free {freed}: {verdict}{setting_caveats(change.setting)}")
    lines += [*_no_shards(workload), *_not_tried(workload)]
    if not alone:
        lines.append(f"no other setting that was tried frees {LEAST_FREED:.0%} of the GPU's memory")
    elif not any(map(trials.fits, alone)):
        lines.append(_combined(trials, workload, alone, needed))
    return lines


def _combined(trials: Trials, workload: Workload, alone: Sequence[Change], needed: float) -> str:
    setting = trials.pair(alone, needed)
    if not setting:
        everything = trials.together(alone[0])
        if not trials.fits(everything):
            return f"all of these together are not enough: {format_gib(everything.needed)} would be needed"
        setting = everything.setting
    setting = _without_idle_shards(trials, workload, setting)
    return f"together: {setting_words(setting)}{setting_caveats(setting)}"


def _without_idle_shards(trials: Trials, workload: Workload, setting: KeyChange) -> KeyChange:
    """Return ``setting`` without ZeRO where it ends at one replica: nobody shares a shard then.

    It stays where the job is illegal or does not fit without, as of experts that have more replicas than the rest.
    """
    rest = {key: value for key, value in setting.items() if key not in _SHARDING}
    if len(rest) == len(setting) or altered(workload, setting).parallelism.replicas("dp") > 1:
        return setting
    try:
        needed = trials.needed_bytes(few_rounds(altered(workload, rest)))
    except InputError:
        return setting
    return rest if needed <= trials.capacity_bytes else setting


def _no_shards(workload: Workload) -> list[str]:
    layout = workload.parallelism
    if layout.zero and layout.replicas("dp") == 1:
        return [f"parallelism.zero: {layout.zero} saves nothing: dp x cp is 1, so that nobody shares a shard"]
    return []


def _not_tried(workload: Workload) -> list[str]:
    """Return lines on changes that need a figure of the cluster that is missing, by figure."""
    untried: dict[str, list[str]] = {}
    for candidate in CANDIDATES:
        setting = next(candidate(workload), {})
        try:
            altered(workload, setting)
        except InputError as problem:
            if problem.key and problem.key.startswith("cluster.") and problem.found == "null":
                untried.setdefault(problem.key, []).append(setting_words(setting))
    return [f"not tried for want of {key}: {'; '.join(settings)}" for key, settings in untried.items()]

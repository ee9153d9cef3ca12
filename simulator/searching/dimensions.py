"""Dimensions of a search: the keys of a layout, and the values of each that arithmetic leaves.

`DIMENSIONS` is the one place where a key is entered. Each gives its values from those chosen before it. It leaves out
only what no rule of workloads could allow. The rules themselves are asked of whole layouts
(`simulator.searching.candidates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.config import Workload
from simulator.config.pipelines import find_schedule
from simulator.config.rules import context
from simulator.config.rules.numbers import divisors

#: Values of keys that have been chosen, by dotted key.
Chosen = Mapping[str, Any]

#: Most sequences of a micro-batch, unless the search says otherwise.
MOST_SEQUENCES = 16


@dataclass(frozen=True)
class LayoutDimension:
    """A key of the layout.

    ``usual``: values that are tried where the search names none, from the workload, the number of GPUs and the values
    chosen before. ``possible``: whether a value may be legal at all beside those; cheap arithmetic, never stricter than
    the rules of workloads.
    """

    key: str
    usual: Callable[[Workload, int, Chosen], Iterable[Any]]
    possible: Callable[[Workload, int, Chosen, Any], bool] = lambda workload, gpus, chosen, value: True


def _ranks_left(gpus: int, chosen: Chosen) -> int:
    """Return how many ranks the sizes chosen so far leave to the others."""
    for axis in ("tp", "cp", "pp"):
        gpus //= chosen.get(f"parallelism.{axis}", 1)
    return gpus


def _sizes(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    return divisors(_ranks_left(gpus, chosen))


def _divides(workload: Workload, gpus: int, chosen: Chosen, size: int) -> bool:
    return _ranks_left(gpus, chosen) % size == 0


def _splits_heads(workload: Workload, gpus: int, chosen: Chosen, tp: int) -> bool:
    return gpus % tp == 0 and workload.model.heads % tp == 0


def _splits_sequence(workload: Workload, gpus: int, chosen: Chosen, cp: int) -> bool:
    """Return whether the rules of context parallelism have nothing to say, be rows split over tp too or not."""
    if not _divides(workload, gpus, chosen, cp):
        return False
    inside = {
        key.removeprefix("parallelism."): value for key, value in chosen.items() if key.startswith("parallelism.")
    }
    layout = workload.parallelism.model_copy(update={**inside, "cp": cp, "sequence_parallel": False})
    return not any(context.problems(workload.model_copy(update={"parallelism": layout})))


def _splits_layers(workload: Workload, gpus: int, chosen: Chosen, pp: int) -> bool:
    return _divides(workload, gpus, chosen, pp) and _even_stages(workload, pp)


def _even_stages(workload: Workload, stages: int) -> bool:
    """Return whether so many stages have equally many layers, or as many as the file's own split."""
    layout = workload.parallelism
    counted = workload.model.layers + layout.account_for_embedding + layout.account_for_loss
    return counted % stages == 0 or stages == len(layout.layers_per_stage)


def _replicas(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    return [_ranks_left(gpus, chosen)]


def _shares_batch(workload: Workload, gpus: int, chosen: Chosen, dp: int) -> bool:
    return dp == _ranks_left(gpus, chosen) and workload.training.global_batch % dp == 0


def _dense_ranks(chosen: Chosen) -> int:
    """Return the ranks over which experts are folded."""
    return int(chosen["parallelism.tp"] * chosen["parallelism.cp"] * chosen["parallelism.dp"])


def _expert_ranks(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    moe = workload.model.moe
    return [1] if moe is None else divisors(moe.experts + moe.redundant_experts)


def _splits_experts(workload: Workload, gpus: int, chosen: Chosen, ep: int) -> bool:
    moe = workload.model.moe
    if moe is None:
        return ep == 1
    return (moe.experts + moe.redundant_experts) % ep == 0 and _dense_ranks(chosen) % ep == 0


def _tensor_in_experts(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    return [1] if workload.model.moe is None else sorted({1, chosen["parallelism.tp"]})


def _splits_each_expert(workload: Workload, gpus: int, chosen: Chosen, etp: int) -> bool:
    moe = workload.model.moe
    if moe is None:
        return etp == 1
    return moe.ffn_hidden % etp == 0 and _dense_ranks(chosen) % (etp * chosen["parallelism.ep"]) == 0


def _sequences(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    if captured := workload.model.captured_model:
        return [captured.micro_batch]
    shared = divisors(workload.training.global_batch // chosen["parallelism.dp"])
    return [size for size in shared if size <= MOST_SEQUENCES]


def _cuts_batch(workload: Workload, gpus: int, chosen: Chosen, size: int) -> bool:
    return bool(workload.training.global_batch // chosen["parallelism.dp"] % size == 0)


def _schedules(workload: Workload, gpus: int, chosen: Chosen) -> list[str]:
    """Return the file's schedule, 1F1B, and the interleaved one where its rounds are whole, as Megatron-LM asks."""
    if chosen["parallelism.pp"] == 1:
        return ["1f1b"]
    whole = _microbatches(workload, chosen) % chosen["parallelism.pp"] == 0
    return list(dict.fromkeys(("1f1b", *(["interleaved"] if whole else []), workload.parallelism.schedule)))


def _microbatches(workload: Workload, chosen: Chosen) -> int:
    return int(workload.training.global_batch // (chosen["parallelism.dp"] * chosen["training.micro_batch"]))


def _chunks(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    fixed, pp = find_schedule(chosen["parallelism.schedule"]).chunks, chosen["parallelism.pp"]
    return [fixed] if fixed is not None else divisors(max(workload.model.layers // pp, 1))


def _plays_chunks(workload: Workload, gpus: int, chosen: Chosen, vpp: int) -> bool:
    schedule, pp = find_schedule(chosen["parallelism.schedule"]), chosen["parallelism.pp"]
    return _even_stages(workload, pp * vpp) and schedule.check(pp, _microbatches(workload, chosen), vpp) is None


def _recomputed(workload: Workload, gpus: int, chosen: Chosen) -> list[Any]:
    recompute = workload.training.recompute
    tries_selective = workload.model.keeps_scores or recompute.granularity == "selective"
    usual: list[Any] = ["none", "selective", "full"] if tries_selective else ["none", "full"]
    if recompute.model_fields_set - {"granularity"} or recompute.granularity not in usual:
        usual.append(recompute.model_dump(exclude_unset=True))
    return usual


def _shardings(workload: Workload, gpus: int, chosen: Chosen) -> list[int]:
    """Return the stages of ZeRO; in a pipeline those that do not reduce gradients for every micro-batch."""
    if chosen["parallelism.dp"] * chosen["parallelism.cp"] == 1:
        return [0]
    return [0, 1, 2, 3] if chosen["parallelism.pp"] == 1 else sorted({0, 1, workload.parallelism.zero})


def _splits_rows(workload: Workload, gpus: int, chosen: Chosen) -> list[bool]:
    return [chosen["parallelism.tp"] > 1 and not workload.parallelism.scatter_gather_p2p]


#: In the order in which values are chosen: those that rule out most come first.
DIMENSIONS: tuple[LayoutDimension, ...] = (
    LayoutDimension("parallelism.tp", _sizes, _splits_heads),
    LayoutDimension("parallelism.cp", _sizes, _splits_sequence),
    LayoutDimension("parallelism.pp", _sizes, _splits_layers),
    LayoutDimension("parallelism.dp", _replicas, _shares_batch),
    LayoutDimension("parallelism.ep", _expert_ranks, _splits_experts),
    LayoutDimension("parallelism.etp", _tensor_in_experts, _splits_each_expert),
    LayoutDimension("training.micro_batch", _sequences, _cuts_batch),
    LayoutDimension("parallelism.schedule", _schedules),
    LayoutDimension("parallelism.vpp", _chunks, _plays_chunks),
    LayoutDimension("training.recompute", _recomputed),
    LayoutDimension("parallelism.zero", _shardings),
    LayoutDimension("parallelism.sequence_parallel", _splits_rows),
)

"""The suites of memory: what each source measured, and what its software kept that the rows do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from simulator.analysis.training.memory import RankMemory
from simulator.analysis.training.static_memory import CUDA_CONTEXT_BYTES
from simulator.units import GiB, MiB
from simulator.validation.evaluate import Quantity
from simulator.validation.rows import Row, measured_memory, read_rows
from simulator.validation.suite import Bounds, Suite
from simulator.validation.suites import DATA, SUITES


@dataclass(frozen=True)
class MemorySource:
    """Rows of one source. ``figure``: ``allocated`` or ``reserved`` by PyTorch's allocator, or all that is taken on the
    ``device``, of the fullest rank; ``unit``: bytes of what the source prints as one; ``evidence`` for both.
    ``context``: the CUDA context where it is known (bytes); None: as everywhere else.
    """

    suite: Suite
    figure: Literal["allocated", "reserved", "device"]
    unit: float
    evidence: str
    context: float | None = None

    @property
    def rows(self) -> list[dict[str, str]]:
        """Rows that state a memory."""
        return [row for row in read_rows(self.suite.table) if row.get("mem_gb")]


#: What a GPU has for its processes, bytes, by the name that rows give it: what its driver reports.
CAPACITY: dict[str, float] = {
    "V100-16G": 16160 * MiB,  # nvidia-smi
    "V100-32G": 32510 * MiB,  # nvidia-smi
    "A100-80G-SXM": 81251 * MiB,  # nvidia-smi of driver 470
    "H100-80G": 81559 * MiB,  # nvidia-smi
    "H100": 81559 * MiB,
    "H100-96G-HBM2e-500W": 95.0 * GiB,  # "77.0 GiB" is printed as 81 % of it (torchtitan, benchmarks, December 2024)
    "H200": 143771 * MiB,  # nvidia-smi
    "B200-SXM": 183359 * MiB,  # nvidia-smi
    "GB300": 284208 * MiB,  # nvidia-smi
}

#: Megatron-DeepSpeed of 2021 and 2022, without sequence parallelism.
_DEEPSPEED: dict[str, Any] = {
    "model.dropout": 0.1,
    "framework.name": "deepspeed",
    "training.grad_dtype": "fp16",
    "parallelism.sequence_parallel": False,
}

_BRIDGE = SUITES["megatron-bridge"]

SOURCES: tuple[MemorySource, ...] = (
    MemorySource(
        Suite(
            name="memory-bigscience-bloom",
            about="BigScience, chronicles-prequel.md: 104B to 205B on A100s, before BLOOM",
            table=DATA / "memory-bigscience-bloom.csv",
            settings=_DEEPSPEED | {"model.heads": 64},  # "all NHEADS=64 (above too)"
            bounds=Bounds(),
            year=2022,
            special=(
                ({"hidden": "14400"}, {"model.heads": 96}),
                # "BF16 optimizer that was just written to accumulate gradients in fp32"; those of a micro-batch stay.
                ({"precision": "bf16"}, {"training.grad_dtype": "fp32"}),
            ),
        ),
        figure="device",
        unit=1000 * MiB,
        evidence="'quickly getting the memory snapshot with ... nvidia-smi', which prints MiB, on the end nodes; "
        "its GB are thousands of them: in the same group's tables a V100 of 16,160 MiB (15.8 GiB) is full at '16GB'",
        context=1573 * MiB,  # "40GB A100 takes 1573MiB for cuda kernels"
    ),
    MemorySource(
        Suite(
            name="memory-bigscience-1b3",
            about="BigScience, tr3m-1B3.md: 1.3B on V100s",
            table=DATA / "memory-bigscience-1b3.csv",
            settings=_DEEPSPEED | {"model.vocab": 50257, "model.attention": "unfused"},
            bounds=Bounds(),
            year=2021,
        ),
        figure="device",
        unit=1000 * MiB,
        evidence="as the other tables of BigScience",
        context=1113 * MiB,  # "V100 16GB 1113MiB, V100 32GB 1113MiB"
    ),
    MemorySource(
        SUITES["zero-bubble"],
        figure="allocated",
        unit=1e9,
        evidence="the paper says GB; its Megatron-LM reports torch.cuda.max_memory_allocated (megatron/utils.py)",
    ),
    MemorySource(
        SUITES["simumax-b200"],
        figure="allocated",
        unit=GiB,
        evidence="'max over ranks of torch max_memory_allocated (GiB)'",
    ),
    MemorySource(
        Suite(
            name="memory-torchtitan",
            about="torchtitan, benchmarks: Llama 3.1 with FSDP on H100s and H200s",
            table=DATA / "memory-torchtitan.csv",
            # torch.compile of each TransformerBlock, not of the loss, before April 2025; selective checkpointing is the
            # default's, by "op" (train_configs/llama3_8b.toml).
            settings={"framework.name": "pytorch", "framework.compile": True, "training.loss": "eager"},
            bounds=Bounds(),
            year=2025,
            special=(({"gpu": "H200"}, {"training.loss": "compiled"}),),
        ),
        figure="reserved",
        unit=GiB,
        evidence="torchtitan logs max_reserved_gib (torchtitan/components/metrics.py)",
    ),
    *(
        MemorySource(
            SUITES[name],
            figure="allocated",
            unit=GiB,
            evidence="max_memory_allocated / 2^30 (kempnerforge/metrics/memory.py and tracker.py)",
        )
        for name in ("kempner-fsdp", "kempner-tp")
    ),
    *(
        MemorySource(
            suite,
            figure="allocated",
            unit=1e9,
            evidence="'peak allocated GB': Megatron's mem-max-allocated-bytes / 1e9",
        )
        # Rows with a step time are a suite of steps too.
        for suite in (
            _BRIDGE,
            replace(_BRIDGE, name="memory-megatron-bridge", table=DATA / "memory-megatron-bridge.csv"),
        )
    ),
)


_OWN = MemorySource(
    SUITES["own-h200"],
    figure="allocated",
    unit=1e9,
    evidence="steady_allocated_bytes of `calibration.train.record`: torch.cuda.max_memory_allocated of the timed steps",
)


_OWN_FRAMEWORKS = replace(_OWN, suite=SUITES["own-frameworks"])


_OWN_FP8 = replace(_OWN, suite=SUITES["own-fp8"])


_HUGGING_FACE = MemorySource(
    SUITES["hugging-face"],
    figure="allocated",
    unit=1e9,
    evidence="peak_allocated_bytes of calibration/measurements/hugging-face.csv: torch.cuda.max_memory_allocated",
)


@dataclass(frozen=True)
class MemorySuite:
    """Rows of several sources under one name, and what they must keep to."""

    sources: tuple[MemorySource, ...]
    bounds: Bounds

    @property
    def rows(self) -> list[dict[str, str]]:
        """Rows of all sources."""
        return [row for source in self.sources for row in source.rows]


#: By name: published memory of GPUs in training, and that of our own runs.
MEMORY_SUITES: Mapping[str, MemorySuite] = {
    "memory": MemorySuite(SOURCES, Bounds(mean=0.10)),
    "own-h200-memory": MemorySuite((_OWN,), Bounds(mean=0.02)),
    "own-frameworks-memory": MemorySuite((_OWN_FRAMEWORKS,), Bounds(mean=0.03)),
    "own-fp8-memory": MemorySuite((_OWN_FP8,), Bounds(mean=0.01)),
    "hugging-face-memory": MemorySuite((_HUGGING_FACE,), Bounds(mean=0.01)),
}


@lru_cache
def _sources() -> dict[str, MemorySource]:
    return {row["id"]: source for suite in MEMORY_SUITES.values() for source in suite.sources for row in source.rows}


def source_of(row_id: str) -> MemorySource:
    """Return the source of a row of the suites."""
    return _sources()[row_id]


def settings_of(row: Row) -> dict[str, Any]:
    """Dotted workload keys for what a row leaves open."""
    return source_of(row["id"]).suite.settings_of(row)


def capacity_of(row: Row) -> float:
    """Return the bytes of the GPU that a row's process can use, less what its context is larger than usual."""
    context = source_of(row["id"]).context
    return CAPACITY[row["gpu"]] - (0.0 if context is None else context - CUDA_CONTEXT_BYTES)


def predicted_gib(row: Row, memories: Sequence[RankMemory]) -> float:
    """The figure that the row's source prints, of the fullest rank, in GiB."""
    source = source_of(row["id"])
    more = 0.0 if source.context is None or source.figure != "device" else source.context - CUDA_CONTEXT_BYTES
    figure = {"allocated": "allocated", "reserved": "reserved", "device": "total"}[source.figure]
    return (max(float(getattr(memory, figure)) for memory in memories) + more) / GiB


MEMORY = Quantity(
    name="memory",
    unit="GiB",
    measured=lambda row: measured_memory(row) * source_of(row["id"]).unit / GiB,
    memory_only=True,
)

"""A workload: a model, how it is trained, how it is laid out, and the cluster that it runs on.

`simulator.config.loading` reads one from a file. A loaded one is complete: presets are expanded, every default has its
value, and the rules of `simulator.config.rules` hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from simulator.bounds import EngineChoice, Text
from simulator.config.framework import FrameworkChoice
from simulator.config.model import Model
from simulator.config.parallelism import Parallelism
from simulator.config.section import AsSection, AsTuple, Integral, Section
from simulator.config.training import Training
from simulator.frameworks import (
    Framework,
    JobTraits,
    Replication,
    StageRuntime,
    find_framework,
    in_one_graph,
    with_inductors_kernels,
    without_fused,
)
from simulator.hardware.cluster_spec import ClusterSpec
from simulator.units import DTYPE_BYTES


class Simulation(Section):
    """How the job is played. It comes to the same timeline in every way, sooner or later."""

    fold: bool = True
    """ranks that do the same at the same time are simulated once [true]"""
    coalesce: bool = True
    """operations that nothing can interrupt are advanced together [true]"""
    steady: bool = True
    """where a pipeline does the same again and again, it is played until it repeats itself [true]"""
    engine: EngineChoice = "auto"
    """what plays: compiled, python (the reference), or auto: compiled where it was built [auto]"""

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of `simulate`, under their names there."""
        return self.model_dump(exclude={"steady"})


class Workload(Section):
    """One training job, complete and legal."""

    name: Text
    """[the file's name]"""
    note: Text = ""
    """what `list workloads` says of it, such as that it does not fit [none]"""
    model: Model
    training: Training
    framework: FrameworkChoice = FrameworkChoice()
    """a name, or {name, version, compile}: whose kernels, gradient buffers, sends, host costs and defaults
    [megatron_core]"""
    parallelism: Parallelism = Parallelism()
    cluster: Annotated[ClusterSpec, AsSection()]
    """a name in topologies/, a path, or a mapping; {name: dgx_a100, nodes: 128} also fixes the size
    [nodes: as many as the cluster's file says where that is more than one, else the fewest that hold the ranks]"""
    calibration: str | dict[str, str] = ""
    """a profile's name or path [the shipped profile of the GPU]; of a job on several types of GPU a mapping, type ->
    profile"""
    stack: str = ""
    """what carries collectives: a name in calibration/stacks/ or a path [the profile's own transports]"""
    placement: Literal["packed", "interleaved"] | Annotated[tuple[Annotated[int, Field(ge=0)], ...], AsTuple] = "packed"
    """which nodes of the cluster the job takes: packed (the first that are free), interleaved (in turn with the other
    interleaved jobs that share the cluster), or a list of their numbers, ranks node by node [packed]"""
    seed: Annotated[int, Field(ge=0, le=2**63), Integral] = 0
    """of everything random: which experts a skewed distribution prefers [0]"""
    simulation: Simulation = Simulation()

    def with_hosts_at(self, share: float) -> Workload:
        """Return the job with the speed of its hosts times ``share``."""
        return self.model_copy(update={"cluster": self.cluster.with_hosts_at(share)})

    @property
    def n_ranks(self) -> int:
        return self.parallelism.model_parallel * self.parallelism.dp

    @property
    def microbatches(self) -> int:
        """Micro-batches of one step, per data-parallel replica."""
        return self.training.global_batch // (self.training.micro_batch * self.parallelism.dp)

    @property
    def software(self) -> Framework:
        """The framework in its version, for layers split or whole: facts, and hooks that return operations."""
        stack = find_framework(self.framework.name, self.framework.version, self.framework.compile)
        stack = stack.split if stack.split is not None and self.parallelism.tp > 1 else stack
        stack = without_fused(stack, self.training.unfused)
        stack = with_inductors_kernels(stack) if self.model.captured and stack.compiles else stack
        return in_one_graph(stack) if self.framework.whole_step_graph else stack

    @property
    def has_unfused_kernels(self) -> bool:
        """True where attention runs in steps, as grouped queries do in fp32, or experts have biases to add."""
        model = self.model
        in_steps = self.training.precision == "fp32" and model.kv_heads != model.heads
        return model.attention != "flash" or in_steps or "experts" in model.biases

    @property
    def traits(self) -> JobTraits:
        """The facts by which a framework decides how to run the job."""
        training, layout = self.training, self.parallelism
        together = layout.data_parallel == "allreduce"
        return JobTraits(
            norm=self.model.norm,
            precision=training.trained_dtype,
            grad_dtype=training.grad_dtype,
            master_weights=training.optimizer.master_weights,
            keeps_gradients=training.keep_gradients,
            zero=layout.zero,
            stages=layout.n_stages,
            etp=layout.tp if layout.tp * layout.cp * layout.dp % (layout.ep * layout.tp) == 0 else 1,
            experts=self.model.moe is not None,
            replicas=layout.replicas("dp"),
            reduces_beside=together and layout.overlap.grad_reduce,
            updates_on_gpu=not layout.updates_elsewhere,
            shares_cpus=together
            and layout.offload.optimizer != "none"
            and min(self.n_ranks, max(node.gpus.count for node in self.cluster.kinds)) > 1,
        )

    @property
    def adds_whole_gradients(self) -> bool:
        """True where ranks that shard gradients add up whole ones of several micro-batches before they reduce them."""
        layout = self.parallelism
        return layout.zero == 3 and not layout.sync_each_micro_batch and self.microbatches > 1

    @property
    def replication(self) -> Replication:
        """How gradients are kept, and how replicas share them."""
        return self.software.replication(self.traits)

    @property
    def kept_gradient_dtype(self) -> str:
        """Type of the gradients that the optimizer reads; ``training.grad_dtype`` is that of their reduction.

        Torch's ``fully_shard`` casts a reduced shard to the type of its weights before it keeps it, adds to it or
        sends it to the host (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_reduce``).
        """
        casts = self.replication.fully_sharded and self.replication.weights_are_masters
        return "fp32" if casts else self.training.grad_dtype

    @property
    def host_gradient_bytes(self) -> int:
        """Bytes of a gradient that goes to the host."""
        return DTYPE_BYTES["fp32" if self.replication.widens_for_host else self.kept_gradient_dtype]

    @property
    def stage_runtime(self) -> StageRuntime:
        """How the stages of a pipeline run; without a pipeline there is nothing to differ."""
        return self.software.stages if self.parallelism.pp > 1 else StageRuntime()

    @property
    def calibrations(self) -> Mapping[str, str]:
        """Type of GPU of the ranks -> its profile's name or path."""
        calibration = self.calibration
        return {gpu: calibration[gpu] if isinstance(calibration, dict) else calibration for gpu in self.gpu_types}

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """The nodes of the cluster that the job lists, in the order of its ranks; None: it takes the first."""
        return None if isinstance(self.placement, str) else self.placement

    @property
    def own_nodes(self) -> tuple[int, ...]:
        """The nodes of the cluster that the job takes: its workers', in the order of ranks, then one per parameter
        server."""
        if self.nodes is not None:
            return self.nodes
        return tuple(range(self.cluster.nodes_for(self.n_ranks) + self.parallelism.server_count))

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types of GPU of the ranks."""
        if len(self.cluster.gpu_types) == 1:  # with no look at every node
            return self.cluster.gpu_types
        workers = self.own_nodes[: len(self.own_nodes) - self.parallelism.server_count]
        return self.cluster.types_on(workers, self.n_ranks)

    @property
    def server_nodes(self) -> tuple[int, ...]:
        """Nodes on whose hosts parameter servers run."""
        return self.own_nodes[len(self.own_nodes) - self.parallelism.server_count :]

    @property
    def gathers_in_8_bits(self) -> bool:
        """True where ZeRO-3 gathers the weights of products in 8 bits in such."""
        fp8 = self.training.fp8
        return fp8 is not None and fp8.gather == "fp8" and self.replication.fully_sharded

    @property
    def rank_tokens(self) -> int:
        """Tokens of one micro-batch that a rank works on: a context-parallel rank has its share of each sequence."""
        return self.training.micro_batch * self.training.seq // self.parallelism.cp

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of what stands in a file, where the cluster can be a name and the workload need have none."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        schema["required"].remove("name")
        cluster = schema["properties"]["cluster"]
        description = cluster.pop("description", "")
        schema["properties"]["cluster"] = {
            "description": description,
            "anyOf": [{"type": "string"}, cluster, {"type": "object", "required": ["name"]}],
        }
        return schema

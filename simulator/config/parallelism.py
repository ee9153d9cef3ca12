"""The parallelism section of a workload file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, WrapValidator

from simulator.bounds import Count
from simulator.config.pipelines import find_schedule, is_file
from simulator.config.section import AsTuple, Integral, Section
from simulator.config.validation import validated
from simulator.program import REPLICAS, Axis
from simulator.schedules import SCHEDULES, Schedule, Times, paired

if TYPE_CHECKING:
    ScheduleName = str
else:
    # What is registered, so that a new schedule needs no line here; or the path of a file, read when it is loaded.
    ScheduleName = Annotated[
        Literal[tuple(SCHEDULES)],
        WrapValidator(lambda text, check: text if isinstance(text, str) and is_file(text) else check(text)),
        WithJsonSchema({"anyOf": [{"enum": list(SCHEDULES)}, {"pattern": r"\.csv$"}], "type": "string"}),
    ]


class Overlap(Section):
    """Communication that runs beside compute."""

    grad_reduce: bool = True
    """gradients reduce while the backward pass goes on [true]"""
    param_gather: bool = True
    """zero 1, 2: parameters gather while the next forward pass begins; zero 3: layers gather ahead of use [true]"""
    p2p: bool = True
    """pipeline sends and receives run beside compute; false: a stage waits for them [true]"""
    ep: bool = False
    """shared experts compute while tokens travel to and from the routed ones [false]"""
    expert_all_to_all: bool = False
    """tokens of one micro-batch's forward pass travel to and from experts while the backward pass of another computes,
    and the other way round (Megatron-Core's overlap_moe_expert_parallel_comm; DualPipe, arXiv 2412.19437) [false]"""
    delayed_weight_grad: bool = False
    """with expert_all_to_all: gradients of a layer's weights come after those of its inputs, and hide more
    (Megatron-Core's delay_wgrad_compute) [false]"""
    tp: bool = False
    """tensor-parallel communication runs beside products, in chunks with sequence parallelism (async TP) [false]"""


OffloadPlace = Literal["none", "cpu", "nvme"]


class Offload(Section):
    """Tensors that live outside the GPU: in the memory of the host (cpu), or on the drives behind it (nvme)."""

    optimizer: OffloadPlace = "none"
    """optimizer states, and the update with them, on the CPU (ZeRO-Offload, arXiv 2101.06840; nvme: the states on
    drives, ZeRO-Infinity, arXiv 2104.07857) [none]"""
    parameters: OffloadPlace = "none"
    """zero 3: shards of the parameters, copied to the GPU before they are gathered [none]"""
    activations: OffloadPlace = "none"
    """what layers save for their backward pass: out after it is made, back a layer ahead of its use (torch's
    save_on_cpu, Megatron-LM's --cpu-offloading) [none]"""


AllReduce = Literal[
    "auto",
    "ring",
    "tree",
    "nvls",
    "nvls_tree",
    "collnet",
    "binary_tree",
    "halving_doubling",
    "rs_ag",
    "direct",
    "hierarchical",
]


class Parallelism(Section):
    """The layout."""

    tp: Count = 1
    """tensor parallelism [1]"""
    pp: Count = 1
    """pipeline parallelism [1]"""
    dp: Count = 1
    """data parallelism [GPUs of the cluster / (tp * pp * cp) where its nodes are given, else 1]"""
    cp: Count = 1
    """context parallelism: the sequence split over ranks [1]"""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """keys and values go round, or all-to-alls trade sequence for heads [ring]"""
    cp_layout: Literal["zigzag", "contiguous"] = "zigzag"
    """of ring: each rank has an early and a late chunk of a sequence, or one part of it, which leaves the last ranks
    most of the causal work [zigzag]"""
    ep: Count = 1
    """expert parallelism: the experts of a layer split over ranks, folded over tp * cp * dp [1]"""
    etp: Count = 1
    """tensor parallelism inside experts; ep * etp divides tp * cp * dp [the framework's: tp for megatron_core
    where that fits, else 1]"""
    dispatcher: Literal["all_to_all", "deepep", "hybridep", "all_gather"] = "all_to_all"
    """ways of tokens to experts: all_to_all, a copy for each expert; deepep and hybridep, once to each rank with some
    of a token's experts, and once to each node, from where it goes on (github.com/deepseek-ai/DeepEP, and NVIDIA's
    branch hybrid-ep of it); all_gather, every token to all ranks [all_to_all]"""
    sequence_parallel: bool = Field(default_factory=lambda section: section["tp"] > 1)
    """norms, dropout and residuals split over tp along the sequence [true when tp > 1]"""
    vocab_parallel: bool = True
    """embedding, projection and loss split over tp; false: each tp rank does all of it [true]"""
    gather_per_product: bool = False
    """torchtitan: queries, keys, values, gate and up each gather the rows of their norm, as
    ``ColwiseParallel(input_layouts=Shard(1))`` does; false: one gather serves all, as its ``PrepareModuleInput``
    [false]"""
    schedule: ScheduleName = "1f1b"
    """a name, or the path of a schedule as CSV in the text form of torch.distributed.pipelining [1f1b]"""
    zb_memory_limit: float = Field(default=1.0, gt=0, le=1e6)
    """zb_auto: activation memory that a rank may hold, as a multiple of 1f1b's peak [1.0]"""
    optimizer_sync: bool = Field(default_factory=lambda section: _synchronises(section))
    """whether ranks of a pipeline wait for each other to agree on gradient norm and infinities before the optimizer;
    false: they go on and validate later (arXiv 2401.10241, section 4) [true; false for zb_h2, zb_auto, zb_v and
    async_1f1b]"""
    vpp: Count = Field(default_factory=lambda section: _chunks(section))
    """model chunks per pipeline rank [1; 2 for schedules with a V of stages]"""
    layers_per_stage: Annotated[tuple[Annotated[int, Field(ge=0), Integral], ...], AsTuple] = ()
    """transformer layers of each of the pp * vpp model stages, in the model's order; 0 where the first stage has only
    the embedding, or the last only the loss [even split]"""
    account_for_embedding: bool = False
    """the embedding counts as a layer of the first stage where layers are split evenly (Megatron-LM's
    --account-for-embedding-in-pipeline-split) [false]"""
    account_for_loss: bool = False
    """so does the vocabulary projection, with the loss, of the last stage [false]"""
    zero: Annotated[int, Field(ge=0, le=3), Integral] = 0
    """what is sharded over dp: 1 the optimizer state, 2 gradients too, 3 parameters too (FSDP) [0]"""
    data_parallel: Literal["allreduce", "parameter_server", "async"] = "allreduce"
    """how replicas share gradients: allreduce (ZeRO's reductions included); parameter_server: workers push them to
    servers, which update the weights when all have, and pull weights; async: so, but no worker waits for another
    (Downpour SGD, Dean et al., NIPS 2012) [allreduce]"""
    servers: Count = 1
    """parameter servers, each with an equal part of the parameters, on the hosts of nodes of their own [1]"""
    grad_compression: Literal["none", "fp8", "int8", "1bit"] = "none"
    """what gradients are reduced in: fp8 (FP8-LM, arXiv 2310.18313), int8 (ZeRO++, arXiv 2306.10209), 1bit (1-bit Adam,
    arXiv 2102.02888); scales, a number per tensor or block, are not counted [none]"""
    offload: Offload = Offload()
    hsdp: Count | None = None
    """zero 1, 2, 3: shard inside groups of so many consecutive members of dp, replicate across them [null: over all]"""
    reshard_after_forward: bool = True
    """zero 3: a layer is dropped after its forward pass and gathered again for its backward pass [true]"""
    sync_each_micro_batch: bool = True
    """zero 3: every micro-batch reduces its gradients; false: each rank adds up whole gradients, which take their full
    memory, and reduces them in the last micro-batch's backward pass (``set_requires_gradient_sync`` of torch's
    fully_shard) [the framework's: false for hugging_face, as Accelerate's sync_each_batch is, and for stages of pytorch
    and torchtitan, as torch's pipelines have it; else true]"""
    prefetch: Annotated[int, Field(ge=0, le=10_000), Integral] = 1
    """zero 3: layers that are gathered ahead of the one that computes [1]"""
    overlap: Overlap = Overlap()
    bucket_bytes: Annotated[int, Field(ge=1, le=10**15), Integral] = 25_000_000
    """with zero 2 or overlap.grad_reduce a bucket of gradients is reduced once it has so many bytes or more; parameters
    sharded by zero 1 or 2 are gathered in buckets of as many [megatron_core: 40e6 gradients, or 1e6 for each replica
    if that is more; deepspeed: 5e8 gradients; else 25e6 bytes, about what PyTorch's DDP has]"""
    copy_to_buckets: bool = False
    """gradients are copied into a bucket to be reduced, as in DeepSpeed; false: they lie in one buffer, reduced in
    place as in Megatron-LM [the framework's: true for deepspeed]"""
    batch_p2p: bool = False
    """sends and receives beside compute are batches of one, on the stream of one communicator: a receive waits behind
    another neighbour's, a send behind the receives before it, as in torch's pipelines up to 2.11
    (``batch_isend_irecv``); false: a stream per neighbour, as since [the framework's: true for pytorch before 2.12]"""
    scatter_gather_p2p: bool = False
    """without sequence parallelism, each tp rank sends 1/tp of the activation to the next stage, which all-gathers it
    (arXiv 2104.04473, section 4.1) [false]"""
    deallocate_pipeline_outputs: bool = True
    """a stage's output is freed once it is sent, as in Megatron-Core; false: it is held until its backward pass, as in
    DeepSpeed's ``pipe_buffers`` and torch's stages [the framework's: true for megatron_core]"""
    rank_order: str = "tp-cp-ep-dp-pp"
    """axes of the rank grid, innermost first; cp and ep may be left out where they are 1 [tp-cp-ep-dp-pp]"""
    collective_algorithm: AllReduce = "auto"
    """of all-reduces; auto takes the fastest of NCCL's (ring, tree, nvls, nvls_tree, collnet) on an idle network, as it
    does [auto]"""

    @property
    def pipeline_schedule(self) -> Schedule:
        """The pipeline schedule; where it depends on what passes take, as for equal stages."""
        schedule = find_schedule(self.schedule)
        schedule = paired(schedule) if self.overlap.expert_all_to_all else schedule
        return schedule.tuned(Times.equal(self.pp, 1.0, 1.0, 1.0, limit=self.zb_memory_limit))

    @property
    def model_parallel(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    def replicas(self, axis: str) -> int:
        """Ranks that hold the same parameters: of axis ``dp`` those outside experts, which context-parallel ranks
        share too (Megatron-LM's dp-cp group); of ``edp`` those of experts."""
        shared = self.dp * self.cp
        return shared if axis == "dp" else shared * self.tp // (self.ep * self.etp)

    def shards(self, axis: str) -> int:
        """Ranks over which ZeRO splits the state of the parameters of an axis: all that hold them; with ``hsdp`` those
        of one instance. Experts have as many instances as the rest (Megatron-LM's
        ``num_distributed_optimizer_instances``), as far as that number divides their replicas. 1 without ZeRO."""
        replicas = self.replicas(axis)
        if not self.zero:
            return 1
        return replicas if self.hsdp is None else replicas // math.gcd(replicas, self.replicas("dp") // self.hsdp)

    def shard_axis(self, axis: str) -> str:
        """The axis of the groups that share a state, each member its shard."""
        return axis if self.shards(axis) in (1, self.replicas(axis)) else REPLICAS[Axis(axis)].shard

    def replica_axis(self, axis: str) -> str:
        """The axis of the groups that hold the same shard."""
        return axis if self.shards(axis) == 1 else REPLICAS[Axis(axis)].replica

    def expert_nodes(self, gpus_per_node: int) -> int:
        """Nodes that an expert-parallel group takes, with neighbouring ranks on each.

        >>> Parallelism(dp=12, ep=12).expert_nodes(8)
        2
        """
        return math.ceil(self.ep * self.etp / gpus_per_node)

    @property
    def server_count(self) -> int:
        """Parameter servers that the job has."""
        return 0 if self.data_parallel == "allreduce" else self.servers

    @property
    def updates_elsewhere(self) -> bool:
        """Weights are updated on hosts or parameter servers, not on this job's GPUs."""
        return self.server_count > 0 or self.offload.optimizer != "none"

    @property
    def posts_ahead(self) -> bool:
        """Receives are posted before anything waits for them, so that ops behind them on a stream do: ``batch_p2p``
        matters."""
        return self.pp > 1 and self.overlap.p2p and self.pipeline_schedule.posts_ahead

    @property
    def n_stages(self) -> int:
        """Stages of the model."""
        return self.pp * self.vpp

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages on a pipeline rank; those of a second copy of the model are numbered from ``n_stages`` on."""
        schedule = self.pipeline_schedule
        stages = range(self.n_stages * schedule.copies)
        return tuple(stage for stage in stages if schedule.rank_of(stage, self.pp) == pipeline_rank)

    @property
    def ends(self) -> tuple[int, int]:
        """The pipeline ranks of the first and the last stage."""
        return self.pipeline_schedule.rank_of(0, self.pp), self.pipeline_schedule.rank_of(self.n_stages - 1, self.pp)

    @property
    def table_in_place(self) -> bool:
        """The rank of the last stage also holds a first stage, so that tied embeddings are one table there."""
        return any(stage % self.n_stages == 0 for stage in self.stages_of(self.ends[1]))


def with_split(data: Mapping[str, Any], before: Parallelism) -> Parallelism:
    """Return the layout of ``data``, which has keys of the layout ``before``, and changed ones.

    The split of the layers that was there before stays where the number of stages does, and is left open elsewhere.
    Raises `InputError` where the data is no layout.
    """
    layout = validated(Parallelism, data, place=lambda key: (None, f"parallelism.{key}"))
    split = before.layers_per_stage
    if not split or layout.layers_per_stage != split or layout.n_stages == len(split):
        return layout
    return validated(Parallelism, {key: value for key, value in data.items() if key != "layers_per_stage"})


def _synchronises(section: dict[str, Any]) -> bool:
    """Return whether the schedule's claim is of one step, which ends for all ranks."""
    return not ("schedule" in section and find_schedule(section["schedule"]).steady)


def _chunks(section: dict[str, Any]) -> int:
    """Return the chunks per rank where the schedule leaves no choice."""
    return (find_schedule(section["schedule"]).chunks or 1) if "schedule" in section else 1

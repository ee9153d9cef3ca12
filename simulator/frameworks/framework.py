"""Everything that a software stack decides of a training step, as one object: facts, and hooks that return operations.

Hooks are plain functions of the shapes that an operation works on. What they return has no weights: models add those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from simulator.frameworks.layout_habits import LayoutHabits
from simulator.frameworks.limits import Limit
from simulator.frameworks.stage_runtime import MEGATRON_STAGES, StageRuntime
from simulator.frameworks.token_travel import RowChunks, Surroundings, cut_and_joined
from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.operations.weights import Weight

#: Sections of a profile, by software. The last two are torch.compile of each layer, and of a whole model.
LaunchSection = Literal["eager", "megatron", "torchtitan", "hugging_face", "deepspeed", "compiled", "compiled_model"]
#: Parts of a model that some stack has both a fused kernel for and PyTorch's (``training.unfused``).
UnfusedPart = Literal["qkv_bias", "rotation", "router"]


class Traffic(NamedTuple):
    """A memory-bound kernel: the end of its name, the class it is priced as, and the tensors it reads and writes."""

    suffix: str
    op: str
    read: float
    written: float


def traffic_kernels(phase: str, name: str, kernels: Iterable[Traffic], nbytes: float, dtype: str) -> Ops:
    """Return ``kernels`` of a ``phase`` of the pass on tensors of ``nbytes``; their names begin with ``name``."""
    end = {"F": "", "B": " bwd", "W": " wgrad"}[phase]
    return tuple(memory(phase, f"{name}{x}{end}", op, r * nbytes, w * nbytes, dtype) for x, op, r, w in kernels)


@dataclass(frozen=True)
class ActivationKernels:
    """Kernels of the function between the two products of an MLP, in tensors of its output's size.

    ``kept``: names of results on the way that are kept beside the input, such as the activated half of a gated one;
    ``kept_in_fp32``: of those in fp32. ``keeps_input``: the input itself is kept.
    """

    forward: tuple[Traffic, ...]
    backward: tuple[Traffic, ...]
    kept: tuple[str, ...] = ()
    kept_in_fp32: tuple[str, ...] = ()
    keeps_input: bool = True


class NormPlace(NamedTuple):
    """A norm, and what stands around it.

    ``saved``: name of its input. ``residual``: that also goes round the block. ``readers``: products that read what it
    gives. ``per_head``: each head of queries or keys is normed.
    """

    name: str
    saved: str
    residual: bool
    readers: int
    per_head: bool = False


@dataclass(frozen=True)
class AdapterKernels:
    """Kernels around the thin products of an adapter, in tensors of its output's size, or of its input's.

    ``added``: its output is scaled and added to the product that it stands beside; ``added_backward``: of that.
    ``input_summed``: the gradient of its input is added to that product's. ``copied``: kernels before that on the
    output of a product of a 4-bit weight.
    """

    added: tuple[Traffic, ...]
    added_backward: tuple[Traffic, ...]
    input_summed: Traffic
    copied: tuple[Traffic, ...] = ()


@dataclass(frozen=True)
class ExpertHooks:
    """Operations around the products of experts.

    ``permute`` and ``unpermute`` return the kernels of the forward and of the backward pass. ``sort`` puts the choices
    of tokens in order before anything is sent. ``counted`` returns the kernels before and behind the exchange of how
    many tokens go where. ``weighs_in_activation``: outputs are weighed by their probabilities before the second
    product, which needs the probabilities only. ``sends_probabilities``: they travel behind the tokens by themselves.
    ``host_waits_for_counts``: the host reads how many tokens come before it issues the next kernel. ``activation``: the
    function between the two products, where it has other kernels than that of a dense MLP. ``one_by_one``: each expert
    has weights, products and an activation of its own. ``sorts_alone``: rows are sorted by the rank's experts once more
    behind the exchange between ranks, also where no other rank sends any. ``biased``: kernels that add biases to what a
    product gives, forward, backward, and of their gradients, where products do not. Its last argument tells the first
    product of an expert (``column``) from the second (``row``), as etp ranks split them. ``chunks``: how rows that come
    from several ranks are put in order. ``sent_once``: work around transfers that take a token once to each rank, where
    the framework has such.
    """

    router: Callable[[Shapes, Experts], Node]
    sort: Callable[[Experts], Ops]
    permute: Callable[[Shapes, Experts], tuple[Ops, Ops]]
    unpermute: Callable[[Shapes, Experts], tuple[Ops, Ops]]
    kept_by_dispatch: Callable[[Shapes, Experts], tuple[Tensor, ...]]
    kept_by_combine: Callable[[Shapes, Experts], tuple[Tensor, ...]]
    weighs_in_activation: bool
    host_waits_for_counts: bool
    activation: Callable[[Shapes], ActivationKernels] | None = None
    one_by_one: bool = False
    sorts_alone: bool = False
    biased: Callable[[Shapes, Experts, str], tuple[Ops, Ops, Ops]] | None = None
    counted: Callable[[Experts], tuple[Ops, Ops]] | None = None
    sends_probabilities: bool = False
    chunks: Callable[[Experts], RowChunks] = cut_and_joined
    sent_once: Callable[[Shapes, Experts], Surroundings] | None = None


@dataclass(frozen=True)
class JobTraits:
    """Facts of a job that decide how a framework runs it.

    ``reduces_beside``: replicas all-reduce gradients while the backward pass goes on. ``updates_on_gpu``: the optimizer
    is neither on the host nor on parameter servers. ``stages``: of the model. ``shares_cpus``: hosts update weights,
    and each has several ranks. ``etp``: ranks that split each expert if those that split other layers do, 1 where such
    groups do not cover all ranks. ``experts``: some layers have them. ``replicas``: ranks that share gradients.
    """

    norm: str
    precision: str
    grad_dtype: str
    master_weights: bool
    keeps_gradients: bool
    zero: int
    stages: int
    reduces_beside: bool
    updates_on_gpu: bool
    shares_cpus: bool = False
    etp: int = 1
    experts: bool = False
    replicas: int = 1

    @property
    def threads_of_torchrun(self) -> dict[str, object]:
        """Threads that update weights on hosts: torchrun sets one where a node has several processes (its run.py)."""
        return {"training.optimizer.threads": 1} if self.shares_cpus else {}


@dataclass(frozen=True)
class Replication:
    """How gradients are kept, and how replicas share them.

    ``fully_sharded``: parameters are sharded by torch's ``fully_shard``. ``weights_are_masters``: the master weights
    alone are kept, and cast where they are gathered or used. ``in_ddp``: gradients go into the buckets of torch's
    ``DistributedDataParallel``. ``hands_over_gradients``: they are what autograd has made, from their first backward
    pass to the optimizer's step, and no parts of a buffer that is always there.
    ``adds_first_gradients`` and ``adds_later_gradients``: those of a step's first micro-batch, and of others, are added
    to a buffer. ``clears_buffers``: the optimizer's step sets buffers to zero. ``shards_buckets``: a bucket of sharded
    gradients is divided by the number of ranks and put together by rank. Of the sum, which is that of an all-reduce up
    to ZeRO-2, each rank copies its shard. ``bucket``: the bytes that always stay of a bucket that gradients are copied
    into: the ``filled`` ones, the ``whole``, or ``none``, where it lives in backward passes alone. ``widens_for_host``:
    gradients are cast to fp32 before they go to the host.
    """

    fully_sharded: bool = False
    weights_are_masters: bool = False
    in_ddp: bool = False
    hands_over_gradients: bool = False
    adds_first_gradients: bool = True
    adds_later_gradients: bool = True
    clears_buffers: bool = True
    shards_buckets: bool = False
    bucket: Literal["filled", "whole", "none"] = "filled"
    widens_for_host: bool = False


class ReducedGradients(NamedTuple):
    """Gradients that the optimizer of a rank works on.

    ``elements`` of ``tensors`` are this rank's, each of so many bytes. ``zero`` is the stage. So many ``passes`` have
    made them. ``alone``: no other rank has the same parameters.
    """

    elements: float
    tensors: int
    element_bytes: int
    zero: int
    passes: int
    alone: bool


class GradientKernels(NamedTuple):
    """Kernels between reduction and update.

    After ``check`` ranks agree whether all numbers are finite, and after ``norm`` on the norm of all. Hosts wait for
    both. ``ready`` leaves gradients in fp32, and ``clip`` scales them.
    """

    check: Ops
    norm: Ops
    ready: Ops
    clip: Ops


def uniform(job: JobTraits) -> bool:
    """Return False: products compute in the type of the weights."""
    return False


def never(shapes: Shapes) -> bool:
    """Return False, whatever the sizes."""
    return False


def nothing(shapes: Shapes) -> Node:
    """Return an operation without kernels, whatever the sizes."""
    return Node()


def gradient_of_lookup(shapes: Shapes, table: int, tied: bool) -> Ops:
    """Return the kernels of an embedding's gradient: the ``table`` is cleared, and rows are added to it."""
    rows = shapes.row_bytes * shapes.tokens / shapes.rows
    return (
        memory("W", "embedding.lookup zero grad", "zero", 0, shapes.weight_element * table, shapes.dtype),
        memory("W", "embedding.lookup wgrad", "embedding_bwd", rows, rows, shapes.dtype),
    )


def in_order(shapes: Shapes) -> str:
    """Return the class of a plain copy, whatever the sizes."""
    return "copy"


def always(position: str) -> bool:
    """Return True, whatever the kind of positions."""
    return True


class EarlierDefaults(NamedTuple):
    """Defaults of workload keys in versions before ``version``."""

    version: tuple[int, ...]
    defaults: Callable[[JobTraits], Mapping[str, object]]


@dataclass(frozen=True, eq=False)
class Framework:
    """One software stack, in one of its versions, compiled or not."""

    name: str
    """the name in workload files"""
    about: str
    """one line that describes it"""

    launch_section: LaunchSection
    """of ``host.launch_s`` in a profile: seconds that its host takes to issue work"""
    memory_sections: tuple[str, ...]
    """of ``kernels.memory`` in a profile: its memory-bound kernels; later sections replace classes of earlier ones"""
    defaults: Callable[[JobTraits], Mapping[str, object]]
    """dotted key of a workload -> its value where the file leaves it open"""
    habits: LayoutHabits
    """layouts that its users choose among"""
    losses: tuple[str, ...]
    """values of ``training.loss`` that it can run"""
    adds_in_products: bool
    """a product that makes a weight gradient can add it to the buffer"""
    activation: Callable[[Shapes], ActivationKernels]
    """the function between the two products of an MLP"""
    rotation: tuple[tuple[Traffic, ...], tuple[Traffic, ...]]
    """kernels that turn queries, or keys, by their positions, and those that turn gradients back"""
    joined_qkv_width: Callable[[Shapes], int]
    """elements of a token that are copied to join the gradients of queries, keys and values"""
    softmax: Callable[[Shapes, int], tuple[Node, Node]]
    """probabilities of so many attention scores, and the dropout after them"""
    residual: Callable[[Shapes, str], Node]
    """dropout of a block's output, and the sum with the block's input"""
    embedding_mask: Callable[[Shapes, float], tuple[Ops, Ops]]
    """kernels of the forward and backward pass that hide words of other ranks, from the bytes of all rows"""
    experts: ExpertHooks
    """operations around the products of experts"""
    adapters: AdapterKernels
    """kernels around the products of adapters"""
    replication: Callable[[JobTraits], Replication]
    """how gradients are kept, and how replicas share them"""
    by_row: str
    """class of kernels that take the same number for a whole row"""
    gradient_kernels: Callable[[ReducedGradients], GradientKernels] | None = None
    """kernels between reduction and update, where they are not Megatron-Core's"""
    hooked_modules: Callable[[Sequence[Weight]], int] | None = None
    """modules with these weights, around which hooks gather and release parameters of ZeRO-3"""
    live_parameters: int = 0
    """layers are gathered ahead until so many parameters are whole; 0: ``parallelism.prefetch`` layers"""
    makes_states_early: bool = False
    """states of optimizers are there before the first step, not made by the first update"""
    rings_in_one_call: bool = False
    """products of a tensor-parallel ring, and their sums, are launched by one call from C++"""
    has_core_experts: bool = False
    """experts are run by Megatron-Core, which has several dispatchers, and 1F1B that hides their all-to-alls"""
    captures_graphs: bool = False
    """parts of its layers can be launched as CUDA graphs"""
    passes_in_graph: bool = False
    """one CUDA graph launches all passes of a step, with their communication"""
    runs_captured: bool = False
    """it runs modules of PyTorch as they were recorded"""
    compiles: bool = False
    """torch.compile makes the kernels of its layers"""
    limits: tuple[Limit, ...] = ()
    """what alone it is simulated with"""
    master_weights: bool = True
    """16-bit weights have an fp32 copy where the workload does not say"""
    joins_projections: Callable[[str], bool] = always
    """queries, keys and values of models with such positions come from one product, and so do gate and up of an MLP"""
    before_layers: Callable[[Shapes], Node] = nothing
    """kernels between the embedding of words and the layers, and what they leave for these"""
    lookup_gradient: Callable[[Shapes, int, bool], Ops] = gradient_of_lookup
    """kernels of the gradient of a table of so many elements, and whether the head's weight is the same"""
    autocasts: Callable[[JobTraits], bool] = uniform
    """weights are in fp32, and products cast what they read (torch.autocast)"""
    fuses_pointwise: bool = False
    """sums and casts before and behind norms and products are part of other kernels"""
    norm: Callable[[Shapes, NormPlace], Node] | None = None
    """a norm in one kernel with the sums before it and behind it, where the stack has such"""
    latent_rotation: tuple[tuple[Traffic, ...], tuple[Traffic, ...]] | None = None
    """``rotation`` of latent attention, where it is another"""
    positions: Callable[[Shapes], Node] | None = None
    """queries and keys turned by their positions as attention reads them, in place of ``rotation``"""
    masks_by_bias: Callable[[Shapes], bool] = never
    """attention reads its mask as a bias of all scores, and a key and a value for each head"""
    falls_back_to_steps: Callable[[Shapes], bool] = never
    """attention runs in steps although a fused kernel is asked for, which there is none of"""
    caps_by_operations: bool = False
    """logits are divided, capped and multiplied by a kernel each (``model.logit_softcap``)"""
    forms_in_steps: tuple[str, ...] = ()
    """keys of ``model`` for forms of attention that it also has in steps"""
    caps_in_fused_kernel: bool = True
    """fused attention caps scores where the model does (``model.attention_softcap``)"""
    before_attention: Callable[[Shapes], Node] = nothing
    """kernels of a layer right before fused attention, and what they leave for it"""
    returns_logits: Callable[[str], bool] | None = None
    """logits of models with such positions are an output, whose gradient of zeros the compiled loss adds its own to"""
    online_softmax: bool = False
    """a compiled loss finds the maximum and the sum of a row in one kernel"""
    compiles_loss_apart: bool = False
    """a compiled loss is a graph of its own, without the projection to the vocabulary"""
    copies_heads_by_element: bool = False
    """copies of keys and values to all heads, and of a token's heads side by side, have no vector loads (class rope)"""
    repeats_keys: bool = False
    """keys and values are copied to all query heads that share them before a fused attention kernel"""
    keeps_gathered_inputs: bool = False
    """with sequence parallelism autograd keeps the gathered input of a product, which is not gathered again"""
    gathers_by_product: bool = False
    """products that read the same rows can gather them each for itself (``parallelism.gather_per_product``)"""
    gathers_logits: bool = False
    """ranks of a split vocabulary all have the logits of the whole before an eager loss"""
    copies_gathered: bool = False
    """rows that tensor-parallel ranks gather are put in order by a copy, and those that they scatter before"""
    work_on_dtensors: tuple[str, ...] = ()
    """kinds of the host's work (`simulator.costs.launch`) on split weights that pass through DTensor's Python code"""
    pads_products: bool = False
    """sizes of products are padded to what fast kernels need"""
    keeps_log_softmax: bool = False
    """an eager loss keeps the logarithm of the softmax, not the softmax, which is worked on in place"""
    keeps_split_log_softmax: bool = False
    """so does one over a vocabulary that is split over ranks"""
    rms_norm_by_operations: Callable[[Shapes, NormPlace], Node] | None = None
    """RMSNorm without a kernel of its own, where the stack has such"""
    fuses_residual_and_norm: bool = False
    """a sum and the norm after it are one kernel, each way"""
    adds_bias_after_sums: bool = False
    """a bias that waits for a sum over ranks is added by a kernel of its own"""
    adds_qkv_bias: bool = False
    """so is the bias of the product that makes queries, keys and values"""
    joined_qkv_kernel: Callable[[Shapes], str] = in_order
    """class of the kernel that joins the gradients of queries, keys and values"""
    updates_by_tensor: bool = False
    """norms, clipping and copies around an optimizer's step are kernels on one tensor after another"""
    recompute_ends_before: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """operations of a layer without dropout before which running it again ends: of a whole layer, of a split one"""
    stages: StageRuntime = MEGATRON_STAGES
    """how pipeline stages run"""
    adapter_kinds: tuple[str, ...] = ("lora",)
    """kinds of adapters that it has (`simulator.adapters`)"""

    by_operations: tuple[tuple[UnfusedPart, Callable[[Framework], Framework]], ...] = ()
    """parts that have a fused kernel, and the stack without it (``training.unfused``)"""
    before: tuple[EarlierDefaults, ...] = ()
    """defaults of early versions"""
    compiled: Framework | None = None
    """the stack under torch.compile, where that is modelled"""
    split: Framework | None = None
    """the stack where tensor parallelism splits layers, where that is another"""

    @property
    def rotates_by_operations(self) -> bool:
        """True where positions are applied by several operations, not by a kernel."""
        return len(self.rotation[0]) > 1

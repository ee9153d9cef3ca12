"""Megatron-Core with the kernels of Transformer Engine and Apex: most operations between two products are one kernel.

Gradients are parts of one buffer that is always there, and products add to it (Apex's fused accumulation).
Source: github.com/NVIDIA/Megatron-LM, megatron/core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simulator.frameworks import (
    fused_kernels,
    lora,
    megatron_deep_ep,
    megatron_experts,
    megatron_hybrid_ep,
    megatron_rotation,
    te_permutation,
)
from simulator.frameworks.framework import ExpertHooks, Framework, JobTraits, Replication
from simulator.frameworks.layout_habits import LayoutHabits
from simulator.frameworks.token_travel import Surroundings
from simulator.operations.dropout import dropout
from simulator.operations.experts import Experts
from simulator.operations.nodes import Node, Ops, Tensor, memory
from simulator.operations.shapes import Shapes
from simulator.units import DTYPE_BYTES


def joined_qkv_width(shapes: Shapes) -> int:
    """Return 0 where the fused attention kernel writes the three gradients side by side (TransformerEngine)."""
    return 0 if shapes.attention == "flash" else shapes.q_width + 2 * shapes.kv_width


def softmax(shapes: Shapes, elements: int) -> tuple[Node, Node]:
    """Return scale, causal mask and softmax in one kernel (scaled_upper_triang_masked_softmax).

    It reads the lower triangle only and writes the whole square. Under a sliding window the general kernel reads all.
    """
    square = float(shapes.element * elements)
    read = square if shapes.window else square / 2
    probs = Node(
        forward=(memory("F", "attn.softmax", "softmax", read, square, shapes.dtype, shapes.seq),),
        input_grad=(memory("B", "attn.softmax bwd", "softmax_bwd", 2 * read, square, shapes.dtype, shapes.seq),),
        saved=(Tensor("attn.probs", square),),
        grad_bytes=2 * square,
    )
    drop = dropout(shapes, "attn.probs dropout", elements, mask="attn.probs mask") if shapes.dropout else Node()
    return probs, drop


def buckets(job: JobTraits) -> Mapping[str, object]:
    """Return the default of buckets that are reduced beside the backward pass, by all-reduce.

    Parameters are counted (core/distributed/distributed_data_parallel.py). Many replicas have larger buckets, so that a
    collective's bytes outweigh its latency.
    """
    parameters = max(40_000_000, 1_000_000 * job.replicas)
    return {"parallelism.bucket_bytes": parameters * DTYPE_BYTES[job.grad_dtype]} if job.reduces_beside else {}


def defaults(job: JobTraits) -> Mapping[str, object]:
    """Return defaults of Megatron-Core with Apex, which has had the fused accumulation since March 2022.

    Experts are split as other layers are (model_parallel_config.py, ``expert_tensor_parallel_size``). Where that does
    not fit the ranks, Megatron-Core asks for another size, and here each expert is whole.
    """
    etp: dict[str, object] = {"parallelism.etp": job.etp} if job.experts else {}
    return {
        **etp,
        "training.gradient_accumulation_fusion": True,
        **buckets(job),
        "training.loss.name": "vocab_parallel",
        **job.threads_of_torchrun,
    }


def replication(job: JobTraits) -> Replication:
    """Return the fact that every micro-batch adds its gradients to a buffer, which replicas reduce in place."""
    return Replication()


def sent_once(shapes: Shapes, experts: Experts) -> Surroundings:
    """Return the work around the transfers of HybridEP or of DeepEP."""
    if experts.dispatcher == "hybridep":
        return megatron_hybrid_ep.surroundings(shapes, experts)
    return megatron_deep_ep.surroundings(shapes, experts)


def permuted_by(fused: ExpertHooks) -> ExpertHooks:
    """Return the hooks of experts whose tokens ``fused`` permutes, or PyTorch without ``--moe-permute-fusion``."""

    def permuting(experts: Experts) -> ExpertHooks:
        return megatron_experts.EXPERTS if experts.permutes_by_operations else fused

    def counted(experts: Experts) -> tuple[Ops, Ops]:
        kernels = permuting(experts).counted
        return kernels(experts) if kernels else ((), ())

    return replace(
        fused_kernels.EXPERTS,
        sort=lambda experts: permuting(experts).sort(experts),
        chunks=lambda experts: permuting(experts).chunks(experts),
        permute=lambda shapes, experts: permuting(experts).permute(shapes, experts),
        unpermute=lambda shapes, experts: permuting(experts).unpermute(shapes, experts),
        kept_by_dispatch=lambda shapes, experts: permuting(experts).kept_by_dispatch(shapes, experts),
        activation=megatron_experts.weighted,
        sorts_alone=True,
        biased=megatron_experts.biased,
        counted=counted,
        sends_probabilities=True,
        sent_once=sent_once,
    )


def routed_by_operations(stack: Framework) -> Framework:
    """Return the stack with PyTorch's kernels in routers, Megatron-Core's default (``moe_router_fusion`` false)."""
    return replace(stack, experts=replace(stack.experts, router=megatron_experts.router))


def rotated_by_operations(stack: Framework) -> Framework:
    """Return the stack with PyTorch's kernels for rotary positions (``apply_rope_fusion`` false)."""
    latent = megatron_rotation.LATENT_ROTATION
    return replace(stack, rotation=megatron_rotation.ROTATION, latent_rotation=latent)


def biased_by_operations(stack: Framework) -> Framework:
    """Return the stack whose bias of queries, keys and values is added by a kernel behind their product.

    Megatron-LM's own linear layers do so (``LinearWithGradAccumulationAndAsyncCommunication`` of
    tensor_parallel/layers.py). Other biases are added by the kernels of activations and dropout.
    """
    return replace(stack, adds_qkv_bias=True)


EXPERTS = permuted_by(te_permutation.EXPERTS)
FRAMEWORK = Framework(
    name="megatron_core",
    about="Megatron-Core, with kernels of Transformer Engine and Apex",
    launch_section="megatron",
    habits=LayoutHabits((0, 1), ("none", "selective", "full"), one_stage=False),
    memory_sections=("eager", "fused"),
    defaults=defaults,
    losses=("vocab_parallel", "te_fused", "eager"),
    adds_in_products=True,
    activation=fused_kernels.activation,
    rotation=fused_kernels.ROTATION,
    joined_qkv_width=joined_qkv_width,
    softmax=softmax,
    residual=fused_kernels.residual,
    embedding_mask=fused_kernels.embedding_mask,
    experts=EXPERTS,
    has_core_experts=True,
    captures_graphs=True,
    rings_in_one_call=True,  # transformer_engine/common/comm_gemm_overlap, `split_overlap_ag` and `split_overlap_rs`
    adapters=lora.ADAPTERS,
    replication=replication,
    by_row="residual",
    by_operations=(
        ("qkv_bias", biased_by_operations),
        ("rotation", rotated_by_operations),
        ("router", routed_by_operations),
    ),
)

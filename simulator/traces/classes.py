"""Classes of kernels: one classifier for kernels by name, and one for rows of a simulated Timeline.

Runs on a GPU machine import this module, so that it needs the standard library alone.
"""

from __future__ import annotations

from typing import NamedTuple

#: In the order of tables and legends. Sends and receives of pipelines are a class of their own.
CLASSES = ("matmul", "attention", "memory", "optimizer", "communication", "hand-over", "copy")
#: Classes whose kernels wait for other ranks.
EXCHANGES = ("communication", "hand-over")

#: Parts of kernels' names, in the order in which they decide.
_ATTENTION = ("sdpa", "flash", "fmha", "compute_dot_do_o", "convert_dq", "attn_fwd", "attn_bwd")
_MATMUL = (
    "gemm",
    "nvjet",
    "cutlass",
    "xmma",
    "cublas",
    "splitk",
    "cijk_",  # Tensile, the kernels of rocBLAS and hipBLASLt
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
)
#: A library of embeddings, whose kernels are no products although its name says so.
_LIBRARY = "fbgemm"
#: A part of names of an optimizer's fused kernels, wherever they run.
_OPTIMIZER = "adam"
#: Parts of names of communication: NCCL and RCCL (whose kernels have NCCL's names), PyTorch's calls on the host, MSCCL,
#: DeepEP (namespace ``deep_ep``; ``dpsk::ep`` in DeepSeek's published trace), NVSHMEM, and PyTorch's symmetric memory.
_COMMUNICATION = ("nccl", "rccl", "mscclkernel", "c10d::", "deep_ep::", "dpsk::ep::", "nvshmem", "symm_mem")
#: Communication of two ranks: a send, a receive, or both at once. Traces do not name the other end.
TRANSFER = "send_recv"
#: Part of a name without underscores -> the operation; ``reducescatter`` stands before ``reduce``.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "::dispatch": "all_to_all",
    "::combine": "all_to_all",
    "notify": "barrier",
    "barrier": "barrier",
    "sendrecv": TRANSFER,
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": TRANSFER,
    "recv": TRANSFER,
}
#: Description of a process group -> the parallelism that it serves. First those of this project's trainer.
_KINDS = {
    "tensor": "tp", "data": "dp", "pipeline": "pp", "expert": "ep", "model": "tp", "context": "cp",
    # Megatron-Core: ``group_desc`` in megatron/core/parallel_state.py.
    "TENSOR_MODEL_PARALLEL_GROUP": "tp", "PIPELINE_MODEL_PARALLEL_GROUP": "pp", "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp", "DATA_PARALLEL_GROUP_WITH_CP": "dp", "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "tp", "EXPERT_DATA_PARALLEL_GROUP": "dp",
    # PyTorch: ``mesh_`` and the name of a dimension (torch/distributed/device_mesh.py), those that torchtitan has
    # (torchtitan/distributed/parallel_dims.py).
    "mesh_pp": "pp", "mesh_tp": "tp", "mesh_cp": "cp", "mesh_ep": "ep", "mesh_dp": "dp", "mesh_dp_replicate": "dp",
    "mesh_dp_shard": "dp",
}  # fmt: skip
_PRODUCTS = ("matmul", "grouped_matmul")


class KernelClass(NamedTuple):
    """The class of a kernel; of communication also its parallelism and operation, empty where they are not told."""

    name: str
    kind: str = ""
    operation: str = ""


def operation_of(text: str) -> str:
    """Return the operation that a name of communication tells; empty where it tells none.

    >>> operation_of("_allgather_base"), operation_of("recv"), operation_of("wait")
    ('all_gather', 'send_recv', '')
    """
    flat = text.lower().replace("_", "")
    return next((operation for part, operation in _OPERATIONS.items() if part in flat), "")


def parallelism_of(group: str, collective: str) -> str:
    """Return the parallelism that a communication serves; empty where it is not told.

    ``group`` and ``collective`` are those of `kernel_class`. Sends and receives of a group without a description are a
    pipeline's. Kernels' names do not tell them, for NCCL runs an all-to-all in the kernel of sends too.

    >>> parallelism_of("mesh_cp", "send"), parallelism_of("undefined", "send"), parallelism_of("undefined", "gather")
    ('cp', 'pp', '')
    """
    return _KINDS.get(group) or ("pp" if operation_of(collective) == TRANSFER else "")


def kernel_class(name: str, *, collective: str = "", group: str = "", updates: bool = False) -> KernelClass:
    """Return the class of the kernel ``name``.

    ``collective`` and ``group`` are what its arguments say under "Collective name" and "Process Group Description".
    ``updates``: it runs inside an optimizer's step.

    >>> kernel_class("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    KernelClass(name='communication', kind='', operation='all_gather')
    >>> kernel_class("Memcpy DtoH (Device -> Pageable)").name, kernel_class("Memcpy DtoD (Device -> Device)").name
    ('copy', 'memory')
    """
    lower = name.lower()
    if collective or any(part in lower for part in _COMMUNICATION):
        operation = operation_of(collective) or operation_of(name)
        return KernelClass("communication", parallelism_of(group, collective), operation)
    if lower.startswith("memcpy") and "dtod" not in lower.replace(" ", ""):
        return KernelClass("copy")
    if updates or _OPTIMIZER in lower:
        return KernelClass("optimizer")
    if any(part in lower for part in _ATTENTION):
        return KernelClass("attention")
    products = lower.replace(_LIBRARY, "")
    return KernelClass("matmul" if any(part in products for part in _MATMUL) else "memory")


def with_hand_over(name: str, kind: str) -> str:
    """Return the class ``name``; communication of a pipeline (``kind`` pp) is ``hand-over``."""
    return "hand-over" if name == "communication" and kind == "pp" else name


def simulated_class(kind: str, category: str) -> str:
    """Return the class of a row of a simulated Timeline, from its ``kind`` and ``category`` (`Timeline.frame`)."""
    if category in ("compute", "recompute"):
        return "matmul" if kind in _PRODUCTS else "attention" if kind == "attention" else "memory"
    return {"optimizer": "optimizer", "pp": "hand-over", "offload": "copy"}.get(category, "communication")

"""Section `gpu_spec` of a calibration profile: the GPU itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from simulator.hardware.figures import Figure
from simulator.hardware.kernels import MatrixDtype


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """The GPU itself."""

    vendor: Literal["nvidia", "amd"] = "nvidia"
    """whose: collectives run on its library, NCCL or RCCL, and these do not talk to each other"""
    sms: Annotated[int, Gt(0)]
    """streaming multiprocessors"""
    threads_per_sm: Annotated[int, Gt(0)] = 2048
    """resident at most: 1536 on GPUs of compute capability 8.6, 8.9 and 12.0, 1024 on 7.5 (CUDA C++ Programming Guide,
    table of technical specifications)"""
    peak_flops_per_s: dict[MatrixDtype, Figure]
    """dense matrix FLOP/s by type; fp32 is TF32, unless ``has_tf32`` is false"""
    has_tf32: bool = True
    """matrix units multiply fp32 as TF32: from Ampere on (NVIDIA A100 Tensor Core GPU Architecture, 2020)"""
    fp32_flops_per_s: Figure | None = None
    """FLOP/s of fp32 on CUDA cores, where PyTorch is not asked for TF32"""
    memory_bandwidth_Bps: Figure
    """bytes/s of the device memory"""
    memory_bytes: Figure
    """what the device reports, not the GB on its label"""
    blas_workspace_bytes: Annotated[int, Ge(0)] = 8_519_680
    """what PyTorch's allocator keeps for products of one thread: 32 MiB on GPUs of compute capability 9 and 10, 128 MiB
    on gfx94, else as given (aten/src/ATen/cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``)"""

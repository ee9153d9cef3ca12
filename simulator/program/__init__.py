"""Who does what, in what order: the input of the engine, free of models, files and plots."""

from simulator.program.kernels import Attention, Fixed, GroupedMatmul, Kernel, Matmul, Memory
from simulator.program.ops import Batch, Beside, Block, Comm, Compute, Program, ProgramError, Role, Step

__all__ = [
    "Attention",
    "Batch",
    "Beside",
    "Block",
    "Comm",
    "Compute",
    "Fixed",
    "GroupedMatmul",
    "Kernel",
    "Matmul",
    "Memory",
    "Program",
    "ProgramError",
    "Role",
    "Step",
]
